"""`lines`: how many lines of a plain PyTorch script change until the Trainer runs it.

The two scripts of the examples are compared line by line. Each place where they differ counts by
the larger number of lines, removed or added. The docstring of a script does not count, nor do empty
lines.
"""

import ast
from difflib import SequenceMatcher
from pathlib import Path

import polyrhythm
from polyrhythm.errors import LaunchError

PLAIN, TRAINER = "plain.py", "trainer.py"


def examples() -> Path:
    """Return the folder of the example scripts."""
    folder = Path(polyrhythm.__file__).parents[1] / "examples"
    if not (folder / PLAIN).is_file():
        raise LaunchError(
            f"no {PLAIN} in {folder}",
            expected="the examples, which are in the repository and not in the package",
            fix="run the benchmark from a checkout: make venv, then .venv/bin/polyrhythm bench",
        )
    return folder


def lines_to_change() -> int:
    folder = examples()
    return num_changed(*((folder / name).read_text() for name in (PLAIN, TRAINER)))


def num_changed(before: str, after: str) -> int:
    old, new = counted_lines(before), counted_lines(after)
    changes = SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in changes if tag != "equal")


def counted_lines(script: str) -> list[str]:
    lines, first = script.splitlines(), ast.parse(script).body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines = lines[first.end_lineno :]
    return [line.rstrip() for line in lines if line.strip()]

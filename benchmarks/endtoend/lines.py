"""`lines`: how many lines of a plain PyTorch script change until the Trainer runs it.

The two scripts of the examples are compared line by line. Of each place where they differ, the
larger number counts: of the lines that go, or of those that come. The docstring that says what a
script is does not count, nor do empty lines.
"""

import ast
from difflib import SequenceMatcher, unified_diff
from pathlib import Path

import polyrhythm
from polyrhythm.errors import LaunchError

PLAIN, TRAINER = "plain.py", "trainer.py"


def examples() -> Path:
    """The folder of examples, which comes with the source."""
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
    return changed(*((folder / name).read_text() for name in (PLAIN, TRAINER)))


def changed(before: str, after: str) -> int:
    old, new = counted(before), counted(after)
    found = SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in found if tag != "equal")


def counted(script: str) -> list[str]:
    """The lines of a script that count."""
    lines, first = script.splitlines(), ast.parse(script).body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines = lines[first.end_lineno :]
    return [line.rstrip() for line in lines if line.strip()]


def shown(before: str, after: str) -> list[str]:
    """What changes, as `diff` shows it, without its places and what stays."""
    found = unified_diff(counted(before), counted(after), n=0, lineterm="")
    return [line for line in list(found)[2:] if not line.startswith("@@")]

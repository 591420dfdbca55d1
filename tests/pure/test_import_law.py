"""The import law: imports go one way, neighbours do not import each other, torch only in run/."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyrhythm

PACKAGE = Path(polyrhythm.__file__).parent
TESTS = Path(__file__).parents[1]

# A part may import parts of a lower tier and itself; parts of one tier are neighbours.
TIERS = [
    {"types", "errors", "events", "processes", "tables", "jit", "renamed"},
    {"sinks", "worker_registry", "preemption_notice"},
    {"describe"},
    {"cost"},
    {"schedule"},
    {"plan", "sync"},
    {"run", "simulate", "lab", "observe"},
    {"cli"},
    {"__init__", "__main__"},  # the public names and the command
]
TIER = {part: tier for tier, parts in enumerate(TIERS) for part in parts}
VOCABULARY = TIERS[0]  # these few build on one another
OUTSIDE = {"benchmarks", "reproduction"}  # import the package, never the other way
TORCH_ALLOWED = ("run/", "describe/measure.py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or ""
            # `from polyrhythm import run` names a part too
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def violations(path: Path, imported: Iterator[str]) -> list[str]:
    here = part_of(path)
    relative = path.relative_to(PACKAGE).as_posix()
    found = []
    for name in imported:
        names = name.split(".")
        if names[0] in OUTSIDE:
            found.append(f"{relative} imports {name}")
        if names[0] == "torch" and not relative.startswith(TORCH_ALLOWED):
            found.append(f"{relative} imports torch")
        if names[0] != "polyrhythm" or len(names) < 2 or names[1] not in TIER:
            continue
        there = names[1]
        same = here == there or {here, there} <= VOCABULARY
        if not same and TIER[there] >= TIER[here]:
            found.append(f"{relative} imports {name}")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_imports_point_down_only(path: Path) -> None:
    assert part_of(path) in TIER, "a new part needs a tier"
    assert violations(path, imports(path)) == []


@pytest.mark.parametrize(
    ("file", "imported"),
    [
        ("schedule/x.py", "polyrhythm.plan.plan"),
        ("observe/x.py", "polyrhythm.run.demo.train"),
        ("describe/x.py", "polyrhythm.cost"),
        ("sinks/x.py", "polyrhythm.describe.units"),
        ("sync/x.py", "polyrhythm.plan.plan"),
        ("errors.py", "polyrhythm.describe.units"),
        ("sync/x.py", "torch.distributed"),
        ("lab/x.py", "polyrhythm.cli"),
        ("cli/x.py", "benchmarks.registry"),
        ("simulate/x.py", "reproduction.paper_row"),
    ],
)
def test_violations_are_detected(file: str, imported: str) -> None:
    assert violations(PACKAGE / file, iter([imported]))


def test_pure_tests_need_no_torch() -> None:
    for path in (TESTS / "pure").rglob("*.py"):
        assert not any(name.split(".")[0] == "torch" for name in imports(path)), path


def test_test_file_names_are_unique() -> None:
    """Pytest cannot collect two test files of the same name."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)

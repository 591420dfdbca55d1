"""Print how the tree measures up to its own rules, and fail when a bar is missed.

`make structure` (part of `make check`): size of the package, class names that are defined twice,
words that the project's vocabulary has replaced, imports between test modules.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "polyrhythm"
EVIDENCE = ("benchmarks", "reproduction")
CODE = (PACKAGE, *EVIDENCE, "tests", "examples", "tools")

MAX_PACKAGE_LINES = 46_000
MAX_TOTAL_LINES = 60_000
MAX_DUPLICATE_CLASSES = 5

# Words that have a counterpart which PyTorch users search for: no name may contain them.
REPLACED_NAMES = {
    "alive": "heartbeat",
    "beat": "heartbeat",
    "beats": "heartbeat",
    "begun": "started",
    "beside": "background",
    "board": "JobStore",
    "boss": "driver",
    "brief": "header",
    "comings": "joins",
    "consolidate": "average_all",
    "crew": "worker pool",
    "dealer": "sampler, balancer or zmq socket",
    "dealing": "sampler",
    "deals": "sample requests",
    "dealt": "acquired",
    "desk": "server",
    "dispense": "dispatch",
    "dispenser": "SampleDispatcher",
    "dispensing": "dispatch",
    "door": "socket",
    "foreseen": "what-if replay",
    "gathering": "average_all",
    "halves": "reduce-scatter, all-gather",
    "handover": "transfer",
    "heal": "copy from",
    "healed": "copied",
    "hear": "receive",
    "heard": "received",
    "keeping": "checkpointer",
    "lord": "user namespace",
    "meeting": "rendezvous or round",
    "mend": "repair",
    "mended": "repaired",
    "mending": "repair",
    "mishap": "fault",
    "mishaps": "faults",
    "nested": "hierarchical",
    "patience": "timeout",
    "punctual": "on time",
    "punctuality": "timing",
    "recipe": "ScheduleSpec",
    "residents": "host processes",
    "rival": "baseline",
    "seat": "session, rank",
    "seats": "sessions, ranks",
    "silence": "timeout",
    "standing": "weight stashing",
    "storm": "heterogeneous cluster",
    "stormy": "heterogeneous cluster",
    "tallied": "progress",
    "tally": "progress",
    "tell": "broadcast",
    "telling": "broadcast",
    "told": "received",
    "turn": "round, switch",
    "turns": "rounds, switches",
    "way": "sync mode",
    "ways": "sync modes",
}
# The same in prose: words that have no other use in this field.
REPLACED_PROSE = {
    "crew", "desk", "dispenser", "foreseen", "mishap", "mishaps", "patience", "rival", "roll call",
    "told", "punctual", "keep together", "keeps together", "kept together", "comes together",
}  # fmt: skip
# Names in which a replaced word means something else.
ALLOWED_NAMES = {
    "alive": {"alive", "is_alive", "num_alive"},  # a process or thread that runs, as in threading
    "dealer": {"DealerSocket", "DEALER", "dealer_socket", "_dealer"},  # zmq's own word
    "nested": {"nested", "Nested"},  # dicts and lists in one another
    "way": {"one_way"},  # one-way latency
    "ways": {"both_ways", "_both_ways"},  # both directions of a link
}
# In a sentence, as the name of a test is one, "beats" means "is faster than".
ALLOWED_IN_TEST_NAMES = {"beats"}


def main() -> None:
    rows = [
        _lines_row(),
        _total_row(),
        _classes_row(),
        _names_row(),
        _prose_row(),
        _test_imports_row(),
        ("test functions", str(sum(1 for _ in _test_functions())), "", True, []),
    ]
    width = max(len(name) for name, *_ in rows)
    for name, measured, bar, is_met, details in rows:
        print(f"{name:<{width}}  {measured:>8}  {bar:<10}  {'' if is_met else 'MISSED'}")
        for detail in details:
            print(f"    {detail}")
    if not all(is_met for *_, is_met, _ in rows):
        sys.exit(1)


_Row = tuple[str, str, str, bool, list[str]]


def _lines_row() -> _Row:
    lines = _num_lines(PACKAGE)
    bar = f"<= {MAX_PACKAGE_LINES}"
    return "lines of the package", str(lines), bar, lines <= MAX_PACKAGE_LINES, []


def _total_row() -> _Row:
    lines = sum(_num_lines(folder) for folder in (PACKAGE, *EVIDENCE))
    bar = f"<= {MAX_TOTAL_LINES}"
    name = "lines with benchmarks and reproduction"
    return name, str(lines), bar, lines <= MAX_TOTAL_LINES, []


def _classes_row() -> _Row:
    places = defaultdict(list)
    for path, tree in _trees(PACKAGE):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    details = [f"{name}: {', '.join(paths)}" for name, paths in sorted(twice.items())]
    is_met = len(twice) <= MAX_DUPLICATE_CLASSES
    bar = f"<= {MAX_DUPLICATE_CLASSES}"
    return "public class names defined more than once", str(len(twice)), bar, is_met, details


def _names_row() -> _Row:
    found = []
    for path, tree in _trees(*CODE):
        for line, name in (*_names(tree), (1, Path(path).stem)):
            for word in _words(name):
                if word in REPLACED_NAMES and not _is_allowed(name, word):
                    found.append(f"{path}:{line}: {name}: use {REPLACED_NAMES[word]}")
    unique = sorted(set(found))
    return "replaced words in names", str(len(unique)), "0", not unique, unique


def _is_allowed(name: str, word: str) -> bool:
    is_test = name.startswith("test_")
    return name in ALLOWED_NAMES.get(word, ()) or (is_test and word in ALLOWED_IN_TEST_NAMES)


def _prose_row() -> _Row:
    pattern = re.compile(rf"\b({'|'.join(sorted(REPLACED_PROSE))})\b", re.IGNORECASE)
    found = []
    for path in _tracked("*.py", "*.md"):
        if path.startswith("tools/") or path == "CHANGELOG.md":
            continue  # they name the replaced words themselves
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            found += [f"{path}:{number}: {match[0]}" for match in pattern.finditer(line)]
    return "replaced words in prose", str(len(found)), "0", not found, found


def _test_imports_row() -> _Row:
    found = []
    for path, tree in _trees("tests"):
        for node in ast.walk(tree):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and re.match(r"tests\.(\w+\.)*test_", module):
                found.append(f"{path}:{node.lineno}: {module}")
    return "imports between test modules", str(len(found)), "0", not found, found


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every identifier that the file defines: functions, classes, arguments, variables, fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _words(name: str) -> list[str]:
    """Split snake_case and CamelCase."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def _test_functions() -> Iterator[str]:
    for path, tree in _trees("tests"):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                yield f"{path}::{node.name}"


def _trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for path in _tracked("*.py"):
        if path.split("/")[0] in folders:
            yield path, ast.parse((ROOT / path).read_text())


def _num_lines(folder: str) -> int:
    return sum(
        len((ROOT / path).read_text().splitlines())
        for path in _tracked("*.py")
        if path.startswith(f"{folder}/")
    )


def _tracked(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(path for path in listed.stdout.split() if (ROOT / path).is_file())


if __name__ == "__main__":
    main()

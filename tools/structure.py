"""Print how the tree measures up to its own rules, and fail when a bar is missed.

`make check` and `make structure`: size of the package, of its modules and functions, places that
unpickle, class names that are defined twice, words that the project's vocabulary has replaced,
imports between test modules. What only a running job shows is in `files_passed.py`.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "polyrhythm"
EVIDENCE = ("benchmarks", "reproduction")
CODE = (PACKAGE, *EVIDENCE, "tests", "examples", "tools")

# Lines of the package, with benchmarks and reproduction, and files in run/: what the tree had when
# it was restructured, and what each feature since then may add. A feature that needs more says so.
_RESTRUCTURED = (44_800, 59_000, 80)
_FEATURES = {
    "the same result for any partition, sync mode and restart": (3_300, 5_800, 0),
    "Hugging Face models, found splits, evaluation, metrics, data loaders": (5_600, 6_600, 7),
    "GPUs: NCCL, float16, recomputed activations, steps that do not wait": (4_700, 7_200, 0),
    "workers may be lost: epochs, copies of shards, state that moves": (4_300, 5_000, 9),
    "losses in groups, broken links, leaves, every launcher, the simulator's": (4_900, 4_800, 3),
    "layers are divided anew after a loss": (700, 700, 2),
    "a coordinator's logs are rotated, and lead to its state": (850, 850, 0),
    "micro-batches are routed around a lost stage: decision, order, simulator": (950, 950, 0),
    "lost processes join again, and the coordinator is started again": (700, 800, 1),
}
MAX_PACKAGE_LINES, MAX_TOTAL_LINES, MAX_RUN_FILES = (
    sum(numbers) for numbers in zip(_RESTRUCTURED, *_FEATURES.values(), strict=True)
)
SMALL_MODULE_LINES = 60
MAX_SMALL_MODULES = 10
MAX_BODY_LINES = 60
MAX_DUPLICATE_CLASSES = 5

# Unpickling runs code that whoever wrote the bytes has chosen. These modules do little else;
# a checkpoint of torch.distributed has a pickled index.
PICKLE_MODULES = {
    "pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve",
    "multiprocessing.managers", "multiprocessing.pool", "multiprocessing.queues",
    "multiprocessing.reduction", "torch.distributed.checkpoint", "torch.distributed.rpc",
    "torch.hub", "torch.multiprocessing", "torch.package",
}  # fmt: skip
# By the last part of the name: of torch.distributed, and of multiprocessing or a context of it.
OBJECT_COLLECTIVES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list",
    "scatter_object_list", "send_object_list", "_tensor_to_object",
}  # fmt: skip
PROCESS_QUEUES = {"JoinableQueue", "Manager", "Pool", "ProcessPoolExecutor", "Queue", "SimpleQueue"}
THREAD_QUEUES = ("queue.", "asyncio.", "multiprocessing.dummy.")
UNPICKLING_METHODS = {"read_pickle", "recv_pyobj"}  # of pandas, and of a zmq socket
# Converts checkpoints of earlier versions, which were pickled, when a user asks for it by name.
UNPICKLES_BY_REQUEST = "polyrhythm/run/checkpoint/legacy.py"
# Numba's cache of machine code is pickled; one place turns it on. It comes from no other machine,
# and who can write into its folder can run code anyway. `files_passed.py` counts its reads.
ALLOWED_CACHE = ("polyrhythm/jit.py", "numba.njit(cache=True)")

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
    "crew", "desk", "dispenser", "foreseen", "mishap", "mishaps", "rival", "roll call",
    "told", "punctual", "keep together", "keeps together", "kept together", "comes together",
}  # fmt: skip
# Names in which a replaced word means something else.
ALLOWED_NAMES = {
    "alive": {"alive", "is_alive", "num_alive"},  # a process or thread that runs, as in threading
    "board": {"TensorBoard"},  # a product
    "dealer": {"DealerSocket", "DEALER", "dealer_socket", "_dealer"},  # zmq's own word
    "nested": {"nested", "Nested"},  # dicts and lists in one another
    "way": {"one_way"},  # one-way latency
    "ways": {"both_ways", "_both_ways"},  # both directions of a link
}
# In a sentence, as the name of a test is one, "beats" means "is faster than".
ALLOWED_IN_TEST_NAMES = {"beats"}


def main() -> None:
    rows: list[Row] = [
        _lines_row(),
        _total_row(),
        _run_files_row(),
        _small_modules_row(),
        _bodies_row(),
        _unpickling_row(),
        _classes_row(),
        _names_row(),
        _prose_row(),
        _test_imports_row(),
        ("test functions", str(sum(1 for _ in _test_functions())), "", True, []),
    ]
    if not print_rows(rows):
        sys.exit(1)


Row = tuple[str, str, str, bool, list[str]]  # measure, value, bar, is the bar met, details


def print_rows(rows: list[Row]) -> bool:
    """Print the rows; return whether every bar is met."""
    width = max(len(name) for name, *_ in rows)
    for name, measured, bar, is_met, details in rows:
        print(f"{name:<{width}}  {measured:>8}  {bar:<10}  {'' if is_met else 'MISSED'}")
        for detail in details:
            print(f"    {detail}")
    return all(is_met for *_, is_met, _ in rows)


def _lines_row() -> Row:
    lines = _num_lines(PACKAGE)
    bar = f"<= {MAX_PACKAGE_LINES}"
    return "lines of the package", str(lines), bar, lines <= MAX_PACKAGE_LINES, []


def _total_row() -> Row:
    lines = sum(_num_lines(folder) for folder in (PACKAGE, *EVIDENCE))
    bar = f"<= {MAX_TOTAL_LINES}"
    name = "lines with benchmarks and reproduction"
    return name, str(lines), bar, lines <= MAX_TOTAL_LINES, []


def _run_files_row() -> Row:
    num_files = len(_tracked(f"{PACKAGE}/run/*.py"))
    return "files in run/", str(num_files), f"<= {MAX_RUN_FILES}", num_files <= MAX_RUN_FILES, []


def _small_modules_row() -> Row:
    """Count short modules with a single importer, in the same folder: they belong into it."""
    trees = dict(_trees(PACKAGE))
    importers = defaultdict(set)
    for path, tree in trees.items():
        for imported in _imported_modules(tree):
            importers[f"{imported.replace('.', '/')}.py"].add(path)
    found = []
    for path in trees:
        folder, _, name = path.rpartition("/")
        num_lines = len((ROOT / path).read_text().splitlines())
        is_short = num_lines < SMALL_MODULE_LINES and not name.startswith("__")
        if is_short and [p.rpartition("/")[0] for p in importers[path]] == [folder]:
            found.append(f"{path}: {num_lines} lines, imported by {importers[path].pop()}")
    name = f"modules under {SMALL_MODULE_LINES} lines, one importer in the same folder"
    is_met = len(found) <= MAX_SMALL_MODULES
    return name, str(len(found)), f"<= {MAX_SMALL_MODULES}", is_met, found


def _bodies_row() -> Row:
    found = []
    for path, tree in _trees(PACKAGE):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                has_docstring = ast.get_docstring(node, clean=False) is not None
                body = node.body[1:] if has_docstring else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if lines > MAX_BODY_LINES:
                    found.append(f"{path}:{node.lineno}: {node.name}: {lines} lines")
    return f"function bodies over {MAX_BODY_LINES} lines", str(len(found)), "0", not found, found


def _unpickling_row() -> Row:
    found = []
    for path, tree in _trees(PACKAGE):
        for line, what in _unpickling(tree):
            if path != UNPICKLES_BY_REQUEST and (path, what) != ALLOWED_CACHE:
                found.append(f"{path}:{line}: {what}")
    return "places that unpickle", str(len(found)), "0", not found, found


def _unpickling(tree: ast.Module) -> list[tuple[int, str]]:
    """Return lines and full names of what unpickles, whatever name the file gives it."""
    found = set[tuple[int, str]]()
    full_names = dict[str, str]()  # by the name that the file gives them
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                full_name = module + alias.name
                if alias.asname or module:
                    full_names[alias.asname or alias.name] = full_name
                if _is_unpickler(full_name):
                    found.add((node.lineno, f"import {full_name}"))
    safe = set[ast.expr]()  # functions that are named in a call which does not unpickle
    for node in ast.walk(tree):  # a call comes before its function
        if isinstance(node, ast.Call):
            name = _full_name(node.func, full_names)
            found.update((node.lineno, what) for what in _unpickling_call(node, name))
            if name in ("numpy.load", "torch.load"):
                safe.add(node.func)
        elif isinstance(node, ast.Attribute | ast.Name) and node not in safe:
            name = _full_name(node, full_names)
            if _is_unpickler(name) or name in ("numpy.load", "torch.load"):
                found.add((node.lineno, name))
    return sorted(found)


def _full_name(node: ast.expr, full_names: dict[str, str]) -> str:
    """Return `torch.load` for `t.load` after `import torch as t`."""
    if isinstance(node, ast.Attribute):
        name = f"{_full_name(node.value, full_names)}.{node.attr}"
    else:
        name = full_names.get(node.id, node.id) if isinstance(node, ast.Name) else ast.unparse(node)
    return "torch.load" if name == "torch.serialization.load" else name


def _is_unpickler(name: str) -> bool:
    module, _, last = name.rpartition(".")
    if any(f"{name}.".startswith(f"{pickler}.") for pickler in PICKLE_MODULES):
        return True
    if last in PROCESS_QUEUES:
        return bool(module) and not name.startswith(THREAD_QUEUES)
    is_collective = module.startswith("torch.distributed") and last in OBJECT_COLLECTIVES
    return is_collective or last in UNPICKLING_METHODS


def _unpickling_call(call: ast.Call, name: str) -> Iterator[str]:
    """Yield what a call does by its arguments; `name` is the function's."""
    keywords = {word.arg: ast.unparse(word.value) for word in call.keywords}
    last = name.rpartition(".")[2]
    if name == "torch.load" and keywords.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if name == "numpy.load" and (len(call.args) > 2 or None in keywords):
        yield "numpy.load with arguments that may be allow_pickle=True"
    for word in ("allow_pickle", "cache"):
        if keywords.get(word, "False") != "False" and (word != "cache" or "numba" in name):
            yield f"{name}({word}={keywords[word]})"
    # A socket's recv takes a size or flags; a multiprocessing connection's takes nothing.
    if last == "recv" and not call.args and not call.keywords:
        yield f"{name}()"
    if last in ("import_module", "__import__") and call.args:
        imported = call.args[0]
        if isinstance(imported, ast.Constant) and _is_unpickler(str(imported.value)):
            yield f"{name}({imported.value!r})"


def _imported_modules(tree: ast.Module) -> set[str]:
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _classes_row() -> Row:
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


def _names_row() -> Row:
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


def _prose_row() -> Row:
    pattern = re.compile(rf"\b({'|'.join(sorted(REPLACED_PROSE))})\b", re.IGNORECASE)
    found = []
    for path in _tracked("*.py", "*.md"):
        if path.startswith("tools/") or path == "CHANGELOG.md":
            continue  # they name the replaced words themselves
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            found += [f"{path}:{number}: {match[0]}" for match in pattern.finditer(line)]
    return "replaced words in prose", str(len(found)), "0", not found, found


def _test_imports_row() -> Row:
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
            yield path, _parsed(path)


@cache
def _parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


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

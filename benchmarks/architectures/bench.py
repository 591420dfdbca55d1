"""Architectures of transformers, split in 2 without a name given, against the whole model.

All causal language models whose config has a pipeline plan, and others without one, as tiny models
with random weights: outputs and gradients of all parameters must be those of the whole model, or
the model must be refused. Each runs in a process of its own with a timeout, so that an architecture
that crashes or hangs counts as failed.
"""

import importlib
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.architectures import tiny_models
from benchmarks.architectures.compare import Compared, compare
from benchmarks.harness.report import Bar, Result, print_bars, print_rows, progress_printer
from polyrhythm.processes import Child, end_all, wait_for_any
from polyrhythm.types import Seconds

_TIMEOUT: Seconds = 60.0  # of one architecture
_NUM_PROCESSES = 2
_QUICK_PLANNED, _QUICK_OTHERS = ["LlamaConfig"], ["GPT2Config", "T5Config"]
_COMPARED = ("equal", "wrong")  # results with a difference
BARS = (
    Bar("architectures", ">=", 75, "of those with a pipeline plan: equal to the whole model"),
    Bar("architectures_other", ">=", 10, "of those without one: equal to the whole model"),
    Bar("architectures_silent", "<=", 0, "other results than the whole model, and not refused"),
)


def run(*, quick: bool, console: Console) -> Result:
    importlib.import_module("transformers")  # once, before the processes are forked
    planned = _QUICK_PLANNED if quick else tiny_models.planned_architectures()
    others = _QUICK_OTHERS if quick else list(tiny_models.OTHERS)
    rows = _compare_all([*planned, *others], set(planned), progress_printer(console))
    columns: dict[str, Callable[[Compared], str]] = {
        "architecture": lambda row: row.name.removesuffix("Config"),
        "plan": lambda row: "yes" if row.has_plan else "no",
        "result": lambda row: row.result,
        "difference": lambda row: f"{row.difference:.1g}" if row.result in _COMPARED else "",
        "detail": lambda row: row.detail,
    }
    print_rows(console, rows, columns, numbers=False)
    equal = [row for row in rows if row.result == "equal"]
    ratios = {
        "architectures": sum(row.has_plan for row in equal),
        "architectures_other": sum(not row.has_plan for row in equal),
        "architectures_silent": sum(row.result == "wrong" for row in rows),
    }
    print_bars(console, BARS, ratios, quick=quick)
    figures: dict[str, float] = {
        "with_plan": len(planned),
        "others": len(others),
        "refused": sum(row.result == "refused" for row in rows),
        "failed": sum(row.result == "failed" for row in rows),
        "difference": max((row.difference for row in equal), default=0.0),
    }
    return Result(bench="architectures", ratios=ratios, figures=figures, rows=rows)


def _compare_all(
    names: Sequence[str], planned: set[str], show: Callable[[str], None]
) -> list[Compared]:
    """Compare some at a time, each in a process of its own."""
    found = dict[str, Compared]()
    waiting, running = list(reversed(names)), dict[str, tuple[Child, Seconds]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            while waiting or running:
                while waiting and len(running) < _NUM_PROCESSES:
                    started = waiting.pop()
                    work = partial(_save, started, has_plan=started in planned, folder=folder)
                    child = Child(work, output=folder / f"{started}.txt")
                    running[started] = child, time.monotonic() + _TIMEOUT
                wait_for_any([child for child, _ in running.values()], 1.0)
                for done, (child, deadline) in list(running.items()):
                    if child.status is None and time.monotonic() < deadline:
                        continue
                    del running[done]
                    found[done] = _result(done, done in planned, child, folder)
                    show(f"{done}: {found[done].result}")
        finally:
            end_all([child for child, _ in running.values()])
    return [found[name] for name in names]


def _save(name: str, *, has_plan: bool, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    compared = compare(name, has_plan=has_plan)
    (folder / f"{name}.json").write_bytes(msgspec.json.encode(compared))


def _result(name: str, has_plan: bool, child: Child, folder: Path) -> Compared:
    path = folder / f"{name}.json"
    if child.status == 0:
        return msgspec.json.decode(path.read_bytes(), type=Compared)
    reason = f"took more than {_TIMEOUT:g} s" if child.status is None else child.reason
    child.end()
    return Compared(name, has_plan, "failed", detail=reason)

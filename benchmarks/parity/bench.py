"""The same result whatever the cut, the sync mode and the restart.

Facts are counted, no times: which of torch's pipelining tests pass, by how much losses and weights
differ between partitions of one model and one process, which checkpoints a kill loses, which sync
modes produce values that no optimizer may have, and how fast memory grows.
"""

from collections.abc import Callable, Mapping
from functools import partial

from rich.console import Console

from benchmarks.harness.child import in_child
from benchmarks.harness.report import Bar, Result, print_bars, print_rows, progress_printer
from benchmarks.parity import cuts, kill_windows, memory, modes, restores, torch_pipelining
from benchmarks.parity.facts import Fact
from polyrhythm.types import Seconds

_TIMEOUT: Seconds = 900.0  # of a part
BARS = (
    Bar("torch_pipelining", ">=", 1.0, "share of torch's pipelining tests that pass"),
    Bar("torch_pipelining_silent", "<=", 0, "of them: other results than torch's, and no error"),
    Bar("cuts", "<=", 1e-7, "partitions against one process, worst relative difference"),
    Bar("restores", "<=", 1e-7, "after kill -9 and a restore onto another plan, likewise"),
    Bar("kill_windows", "<=", 0, "checkpoints lost by a kill at any file operation of a save"),
    Bar("modes", "<=", 0, "sync modes x optimizers: non-finite, negative moments, double steps"),
    Bar("bytes_per_step", "<=", 16, "growth of a worker's or a coordinator's memory, in bytes"),
)
_PARTS: Mapping[str, Callable[..., list[Fact]]] = {
    "torch_pipelining": torch_pipelining.measure,
    "cuts": cuts.measure,
    "restores": restores.measure,
    "kill_windows": kill_windows.measure,
    "modes": modes.measure,
    "bytes_per_step": memory.measure,
}


def run(*, quick: bool, console: Console) -> Result:
    show = progress_printer(console)
    facts = dict[str, list[Fact]]()
    for name, measure in _PARTS.items():
        show(f"measuring {name}")
        facts[name] = in_child(name, partial(measure, quick=quick), list[Fact], _TIMEOUT)
        columns: dict[str, Callable[[Fact], str]] = {
            name: lambda fact: fact.case,
            "": lambda fact: f"{fact.value:.3g}",
            "detail": lambda fact: fact.detail,
        }
        print_rows(console, facts[name], columns, numbers=False)
    ratios = _ratios(facts)
    print_bars(console, BARS, ratios, quick=quick)
    figures = {f"{name}_cases": len(found) for name, found in facts.items()}
    rows = [fact for found in facts.values() for fact in found]
    return Result(bench="parity", ratios=ratios, figures=figures, rows=rows)


def _ratios(facts: Mapping[str, list[Fact]]) -> dict[str, float]:
    values = {name: [fact.value for fact in found] for name, found in facts.items()}
    tests = values["torch_pipelining"]
    return {
        "torch_pipelining": sum(tests) / len(tests),
        "torch_pipelining_silent": torch_pipelining.silent(facts["torch_pipelining"]),
        **{name: max(values[name]) for name in ("cuts", "restores", "bytes_per_step")},
        **{name: sum(values[name]) for name in ("kill_windows", "modes")},
    }

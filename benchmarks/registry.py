"""The benchmarks by name. A module is imported when it is run: some load torch.

A benchmark is a module with `run(*, quick, console) -> Result`, which prints its table. What it
measures is said here in a line, so that `polyrhythm bench --help` can say it without the module.
"""

import importlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from polyrhythm.errors import UserError

if TYPE_CHECKING:  # --help needs neither
    from rich.console import Console

    from benchmarks.result import Result


class Benchmark(NamedTuple):
    module: str
    about: str


BENCHMARKS = {
    "average": Benchmark(
        "benchmarks.average.bench",
        "how a group should exchange its average",
    ),
    "converge": Benchmark(
        "benchmarks.converge.bench",
        "loss over time and samples, of groups and of all-reduce",
    ),
    "decoupled": Benchmark(
        "benchmarks.decoupled.bench",
        "all-reduce in two halves against DDP and FSDP2 on slow links",
    ),
    "endtoend": Benchmark(
        "benchmarks.endtoend.bench",
        "the Trainer against torch's 1F1B and DDP, in a storm and in a quiet room",
    ),
    "lab": Benchmark("benchmarks.lab.bench", "how true the lab is, and where its limit lies"),
    "pipeline": Benchmark(
        "benchmarks.pipeline.bench",
        "the adaptive schedule against 1F1B on slow networks",
    ),
    "plan": Benchmark(
        "benchmarks.plan.bench",
        "how good plans are: known optima, against DT-FM's, and in the lab",
    ),
    "predict": Benchmark(
        "benchmarks.predict.bench",
        "how true the simulator is: predicted steps against those in the lab",
    ),
    "scale": Benchmark(
        "benchmarks.scale.bench",
        "how many workers can be simulated, and in what time",
    ),
    "sync": Benchmark(
        "benchmarks.sync.bench",
        "every way to average against all-reduce, with slow workers",
    ),
}


def print_names(console: "Console") -> None:
    """Print each benchmark and what it measures."""
    from polyrhythm.tables import print_table

    rows = [(name, BENCHMARKS[name].about) for name in names()]
    print_table(console, ["benchmark", "what it measures"], rows)


def names() -> tuple[str, ...]:
    return tuple(sorted(BENCHMARKS))


def run(
    name: str, *, quick: bool = False, out: Path | None = None, console: "Console | None" = None
) -> "Result":
    """Measure, print the table and, as the last line, the result as JSON; both also into `out`."""
    if name not in BENCHMARKS:
        raise UserError(
            f"unknown benchmark {name!r}",
            expected=f"one of {', '.join(names())}",
            fix="polyrhythm bench NAME with one of these names",
        )
    from rich.console import Console

    from polyrhythm.tables import print_line

    console = console or Console()
    began = time.monotonic()
    module = importlib.import_module(BENCHMARKS[name].module)
    result: Result = module.run(quick=quick, console=console)
    took = time.monotonic() - began
    if out is not None:
        path = result.save(out, quick=quick, took=took)
        print_line(console, f"rows: {path}")
    print_line(console, result.line(quick=quick, took=took))
    return result

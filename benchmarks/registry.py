"""The benchmarks by name.

A benchmark is a module with `run(*, quick, console) -> Result`, which prints its tables. The module
is imported only to run it, since some load torch; so the line about it stands here.
"""

import importlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.errors import UserError

if TYPE_CHECKING:  # not needed to print the names
    from rich.console import Console

    from benchmarks.harness.report import Result


BENCHMARKS = {  # each is the module benchmarks.NAME.bench
    "architectures": "splits of transformers' models, found without names, against the whole model",
    "average": "averages over kept pairs of workers against process groups",
    "converge": "loss over time and samples: group averages against all-reduce",
    "decoupled": "reduce-scatter and all-gather apart (DeAR) against DDP and FSDP2 on slow links",
    "endtoend": "the Trainer against torch's 1F1B and DDP, heterogeneous and homogeneous clusters",
    "faults": "what the loss of a worker costs, and whether jobs survive many",
    "gpu": "one GPU: against plain loops, DDP and torch's 1F1B; predicted memory and time",
    "lab": "how accurate the lab is, and where its limit lies",
    "models": "Hugging Face models: against transformers.Trainer and Lightning Fabric",
    "parity": "the same result whatever the cut, the sync mode and the restart",
    "pipeline": "the adaptive schedule against 1F1B on slow networks",
    "plan": "how good plans are: known optima, against DT-FM's plans, and in the lab",
    "predict": "how accurate the simulator is: predicted steps against steps in the lab",
    "scale": "how many workers can be simulated, and in what time",
    "sync": "every sync policy against all-reduce, with stragglers",
}


def print_names(console: "Console") -> None:
    """Print each benchmark and what it measures."""
    from polyrhythm.tables import print_table

    rows = [(name, BENCHMARKS[name]) for name in names()]
    print_table(console, ["benchmark", "what it measures"], rows)


def names() -> tuple[str, ...]:
    return tuple(sorted(BENCHMARKS))


def run(
    name: str,
    *,
    quick: bool = False,
    out: Path | None = None,
    soak: int | None = None,
    console: "Console | None" = None,
) -> "Result":
    """Measure, print the tables and, as the last line, the result as JSON; save it in `out`.

    `soak`: the number of random faults of `faults`; None for the usual one.
    """
    if name not in BENCHMARKS:
        raise UserError(
            f"unknown benchmark {name!r}",
            expected=f"one of {', '.join(names())}",
            fix="polyrhythm bench NAME with one of these names",
        )
    if soak is not None and (name != "faults" or soak < 1):
        raise UserError(
            f"--soak {soak} for {name}",
            expected="1 fault or more, for `faults`: no other benchmark has random faults",
            fix="omit --soak, or use `polyrhythm bench faults --soak 200`",
        )
    if out is not None and out.exists() and not out.is_dir():  # before the measurement
        raise UserError(f"--out {out} is a file", expected="a folder", fix="use another name")
    from rich.console import Console

    from polyrhythm.tables import print_line

    console = console or Console()
    start = time.monotonic()
    module = importlib.import_module(f"benchmarks.{name}.bench")
    more = {} if soak is None else {"soak": soak}
    result: Result = module.run(quick=quick, console=console, **more)
    duration = time.monotonic() - start
    if out is not None:
        path = result.save(out, quick=quick, duration=duration)
        print_line(console, f"rows: {path}")
    print_line(console, result.line(quick=quick, duration=duration))
    return result

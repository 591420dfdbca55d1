"""The benchmarks by name. A module is imported when it is run: some load torch.

A benchmark is a module with `run(*, quick, console) -> Result`, which prints its table.
"""

import importlib
import time
from pathlib import Path

from rich.console import Console

from polyrhythm.bench.result import Result
from polyrhythm.errors import UserError
from polyrhythm.tables import print_line

_MODULES = {
    "average": "polyrhythm.bench.average.bench",
    "converge": "polyrhythm.bench.converge.bench",
    "lab": "polyrhythm.bench.lab.bench",
    "pipeline": "polyrhythm.bench.pipeline.bench",
    "sync": "polyrhythm.bench.sync.bench",
}


def names() -> tuple[str, ...]:
    return tuple(sorted(_MODULES))


def run(
    name: str, *, quick: bool = False, out: Path | None = None, console: Console | None = None
) -> Result:
    """Measure, print the table and, as the last line, the result as JSON; both also into `out`."""
    if name not in _MODULES:
        raise UserError(
            f"unknown benchmark {name!r}",
            expected=f"one of {', '.join(names())}",
            fix="polyrhythm bench NAME with one of these names",
        )
    console = console or Console()
    began = time.monotonic()
    result: Result = importlib.import_module(_MODULES[name]).run(quick=quick, console=console)
    took = time.monotonic() - began
    if out is not None:
        path = result.save(out, quick=quick, took=took)
        print_line(console, f"rows: {path}")
    print_line(console, result.line(quick=quick, took=took))
    return result

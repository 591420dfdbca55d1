"""How large a cluster can be simulated: 64 and 4,096 workers under SDPipe's setting B, `adaptive`.

Each simulation has a fresh process, for its memory. Compiling, which the first simulation on a
machine does, does not count. Times per action are compared for equal numbers of micro-batches.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks.harness.report import Bar, Result, median_of, print_bars, print_rows
from polyrhythm.types import Bytes, Seconds

BARS = (
    Bar("s_64", "<=", 5.0, "seconds for 64 workers, 1,000 steps"),
    Bar("s_4096", "<=", 60.0, "seconds for 4,096 workers, 100 steps"),
    Bar("gib_4096", "<=", 4.0, "GiB of that simulation"),
    Bar("growth", "<=", 2.0, "time per action, 4,096 workers over 64"),
    Bar("same_bytes", ">=", 1.0, "two processes write the same run"),
)
_GIB = 2**30
_TIMEOUT: Seconds = 400.0
_ROUNDS = 3  # of the short ones
_LOGGED_STEPS = 3  # of which logs are compared


@dataclass(frozen=True, slots=True)
class SimulatedShape:
    name: str
    num_stages: int
    num_pipelines: int
    num_microbatches: int
    num_steps: int

    def __str__(self) -> str:
        num_workers = self.num_stages * self.num_pipelines
        grid = f"{num_workers:,} workers ({self.num_pipelines} x {self.num_stages})"
        return f"{grid}, {self.num_steps:,} steps, M = {self.num_microbatches}"

    @property
    def arguments(self) -> list[str]:
        return [str(number) for number in astuple(self)[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    name: str
    shape: str
    actions: int
    events: int
    seconds: Seconds
    memory: Bytes

    @property
    def per_action(self) -> Seconds:
        return self.seconds / self.actions


_FULL = (
    SimulatedShape("steps", 4, 16, 1, 1000),
    SimulatedShape("small", 4, 16, 32, 100),
    SimulatedShape("large", 16, 256, 32, 100),
)
_QUICK = (
    SimulatedShape("steps", 4, 4, 1, 50),
    SimulatedShape("small", 4, 4, 8, 10),
    SimulatedShape("large", 8, 16, 8, 5),
)


def run(*, quick: bool, console: Console) -> Result:
    steps, small, large = _QUICK if quick else _FULL
    rows = [_timed(shape) for shape in (steps, small) for _ in range(1 if quick else _ROUNDS)]
    last = _timed(large)
    rows.append(last)
    ratios = {
        "s_64": median_of(rows, "seconds", name=steps.name),
        "s_4096": last.seconds,
        "gib_4096": last.memory / _GIB,
        "growth": last.per_action / median_of(rows, "per_action", name=small.name),
        "same_bytes": float(_is_deterministic(replace(small, num_steps=_LOGGED_STEPS))),
    }
    print_rows(
        console,
        rows,
        {
            "simulated": lambda row: row.shape,
            "actions": lambda row: f"{row.actions:,}",
            "events": lambda row: f"{row.events:,}",
            "seconds": lambda row: f"{row.seconds:.2f}",
            "us/action": lambda row: f"{1e6 * row.per_action:.2f}",
            "GiB": lambda row: f"{row.memory / _GIB:.2f}",
        },
    )
    print_bars(console, BARS, ratios, quick=quick)
    figures = {"events_4096": float(last.events), "us_per_action_4096": 1e6 * last.per_action}
    return Result(bench="scale", ratios=ratios, figures=figures, rows=rows)


def _timed(shape: SimulatedShape) -> ScaleRow:
    figures = json.loads(_output(shape.arguments))
    return ScaleRow(name=shape.name, shape=str(shape), **figures)


def _is_deterministic(shape: SimulatedShape) -> bool:
    """Return whether two processes with different hash seeds write the same run, byte by byte."""
    with tempfile.TemporaryDirectory() as folder:
        written = []
        for seed in ("1", "2"):
            run = Path(folder) / seed
            _output([*shape.arguments, str(run)], PYTHONHASHSEED=seed)
            written.append({path.name: path.read_bytes() for path in sorted(run.iterdir())})
        return written[0] == written[1]


def _output(arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale.simulation", *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a simulation failed:\n{done.stderr}")
    return done.stdout

"""How large a cluster can be simulated: 64 and 4,096 workers under SDPipe's setting B, `adaptive`.

Each in a fresh process, for its memory. What is compiled by the first simulation on a machine does
not count. Time per action is compared with the same number of micro-batches on both sides.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.result import Result
from polyrhythm.tables import print_table
from polyrhythm.types import Seconds

BARS = {"s_64": "<= 5", "s_4096": "<= 60", "gib_4096": "<= 4", "growth": "<= 2", "same_bytes": "1"}
_GIB = 2**30
_LONGEST: Seconds = 400.0
_ROUNDS = 3  # of the short ones
_WRITTEN = 3  # steps of which logs are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    num_stages: int
    num_pipelines: int
    num_microbatches: int
    num_steps: int

    @property
    def num_workers(self) -> int:
        return self.num_stages * self.num_pipelines

    def __str__(self) -> str:
        grid = f"{self.num_workers:,} workers ({self.num_pipelines} x {self.num_stages})"
        return f"{grid}, {self.num_steps:,} steps, M = {self.num_microbatches}"

    @property
    def arguments(self) -> list[str]:
        numbers = self.num_stages, self.num_pipelines, self.num_microbatches, self.num_steps
        return list(map(str, numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    name: str
    workers: int
    actions: int
    events: int
    seconds: Seconds
    memory: int  # bytes

    @property
    def each(self) -> Seconds:
        """Of an action."""
        return self.seconds / self.actions


_FULL = (
    Shape(name="steps", num_stages=4, num_pipelines=16, num_microbatches=1, num_steps=1000),
    Shape(name="small", num_stages=4, num_pipelines=16, num_microbatches=32, num_steps=100),
    Shape(name="large", num_stages=16, num_pipelines=256, num_microbatches=32, num_steps=100),
)
_QUICK = (
    Shape(name="steps", num_stages=4, num_pipelines=4, num_microbatches=1, num_steps=50),
    Shape(name="small", num_stages=4, num_pipelines=4, num_microbatches=8, num_steps=10),
    Shape(name="large", num_stages=8, num_pipelines=16, num_microbatches=8, num_steps=5),
)


def run(*, quick: bool, console: Console) -> Result:
    steps, small, large = _QUICK if quick else _FULL
    written = replace(small, num_steps=_WRITTEN)
    rows = [_timed(shape) for shape in (steps, small) for _ in range(1 if quick else _ROUNDS)]
    rows.append(_timed(large))
    of_large = rows[-1]
    each = median(row.each for row in rows if row.name == small.name)
    ratios = {
        "s_64": median(row.seconds for row in rows if row.name == steps.name),
        "s_4096": of_large.seconds,
        "gib_4096": of_large.memory / _GIB,
        "growth": of_large.each / each,
        "same_bytes": float(_is_deterministic(written)),
    }
    header = ["workers", "actions", "events", "seconds", "us/action", "GiB"]
    print_table(console, header, map(_cells, rows), numbers=True)
    simulated = {"s_64": steps, "s_4096": large, "gib_4096": large, "same_bytes": written}
    both = f"{small.num_workers:,} to {large.num_workers:,} workers"
    found = [
        # A bar is for the size that a name says, which a quick run has not.
        (name, f"{value:.4g}", "-" if quick else BARS[name], str(simulated.get(name, both)))
        for name, value in ratios.items()
    ]
    print_table(console, ["", "found", "bar", "of"], found)
    figures = {"events_4096": float(of_large.events), "us_per_action_4096": 1e6 * of_large.each}
    return Result(bench="scale", ratios=ratios, figures=figures, rows=rows)


def _timed(shape: Shape) -> ScaleRow:
    found = json.loads(_output(shape.arguments))
    return ScaleRow(
        name=shape.name,
        workers=shape.num_workers,
        actions=found["actions"],
        events=found["events"],
        seconds=found["seconds"],
        memory=found["bytes"],
    )


def _is_deterministic(shape: Shape) -> bool:
    """Whether two processes with different hashes write the same run, byte by byte."""
    with tempfile.TemporaryDirectory() as folder:
        written = []
        for seed in ("1", "2"):
            run = Path(folder) / seed
            _output([*shape.arguments, str(run)], PYTHONHASHSEED=seed)
            written.append({path.name: path.read_bytes() for path in sorted(run.iterdir())})
        return written[0] == written[1]


def _output(arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale.timed", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_LONGEST,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a simulation failed:\n{done.stderr}")
    return done.stdout


def _cells(row: ScaleRow) -> list[str]:
    return [
        f"{row.workers:,}",
        f"{row.actions:,}",
        f"{row.events:,}",
        f"{row.seconds:.2f}",
        f"{1e6 * row.each:.2f}",
        f"{row.memory / _GIB:.2f}",
    ]

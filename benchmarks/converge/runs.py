"""Runs at the same time: several jobs on one machine, each with workers that mostly sleep.

Runs that are to be compared share the machine, and so whatever else it does meanwhile. A lane is a
list of runs, one after the other; lanes run side by side.
"""

import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from benchmarks.converge.plan import Run, Setting
from benchmarks.converge.record import Record, load_weights, shared
from benchmarks.converge.tasks import Task, num_weights
from benchmarks.converge.worker import compute_times, train
from polyrhythm.describe.slowness import load_traces
from polyrhythm.describe.trace import Trace
from polyrhythm.errors import LaunchError
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.types import Seconds

_LOOK: Seconds = 0.05  # how long one lane is watched before the next
_TRIES = 9  # steps that are computed to find out how long one takes
_COMPUTE_PATIENCE: Seconds = 60.0
_EVALUATORS = 2
_EVALUATION_PATIENCE: Seconds = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    run: Run
    record: Record


def compute_time(task: Task) -> Seconds:
    """Of a step, alone on this machine: the median."""
    times = shared(_TRIES, np.float64)

    def work(ctx: DistContext) -> None:
        times[:] = list(compute_times(task, _TRIES))

    with (
        tempfile.TemporaryDirectory() as folder,
        LocalJob(work, 1, output_folder=Path(folder)) as job,
    ):
        if not job.wait(_COMPUTE_PATIENCE):
            raise _too_long(f"computing {_TRIES} steps", _COMPUTE_PATIENCE)
    return float(np.median(times))


def side_by_side(*lanes: Sequence[Run]) -> list[Ran]:
    """Run them all; their models are evaluated."""
    began = time.monotonic()
    patience = max(sum(run.setting.patience for run in lane) for lane in lanes)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        entered = [
            stack.enter_context(_Lane(lane, Path(folder) / f"lane{number}"))
            for number, lane in enumerate(lanes)
        ]
        running = entered
        while running := [lane for lane in running if lane.goes_on()]:
            if time.monotonic() - began > patience:
                raise _too_long("runs side by side", patience)
        ran = [done for lane in entered for done in lane.ran]
        _evaluate(ran, Path(folder))
    return ran


class _Lane:
    """Starts a run when the one before has ended; ends what still runs when the block is left."""

    def __init__(self, runs: Sequence[Run], folder: Path) -> None:
        self.ran: list[Ran] = []
        self._left, self._folder = deque(runs), folder
        self._job: LocalJob | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def goes_on(self) -> bool:
        if self._job is not None and not self._job.wait(_LOOK):
            return True
        self._stack.close()
        if not self._left:
            return False
        self._start(self._left.popleft())
        return True

    def _start(self, run: Run) -> None:
        record = _record(run)
        work = partial(train, run=run, record=record, traces=_traces(run.setting))
        job = LocalJob(work, run.setting.num_workers, output_folder=self._folder)
        self._job = self._stack.enter_context(job)
        self.ran.append(Ran(run=run, record=record))


def _record(run: Run) -> Record:
    setting = run.setting
    return Record(
        num_workers=setting.num_workers,
        num_batches=setting.num_batches,
        num_weights=num_weights(run.task),
        every=setting.every,
        num_moments=4 * setting.looks,
    )


def _traces(setting: Setting) -> Mapping[str, Trace]:
    return load_traces(setting.scenario(0))


def _evaluate(ran: Sequence[Ran], folder: Path) -> None:
    """In processes of their own: this one must stay able to fork."""

    def work(ctx: DistContext) -> None:
        torch.set_num_threads(1)
        for done in ran[ctx.rank :: _EVALUATORS]:
            _evaluate_one(done)

    with LocalJob(work, _EVALUATORS, output_folder=folder) as job:
        if not job.wait(_EVALUATION_PATIENCE):
            raise _too_long("evaluating models", _EVALUATION_PATIENCE)


def _evaluate_one(done: Ran) -> None:
    task, record = done.run.task, done.record
    model = task.build(0)
    with torch.no_grad():
        for number, weights in enumerate(record.means()):
            load_weights(model, weights)
            record.keep_loss(number, task.loss(model, task.held_out).item())
        load_weights(model, record.final)
        record.final_loss = task.loss(model, task.held_out).item()


def _too_long(what: str, patience: Seconds) -> LaunchError:
    return LaunchError(
        f"{what} took more than {patience:g} s",
        expected="less, on two idle cores",
        fix="run the benchmark while the machine has nothing else to do",
    )

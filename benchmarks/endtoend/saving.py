"""`checkpoint`: a step while checkpoints are written in the background, over one without.

Two local processes, replicas of a model of some 17 MB whose checkpoint, with the state of AdamW,
has 50. It is saved every second, far more often than anybody would: writing takes about half a
step, in the background, and what a step waits for is the copy that is written. The same job
without saving takes turns with it, and what is still being written at the end of a turn is waited
for.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.utils.data import Dataset

from benchmarks.endtoend.crew import Crew, Here
from benchmarks.endtoend.side import Assignment, Line, Seat, enter
from benchmarks.endtoend.turns import TurnRow, ratio, take_turns
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.trainer.step_loop import StepEnd
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.types import Seconds

SAVING, NOT_SAVING = "saving", "not saving"
_PATIENCE: Seconds = 60.0
_NUM_SAMPLES = 4096
_SETTLE: Seconds = 1.5  # after a turn, for what is still being written


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    width: int
    num_layers: int
    step: Seconds  # of compute
    every: int  # steps, until the next checkpoint
    num_turns: int
    num_steps: int  # of a turn


FULL = Size(width=1024, num_layers=4, step=0.5, every=2, num_turns=4, num_steps=9)
QUICK = Size(width=64, num_layers=2, step=0.02, every=1, num_turns=2, num_steps=3)


class Vectors(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        vector = torch.full((self._width,), place / _NUM_SAMPLES)
        return vector, vector.square()


def saving(*, quick: bool, say: Callable[[str], None]) -> tuple[float, list[TurnRow]]:
    """A step with asynchronous saving over one without, and all turns."""
    size = QUICK if quick else FULL
    pipelines = tuple(PipelinePlan(devices=(name,), num_microbatches=1) for name in ("a", "b"))
    told = Assignment(
        plan=Plan(layers_per_stage=(size.num_layers,), pipelines=pipelines, microbatch_size=1),
        num_steps=size.num_turns * size.num_steps,
        forward=size.step / size.num_layers / 4,
        backward=size.step / size.num_layers * 3 / 4,
        num_held_out=0,
        timeout=_PATIENCE,
        turn=size.num_steps,
    )
    say("checkpoint: two jobs are started")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        crews, here = {}, Here()
        for side, every in ((NOT_SAVING, None), (SAVING, size.every)):
            run = Path(folder) / side
            work = partial(_work, width=size.width, run=run, every=every)
            crew = Crew(here, work, told, output=Path(folder), port=here.free_port())
            crews[side] = stack.enter_context(crew)
        rows = take_turns(
            "checkpoint",
            crews,
            num_turns=size.num_turns,
            num_steps=size.num_steps,
            patience=_PATIENCE,
            say=say,
            after_turn=lambda: time.sleep(_SETTLE),
        )
    return ratio(rows, SAVING, NOT_SAVING), rows


def _work(
    told: Assignment, seat: Seat, boss: Connection, *, width: int, run: Path, every: int | None
) -> None:
    enter(seat, told.plan.num_workers)
    line = Line(boss, told.timeout, told.turn)

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(told.num_layers)))

    def heard(end: StepEnd) -> None:
        line.ended(trainer.worker, end.step, end.num_samples, end.loss)

    with Trainer(
        model,
        functional.mse_loss,
        lambda parameters: AdamW(parameters, lr=1e-3, fused=True),
        Vectors(width),
        plan=told.plan,
        run=run,
        checkpoint_every=every,
        callbacks=[heard],
        timeout=told.timeout,
    ) as trainer:
        pace = told.pace(trainer.worker, seat.device)
        pace.keep(trainer.model)
        pace.begin(line.ready())
        trainer.fit(steps=told.num_steps)
        line.done(trainer.worker, time.monotonic(), pace, None)

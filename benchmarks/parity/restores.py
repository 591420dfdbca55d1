"""Restores: a job that is killed and restored onto another plan, against one process.

The jobs are those of `cuts`. One process of a job is killed (SIGKILL) in the middle of training,
while checkpoints are written beside it. A job with another number of stages and pipelines restores
the newest complete checkpoint and trains on: losses from there on and the trained weights are
compared with those of a plain loop that nothing has interrupted.
"""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

import polyrhythm as pr
from benchmarks.parity.cuts import (
    NUM_STEPS,
    CutJob,
    CutModel,
    Trained,
    cut_models,
    mean_losses,
    quick_model,
    train,
    train_alone,
)
from benchmarks.parity.facts import Fact
from polyrhythm.errors import WorkerError

_EVERY, _KILL_STEP = 4, 13  # steps between checkpoints; the step after which a process is killed
Grid = tuple[int, int]  # pipelines x stages
_GRIDS: tuple[tuple[Grid, Grid], ...] = (
    ((1, 1), (2, 2)),
    ((2, 2), (3, 2)),
    ((3, 2), (1, 2)),
    ((1, 2), (2, 1)),
    ((2, 1), (1, 1)),
)


def measure(*, quick: bool) -> list[Fact]:
    facts = list[Fact]()
    for index, model in enumerate([quick_model()] if quick else cut_models()):
        alone = train_alone(model)
        # Two of the changes of plan for each model; all of them occur.
        numbers = [3] if quick else [index, (index + 2) % len(_GRIDS)]
        facts += [_fact(model, alone, *_GRIDS[number]) for number in numbers]
    return facts


def _fact(model: CutModel, alone: tuple[Any, Any], before: Grid, after: Grid) -> Fact:
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"run_dir": Path(folder)}
        checkpoint = {"checkpoint": pr.CheckpointConfig(every=_EVERY)}
        killed = _job(model, before, options | checkpoint)
        try:
            train(killed, callbacks=[_kill])
        except WorkerError as error:
            if "SIGKILL" not in str(error):
                raise
        else:
            raise AssertionError(f"{killed.name} was not killed")
        found = train(_job(model, after, options), restores=True)
    first = NUM_STEPS - len(found.losses)
    expected = Trained(mean_losses(alone[0][first:]), alone[1])
    case = f"{killed.name}, then {after[0]}x{after[1]}"
    difference = found.difference(expected) if first else float("inf")
    return Fact(case, difference, f"killed after step {_KILL_STEP}, restored from step {first}")


def _job(model: CutModel, grid: Grid, options: dict[str, Any]) -> CutJob:
    num_pipelines, num_stages = grid
    return CutJob(
        model=model,
        num_pipelines=num_pipelines,
        num_stages=num_stages,
        trainer_options=options,
    )


def _kill(info: pr.StepInfo) -> None:
    """End the last process of the job."""
    is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    if info.step == _KILL_STEP and is_last:
        os.kill(os.getpid(), signal.SIGKILL)

"""What batches in flight cost in loss: the same pipeline without a flush, at two depths.

A stage with more batches in flight rides out more of other stages' delays, and its gradients are of
older weights. Time does not matter here, so nothing is slowed down: four real stages train as fast
as they can, and only the loss after equally many batches is compared.
"""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.converge.record import load_weights, shared, weights_of
from benchmarks.converge.tasks import SourceText, num_weights
from benchmarks.converge.worker import rate, set_rate
from polyrhythm.errors import LaunchError
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.demo.gpt import next_byte_loss
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.types import Seconds

_DEADLINE: Seconds = 60.0
_PATIENCE: Seconds = 120.0


def losses_by_depth(
    task: SourceText, rates: Mapping[str, float], *, seed: int, steps: int
) -> dict[str, float]:
    """The loss at the end under each schedule, which has a learning rate of its own."""
    num_stages = task.shape.num_layers  # one layer each
    models = {schedule: shared(num_weights(task), np.float32) for schedule in rates}
    losses = shared(len(rates), np.float64)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        jobs: list[LocalJob] = []
        for schedule, lr in rates.items():
            work = partial(
                _train,
                task=task,
                schedule=schedule,
                lr=lr,
                seed=seed,
                steps=steps,
                weights=models[schedule],
            )
            job = LocalJob(work, num_stages, output_folder=Path(folder) / f"{len(jobs)}")
            jobs.append(stack.enter_context(job))
        for job in jobs:
            _see_through(job)

        def evaluate(ctx: DistContext) -> None:
            torch.set_num_threads(1)
            model = task.build(0)
            with torch.no_grad():
                for number, weights in enumerate(models.values()):
                    load_weights(model, weights)
                    losses[number] = task.loss(model, task.held_out).item()

        _see_through(stack.enter_context(LocalJob(evaluate, 1, output_folder=Path(folder))))
    return dict(zip(rates, losses.tolist(), strict=True))


def _see_through(job: LocalJob) -> None:
    if not job.wait(_PATIENCE):
        raise LaunchError(
            f"a pipeline took more than {_PATIENCE:g} s",
            expected="less, on two idle cores",
            fix="run the benchmark while the machine has nothing else to do",
        )


def _train(
    ctx: DistContext,
    *,
    task: SourceText,
    schedule: str,
    lr: float,
    seed: int,
    steps: int,
    weights: np.ndarray,
) -> None:
    """One stage; leaves its part of the model in `weights`."""
    torch.set_num_threads(1)
    stage = ctx.rank
    with ctx.process_group(_DEADLINE):
        module = task.layers(range(stage, stage + 1), seed)
        optimizer = task.optimizer(module, lr, of_models=False)
        pipeline = Pipeline(
            module,
            loss_fn=next_byte_loss,
            num_microbatches=1,
            schedule=schedule,
            flush=False,
            timeout=_DEADLINE,
        )
        num_updates = 0

        def update() -> None:
            nonlocal num_updates
            clip_grad_norm_(module.parameters(), task.largest_norm)
            set_rate(optimizer, lr * rate(num_updates / steps))
            optimizer.step()
            optimizer.zero_grad()
            num_updates += 1

        with pipeline:
            for step in range(steps):
                inputs, targets = task.draw(seed, 0, step)
                arguments = (inputs,) if pipeline.is_first else ()
                target = targets if pipeline.is_last else None
                pipeline.step(*arguments, target=target, return_outputs=False)
                if pipeline.has_gradients:
                    update()
            for _ in pipeline.drain():
                update()
        before = sum(_size(task, layer) for layer in range(stage))
        weights[before : before + _size(task, stage)] = weights_of(module)


def _size(task: SourceText, layer: int) -> int:
    return sum(p.numel() for p in task.layers(range(layer, layer + 1), 0).parameters())

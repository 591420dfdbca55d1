"""What a worker of a grid does: one stage of a pipeline, whose compute is a sleep."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.sync.settings import Setting, Side
from benchmarks.sync.training import Training, Weights
from polyrhythm.run.pipeline.pipeline import Pipeline

_NUM_ACTIVATIONS = 16


class Stage(Weights):
    """Hands on what it gets. A negative batch is the last one: so all stages know when to end."""

    def __init__(self, setting: Setting, side: Side, seed: int) -> None:
        super().__init__(setting.num_floats, seed)
        self.num_microbatches = side.num_microbatches
        self.owner: Staged | None = None
        self.was_last = False

    def forward(self, x: Tensor) -> Tensor:
        self.was_last = bool(x[0, 0] < 0)
        slept: Tensor = _Sleep.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return slept


class Staged(Training):
    """One stage of a pipeline."""

    pipeline: Pipeline

    def _steps(self) -> Iterator[bool]:
        pipeline, stage = self.pipeline, self.model
        assert isinstance(stage, Stage), "made for this"
        stage.owner = self
        batch = torch.ones(self.side.num_microbatches, _NUM_ACTIVATIONS)
        while not stage.was_last:
            if pipeline.is_first and time.monotonic() >= self.end:
                batch = -batch
            given = (batch,) if pipeline.is_first else ()
            target = batch if pipeline.is_last else None
            pipeline.step(*given, target=target, return_outputs=False)
            if pipeline.has_gradients:
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.sync is not None:
                    self.sync.step()
            yield pipeline.has_gradients

    def release(self) -> None:
        """Once all stages are done: until then they may need what this one has sent."""
        self.pipeline.close()
        # Batches in flight hold their stage, by way of autograd, where no collector looks.
        assert isinstance(self.model, Stage), "made for this"
        self.model.owner = None


class _Sleep(torch.autograd.Function):
    """The compute of a stage that uses no core; the gradient is that of the weights it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: Stage) -> Tensor:
        ctx.stage, ctx.weight = stage, weight
        training = _training(stage)
        training.emulate(training.setting.forward, since=time.monotonic(), until=training.end)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        stage: Stage = ctx.stage
        training = _training(stage)
        training.emulate(training.setting.backward, since=time.monotonic(), until=training.end)
        return gradients[0], stage.gradient(ctx.weight) / stage.num_microbatches, None


def _training(stage: Stage) -> Staged:
    assert stage.owner is not None, "it has begun"
    return stage.owner


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()

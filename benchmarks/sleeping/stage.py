"""A stage whose compute is a sleep, with messages and weights of a chosen size."""

import time
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.describe.slowness import Slowness
from polyrhythm.types import Seconds

_GRACE: Seconds = 0.002  # between two pieces of work that follow upon one another


class SleepingStage(nn.Module):
    """Hands on what it gets, `forward_takes` later; its gradients come back as late.

    `weight` is what replicas average. Its gradient is not added up from micro-batch to micro-batch,
    which would take cores that all hosts of a lab share. What the executor takes between two pieces
    of work does not count: beside a GPU it would run meanwhile, and here it takes turns on cores.
    """

    def __init__(
        self,
        *,
        forward_takes: Seconds,
        backward_takes: Seconds,
        num_weights: int,
        slowness: Slowness | None = None,
        grace: Seconds = _GRACE,
    ) -> None:
        super().__init__()
        self.forward_takes, self.backward_takes = forward_takes, backward_takes
        self.weight = nn.Parameter(torch.zeros(num_weights))
        self.touch = nn.Parameter(torch.ones(1))  # so that autograd has something to do
        self._slowness, self._grace = slowness or Slowness(), grace
        self._began: Seconds | None = None  # None: nothing takes time, while connections are made
        self._over: Seconds = 0.0  # the last work

    def begin(self, moment: Seconds) -> None:
        """From now on work takes its time, and the clock of slowness starts at that moment."""
        self._began = moment

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(x * self.touch, self)  # type: ignore[no-untyped-call]
        return slept

    def make_gradients(self) -> None:
        self.weight.grad = torch.ones_like(self.weight)

    def spend(self, work: Seconds) -> None:
        if self._began is None:
            return
        now = time.monotonic()
        since = self._over if now - self._over < self._grace else now
        both = self.forward_takes + self.backward_takes
        self._over = since + work + self._slowness.delay(since - self._began, work, both)
        time.sleep(max(0.0, self._over - now))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: SleepingStage) -> Tensor:
        ctx.stage = stage
        stage.spend(stage.forward_takes)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.stage.spend(ctx.stage.backward_takes)
        return gradients[0], None


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()

"""Emulated compute: a sleep in place of the work of a device, as slow as a scenario makes it.

A sleeping process uses no core, so a machine with two cores emulates dozens of devices. Messages,
weights, gradients and averages remain real.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.describe.slowness import Slowness
from polyrhythm.types import Seconds


@dataclass(slots=True, kw_only=True)
class EmulatedCompute:
    """The clock of one emulated device."""

    forward: Seconds = 0.0  # of one action
    backward: Seconds = 0.0
    slowness: Slowness = field(default_factory=Slowness)
    start: Seconds | None = None  # when the scenario's clock starts; None: nothing takes time
    end: Seconds = math.inf  # no sleep lasts longer
    grace: Seconds = 0.0  # a shorter pause between two actions counts as part of the second
    _done_at: Seconds = field(default=0.0, init=False)  # the last action

    def spend(self, work: Seconds, *, since: Seconds | None = None) -> Seconds:
        """Sleep until `work` seconds of compute that began at `since` would be done; return when.

        Pass the result as the next `since`: sleeps end slightly late, which would add up.
        """
        now = time.monotonic()
        if self.start is None:
            return now
        if since is None:
            since = self._done_at if now - self._done_at < self.grace else now
        delay = self.slowness.delay(since - self.start, work, self.forward + self.backward)
        self._done_at = min(since + work + delay, self.end)
        time.sleep(max(0.0, self._done_at - time.monotonic()))
        return self._done_at


class EmulatedLayer(nn.Module):
    """A layer or stage which returns its input after its emulated forward; so does its backward."""

    def __init__(self, weight: Tensor, compute: EmulatedCompute) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Emulate.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return output

    def gradient_fn(self, weight: Tensor) -> Callable[[], Tensor | None]:
        """Called in the forward; returns what gives the weight its gradient in the backward."""
        return lambda: None


class _Emulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: EmulatedLayer) -> Tensor:
        ctx.compute, ctx.gradient = layer.compute, layer.gradient_fn(weight)
        layer.compute.spend(layer.compute.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        ctx.compute.spend(ctx.compute.backward)
        return gradients[0], ctx.gradient(), None

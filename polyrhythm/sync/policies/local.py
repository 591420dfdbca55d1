"""Local steps: workers train alone for many steps, then take one outer step together.

In the outer step the workers average their weights. The difference between their last common
weights (the anchor) and the mean is taken as a gradient, along which an outer optimizer with
Nesterov momentum takes one step; all continue from there. `all_reduce` forms the groups, and the
workers report only every n-th step; this file has the arithmetic of the outer step.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv:2311.08105. The momentum is that of `torch.optim.SGD(nesterov=True)`.
"""

from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from polyrhythm.errors import PolicyError


class Arithmetic(Protocol):
    """Operations that numbers, numpy arrays and tensors share."""

    def __add__(self, other: Self, /) -> Self: ...
    def __sub__(self, other: Self, /) -> Self: ...
    def __mul__(self, factor: float, /) -> Self: ...


Array = TypeVar("Array", bound=Arithmetic)


def pseudo_gradient(anchor: Array, mean: Array) -> Array:
    """Difference between the last common weights and the mean of the workers' weights."""
    return anchor - mean


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterNesterov:
    """The outer optimizer; it is stateless, so that an aborted step has no effect."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not (self.lr > 0 and 0 <= self.momentum < 1):
            raise PolicyError(
                f"outer lr={self.lr:g}, momentum={self.momentum:g}",
                expected="lr above 0, momentum from 0 to below 1",
                fix="use lr=0.7, momentum=0.9; lr=1, momentum=0 is plain averaging",
            )

    def step(self, anchor: Array, gradient: Array, velocity: Array) -> tuple[Array, Array]:
        """Return the next anchor and velocity as new arrays; the first velocity is zero."""
        velocity = velocity * self.momentum + gradient
        return anchor - (gradient + velocity * self.momentum) * self.lr, velocity

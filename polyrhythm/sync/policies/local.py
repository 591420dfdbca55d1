"""Local steps: workers train alone for many steps, then take one step together.

After that, all workers compare how far they have moved from the point where they began together.
The mean of these moves is taken as a gradient, and an outer optimizer with Nesterov momentum takes
one step along it; there all begin again. Who averages is a matter of `all_reduce`, how often is one
of the workers, who report no other steps; here is what they do with the average.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv:2311.08105. The momentum is that of `torch.optim.SGD(nesterov=True)`.
"""

from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from polyrhythm.errors import PolicyError


class Arithmetic(Protocol):
    """What numbers, numpy arrays and tensors have in common."""

    def __add__(self, other: Self, /) -> Self: ...
    def __sub__(self, other: Self, /) -> Self: ...
    def __mul__(self, factor: float, /) -> Self: ...


Array = TypeVar("Array", bound=Arithmetic)


def pseudo_gradient(anchor: Array, mean: Array) -> Array:
    """From the mean of the workers' weights back to the point where they began together."""
    return anchor - mean


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterNesterov:
    """The outer optimizer; it keeps no state, so that an aborted step leaves none behind."""

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
        """The next anchor and velocity, as new arrays; the first velocity is zero."""
        velocity = velocity * self.momentum + gradient
        return anchor - (gradient + velocity * self.momentum) * self.lr, velocity

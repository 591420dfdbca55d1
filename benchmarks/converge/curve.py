"""Loss against time and samples: when a target is reached, and how two runs compare.

A curve has a point per moment of a run: the loss of the mean of all workers' models as they were
then. Single points go up and down by chance, so a curve is smoothed before it is read: each point
becomes the mean of itself and its neighbours. Between points it is a straight line.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyrhythm.types import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points in order of time; `batches` is how many had been learned from by then."""

    times: tuple[Seconds, ...]
    batches: tuple[int, ...]
    losses: tuple[float, ...]

    def time_to(self, target: float) -> Seconds:
        """When the loss first was at the target or below; inf if never."""
        return _crossing(self.times, smoothed(self.losses), target)

    def batches_to(self, target: float) -> float:
        """How many batches had been learned from by then; inf if never."""
        return _crossing(self.batches, smoothed(self.losses), target)


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of each with its neighbours, of which those at the ends have one."""
    return [statistics.fmean(losses[max(0, i - 1) : i + 2]) for i in range(len(losses))]


def _crossing(places: Sequence[float], losses: Sequence[float], target: float) -> float:
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0:
                return places[0]
            before = losses[i - 1]
            part = (before - target) / (before - loss)
            return places[i - 1] + part * (places[i] - places[i - 1])
    return math.inf


def speedup(slow: Seconds, fast: Seconds, slow_ended: Seconds) -> float:
    """How many times sooner `fast` came; where `slow` never did, it counts as just after its end.

    0 if `fast` never came.
    """
    return min(slow, slow_ended) / fast if fast < math.inf else 0.0


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Of pairs, such as the runs of two sides with the same seed."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def best(values: Mapping[str, float]) -> str:
    """Whose is the largest; of equals, the first."""
    return max(values, key=lambda name: values[name])

"""Bounds of a step's time if the all-reduce overlaps with compute.

An all-reduce is a reduce-scatter and an all-gather, of half its time each. The first can overlap
with the backward; the second, if deferred, with the next forward. These are the times of a step
with the best possible overlap, ignoring layers; `timeline.py` simulates layers and buckets.

Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
Pipelining", ICDCS 2023, equations 3 to 9. Departures: sizes are bytes, not elements; equation 9 is
for any ratio of backward and forward, where the paper has the backward take two forwards. With
longer backwards the gain can be negative: then a plain all-reduce, whose all-gather also overlaps
with the backward, is better.
"""

from dataclasses import dataclass

from polyrhythm.errors import DescriptionError
from polyrhythm.types import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The link between any two workers, which all send and receive at the same time."""

    latency: Seconds  # alpha: of each message
    bandwidth: float  # bytes per second; 1 / beta

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise DescriptionError(
                f"latency={self.latency:g} bandwidth={self.bandwidth:g}",
                expected="seconds from 0 on, and more than 0 bytes per second",
                fix="use values measured between two workers",
            )

    def reduce_scatter(self, size: Bytes, num_workers: int) -> Seconds:
        """Equation 3: a ring of P - 1 rounds, each with a P-th of the buffer."""
        return (num_workers - 1) * (self.latency + size / num_workers / self.bandwidth)

    def all_gather(self, size: Bytes, num_workers: int) -> Seconds:
        """Equation 4: as long as the reduce-scatter."""
        return self.reduce_scatter(size, num_workers)

    def all_reduce(self, size: Bytes, num_workers: int) -> Seconds:
        """Equation 5: both, one after the other."""
        return self.reduce_scatter(size, num_workers) + self.all_gather(size, num_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one worker: its compute, and the communication of its gradients."""

    forward: Seconds
    backward: Seconds
    reduce_scatter: Seconds
    all_gather: Seconds

    @property
    def compute(self) -> Seconds:
        return self.forward + self.backward

    @property
    def decoupled(self) -> Seconds:
        """Equation 7: the all-gather overlaps with the next forward."""
        hidden_forward = max(self.forward, self.all_gather)
        return hidden_forward + max(self.backward, self.reduce_scatter)

    @property
    def coupled(self) -> Seconds:
        """Equation 8: the whole all-reduce overlaps with the backward, as far as it can."""
        return self.forward + max(self.backward, self.reduce_scatter + self.all_gather)

    @property
    def gain(self) -> Seconds:
        """Equation 9: how much shorter a step gets by decoupling; negative if it gets longer."""
        return self.coupled - self.decoupled

    def max_speedup(self, num_workers: int) -> float:
        """Equation 6, S_max: the speedup of `num_workers` over one, for any schedule."""
        exposed = self.reduce_scatter - min(self.reduce_scatter, self.backward)
        exposed += self.all_gather - min(self.all_gather, self.forward)
        return num_workers * self.compute / (self.compute + exposed)

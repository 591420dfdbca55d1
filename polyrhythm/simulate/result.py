"""The result of a simulation: ends of all steps, waits of workers, bytes sent."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from polyrhythm.types import Seconds, Worker

_START = 0.1  # fraction of steps left out: pipelines are empty, policies have no measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochChange:
    """Devices were lost or have returned, and the others went on, in an exact mode."""

    at: Seconds  # when the epoch before has ended
    resumed: Seconds  # when they computed again
    what: str
    why: str  # the pipelines are as they are now


@dataclass(frozen=True, kw_only=True, repr=False)
class SimulationResult:
    ends: tuple[tuple[Seconds, ...], ...]  # [pipeline][step]: ended on all its stages
    samples: tuple[int, ...]  # per step of each pipeline
    duration: Seconds
    active_time: tuple[Seconds, ...]  # of each pipeline
    present: tuple[Seconds, ...]  # time of presence of each device of the cluster
    busy: dict[Worker, Seconds]  # compute; a device with several stages counts at its first one
    starved: dict[Worker, Seconds]  # waits for messages of neighbours
    waited: dict[Worker, Seconds]  # waits for averages
    group_sizes: Counter[int]  # of averages; 1 for a step without
    spread: float  # mean number of steps between the first and the last member of a group
    bytes_sent: NDArray[np.float64]  # [region, region]
    num_events: int
    num_actions: int
    stop_reason: str = ""  # why it ended before all steps were done
    # [pipeline][step]: samples of each step, where survivors take over those of others.
    shares: tuple[tuple[float, ...], ...] | None = None
    changes: tuple[EpochChange, ...] = ()

    @property
    def throughput(self) -> float:
        """Samples per second, without the first tenth."""
        return self._rate(self._shares)

    @property
    def step_time(self) -> Seconds:
        """Time in which all pipelines together run as many steps as there are pipelines.

        Where survivors take over the samples of others: the time of a global batch.
        """
        if self.shares is not None:
            return sum(self.samples) / self.throughput if self.throughput else float("inf")
        rate = self._rate([[1.0] * len(ends) for ends in self.ends])
        return len(self.ends) / rate if rate else float("inf")

    @property
    def bubble(self) -> float:
        """Fraction of time in which workers wait for messages of neighbours."""
        return self._share(self.starved)

    @property
    def waiting(self) -> float:
        """Fraction of time in which workers wait for averages."""
        return self._share(self.waited)

    @property
    def computing(self) -> float:
        """Fraction of time in which workers compute."""
        return self._share(self.busy)

    @property
    def group_size(self) -> float:
        """Mean group size over the steps of workers."""
        steps = {size: size * count for size, count in self.group_sizes.items()}
        return sum(size * n for size, n in steps.items()) / max(sum(steps.values()), 1)

    def __repr__(self) -> str:
        return (
            f"<SimulationResult: {sum(map(len, self.ends))} steps of {len(self.ends)} pipelines in "
            f"{self.duration:.4g} s, {self.throughput:.4g} samples/s>"
        )

    def _share(self, seconds: dict[Worker, Seconds]) -> float:
        active = sum(self.active_time[worker.pipeline] for worker in seconds)
        return sum(seconds.values()) / active if active else 0.0

    @property
    def _shares(self) -> Sequence[Sequence[float]]:
        if self.shares is not None:
            return self.shares
        pairs = zip(self.ends, self.samples, strict=True)
        return [[float(number)] * len(ends) for ends, number in pairs]

    def _rate(self, weights: Sequence[Sequence[float]]) -> float:
        """Weighted steps per second; a step counts by its fraction inside the measured time."""
        ends = sorted(end for pipeline in self.ends for end in pipeline)
        if not ends:
            return 0.0
        left_out = int(len(ends) * _START)
        start, end = ends[left_out - 1] if left_out else 0.0, ends[-1]
        if end <= start:
            return 0.0
        done = sum(
            _progress(pipeline, of_steps, end) - _progress(pipeline, of_steps, start)
            for pipeline, of_steps in zip(self.ends, weights, strict=True)
        )
        return done / (end - start)


def _progress(ends: Sequence[Seconds], weights: Sequence[float], time: Seconds) -> float:
    """Weights of the steps until `time`, with the fraction of a step whose end is known."""
    if not ends:
        return 0.0
    return float(np.interp(time, [0.0, *ends], [0.0, *accumulate(weights)]))

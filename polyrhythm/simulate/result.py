"""The result of a simulation: ends of all steps, waits of workers, bytes sent."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyrhythm.types import Seconds, Worker

_START = 0.1  # fraction of steps left out: pipelines are empty, policies have no measurements


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

    @property
    def throughput(self) -> float:
        """Samples per second, without the first tenth."""
        return self._rate([float(number) for number in self.samples])

    @property
    def step_time(self) -> Seconds:
        """Time in which all pipelines together run as many steps as there are pipelines."""
        rate = self._rate([1.0] * len(self.ends))
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

    def _rate(self, weights: list[float]) -> float:
        """Weighted steps per second; a step counts by its fraction inside the measured time."""
        ends = sorted(end for pipeline in self.ends for end in pipeline)
        if not ends:
            return 0.0
        left_out = int(len(ends) * _START)
        start, end = ends[left_out - 1] if left_out else 0.0, ends[-1]
        if end <= start:
            return 0.0
        steps = [_progress(pipeline, end) - _progress(pipeline, start) for pipeline in self.ends]
        return sum(w * count for w, count in zip(weights, steps, strict=True)) / (end - start)


def _progress(ends: tuple[Seconds, ...], time: Seconds) -> float:
    """Number of steps at `time`, with the fraction of a step whose end is known."""
    if not ends:
        return 0.0
    return float(np.interp(time, [0.0, *ends], range(len(ends) + 1)))

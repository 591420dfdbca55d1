"""What a simulation found: when every step was over, what workers waited for, what was sent."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyrhythm.types import Seconds, Worker

_START = 0.1  # of all steps, which find pipelines empty and policies without measurements


@dataclass(frozen=True, kw_only=True, repr=False)
class SimulationResult:
    ends: tuple[tuple[Seconds, ...], ...]  # [pipeline][step]: over on all its stages
    samples: tuple[int, ...]  # of a step of each pipeline
    duration: Seconds
    active_time: tuple[Seconds, ...]  # for how long each pipeline was at work
    present: tuple[Seconds, ...]  # for how long each device of the cluster was there
    busy: dict[Worker, Seconds]  # computing; of a device with several stages, at the first of them
    starved: dict[Worker, Seconds]  # waiting for messages of neighbours
    waited: dict[Worker, Seconds]  # for averages
    group_sizes: Counter[int]  # of averages; 1 for a step without
    spread: float  # steps between the most and the least advanced of a group, on average
    bytes_sent: NDArray[np.float64]  # [region, region]
    num_events: int
    num_actions: int
    cut_short: str = ""  # why it ended before all steps were made

    @property
    def throughput(self) -> float:
        """Samples per second, without the first tenth."""
        return self._rate([float(number) for number in self.samples])

    @property
    def step_time(self) -> Seconds:
        """In which all pipelines together make as many steps as there are pipelines."""
        rate = self._rate([1.0] * len(self.ends))
        return len(self.ends) / rate if rate else float("inf")

    @property
    def bubble(self) -> float:
        """The share of their time in which workers wait for messages of neighbours."""
        return self._share(self.starved)

    @property
    def waiting(self) -> float:
        """The share of their time in which workers wait for averages."""
        return self._share(self.waited)

    @property
    def computing(self) -> float:
        """The share of their time in which workers compute."""
        return self._share(self.busy)

    @property
    def group_size(self) -> float:
        """Of the average worker's step."""
        steps = {size: size * count for size, count in self.group_sizes.items()}
        return sum(size * n for size, n in steps.items()) / max(sum(steps.values()), 1)

    def __repr__(self) -> str:
        return (
            f"<SimulationResult: {sum(map(len, self.ends))} steps of {len(self.ends)} pipelines in "
            f"{self.duration:.4g} s, {self.throughput:.4g} samples/s>"
        )

    def _share(self, seconds: dict[Worker, Seconds]) -> float:
        there = sum(self.active_time[worker.pipeline] for worker in seconds)
        return sum(seconds.values()) / there if there else 0.0

    def _rate(self, worth: list[float]) -> float:
        """Progress per second: a step counts by the part of it that is in the time looked at."""
        ends = sorted(end for one in self.ends for end in one)
        if not ends:
            return 0.0
        left_out = int(len(ends) * _START)
        start, end = ends[left_out - 1] if left_out else 0.0, ends[-1]
        if end <= start:
            return 0.0
        made = [_progress(one, end) - _progress(one, start) for one in self.ends]
        return sum(each * count for each, count in zip(worth, made, strict=True)) / (end - start)


def _progress(ends: tuple[Seconds, ...], time: Seconds) -> float:
    """Steps made by then; parts of a step count where its end is known."""
    if not ends:
        return 0.0
    return float(np.interp(time, [0.0, *ends], range(len(ends) + 1)))

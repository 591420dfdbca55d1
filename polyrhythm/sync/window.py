"""Windows: how long a stage collects ready workers before it makes them a group.

A window opens with the first ready worker. Everyone who comes before it closes is in the group, so
its length decides the size of groups. Three rules:
- `RateWindow`: (g - 1) / rate, where rate is the measured number of arrivals per second: groups of
  about g, however many workers there are and however fast they are. Workers that come in a burst,
  as equal ones do, are not cut apart: it stays open while they come faster than twice the rate.
- `PaperWindow`: the measured iteration time / N, longer while groups come out too small.
- `FixedWindow`: so many seconds. 0 is local SGD, infinity is all-reduce.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023: section 3.2 (T, and its extremes), section 5.1
(T is 1/N of the iteration time), section 4 (enlarged when too few are ready). Departures:
`RateWindow` is new, since iteration time / N yields groups of about two for any N. How much section
4 enlarges is not said: here a window that caught one worker alone doubles the next one, up to one
iteration, and any other shortens it by a tenth, down to 1/N. Until something is measured, a window
closes with the g-th arrival (the second, for the paper's).
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

from polyrhythm.errors import PolicyError
from polyrhythm.types import Seconds, Worker

TOO_FEW = 2  # a group of fewer is one worker alone
LONGER, SHORTER = 2.0, 0.9  # the factors of the authors' published code
BURST = 0.5  # of the mean gap: who comes sooner after another comes with it
MEMORY = 2  # means go back about so many arrivals per worker


class CollectionWindow(Protocol):
    def record_arrival(self, worker: Worker, now: Seconds, num_workers: int) -> None:
        """A worker of the `num_workers` present is ready."""

    def open(self, num_workers: int) -> Seconds:
        """How long the window that opens now is to be."""

    def hold_open(self) -> Seconds:
        """How long it stays open after an arrival, at least."""

    def is_full(self, size: int) -> bool:
        """Whether to close it with `size` ready workers, whatever the time."""

    def record_group(self, size: int, num_workers: int) -> None:
        """A window has closed with `size` ready workers."""

    def record_leave(self, worker: Worker) -> None: ...


@dataclass(slots=True)
class RunningMean:
    """Exponentially weighted, and the plain mean until it has seen enough for that."""

    value: float = math.nan
    _count: int = 0

    def add(self, sample: float, horizon: int) -> None:
        self._count += 1
        if self._count == 1:
            self.value = sample
        else:
            self.value += (sample - self.value) / min(self._count, horizon)

    @property
    def is_known(self) -> bool:
        return self._count > 0


@dataclass(slots=True)
class FixedWindow:
    seconds: Seconds  # T

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise PolicyError(
                f"window={self.seconds:g}",
                expected="0 seconds or more, or a rule",
                fix="use 'rate' to have it measured",
            )

    def record_arrival(self, worker: Worker, now: Seconds, num_workers: int) -> None:
        pass

    def open(self, num_workers: int) -> Seconds:
        return self.seconds

    def hold_open(self) -> Seconds:
        return 0.0

    def is_full(self, size: int) -> bool:
        return False

    def record_group(self, size: int, num_workers: int) -> None:
        pass

    def record_leave(self, worker: Worker) -> None:
        pass


@dataclass(slots=True)
class RateWindow:
    target: int  # g
    longest: Seconds
    _gap: RunningMean = field(default_factory=RunningMean, init=False)  # 1 / rate
    _last: Seconds = field(default=math.nan, init=False)
    _is_measured: bool = field(default=False, init=False)

    def record_arrival(self, worker: Worker, now: Seconds, num_workers: int) -> None:
        if not math.isnan(self._last):
            self._gap.add(now - self._last, MEMORY * num_workers)
        self._last = now

    def open(self, num_workers: int) -> Seconds:
        self._is_measured = self._gap.is_known
        if not self._is_measured:
            return self.longest
        return min((min(self.target, num_workers) - 1) * self._gap.value, self.longest)

    def hold_open(self) -> Seconds:
        return BURST * self._gap.value if self._is_measured else 0.0

    def is_full(self, size: int) -> bool:
        return size >= self.target and not self._is_measured

    def record_group(self, size: int, num_workers: int) -> None:
        pass

    def record_leave(self, worker: Worker) -> None:
        self._last = math.nan  # if all leave for a while, that is a pause, and no gap


@dataclass(slots=True)
class PaperWindow:
    longest: Seconds
    _iteration: RunningMean = field(default_factory=RunningMean, init=False)  # tau
    _last: dict[Worker, Seconds] = field(default_factory=dict, init=False)
    _enlarged: float = field(default=1.0, init=False)
    _is_measured: bool = field(default=False, init=False)

    def record_arrival(self, worker: Worker, now: Seconds, num_workers: int) -> None:
        last = self._last.get(worker)
        if last is not None:
            self._iteration.add(now - last, MEMORY * num_workers)
        self._last[worker] = now

    def open(self, num_workers: int) -> Seconds:
        self._is_measured = self._iteration.is_known
        if not self._is_measured:
            return self.longest
        return min(self._iteration.value * self._enlarged / num_workers, self.longest)

    def hold_open(self) -> Seconds:
        return 0.0

    def is_full(self, size: int) -> bool:
        return size >= TOO_FEW and not self._is_measured

    def record_group(self, size: int, num_workers: int) -> None:
        if size < TOO_FEW:
            self._enlarged = min(self._enlarged * LONGER, max(num_workers, 1))
        else:
            self._enlarged = max(self._enlarged * SHORTER, 1.0)

    def record_leave(self, worker: Worker) -> None:
        self._last.pop(worker, None)

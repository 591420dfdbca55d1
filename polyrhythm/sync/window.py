"""Windows: how long a stage collects ready workers before they become a group.

A window opens with the first ready worker. All workers that arrive before it closes are in the
group, so its length determines the size of groups. Three rules:
- `RateWindow`: (g - 1) / rate, where rate is the measured number of arrivals per second: groups of
  about g, for any number and speed of workers. Workers that arrive in a burst, as equal ones do,
  stay in one group: the window is open while they arrive faster than twice the rate.
- `PaperWindow`: the measured iteration time / N, longer while groups are too small.
- `FixedWindow`: a fixed number of seconds. 0 is local SGD, infinity is all-reduce.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023: section 3.2 (T, and its extremes), section 5.1
(T is 1/N of the iteration time), section 4 (enlarged when too few are ready). Departures:
`RateWindow` is new, since iteration time / N yields groups of about two for any N. Section 4 does
not say by how much it enlarges: here a window with a single worker doubles the next one, up to one
iteration, and any other shortens it by a tenth, down to 1/N. Before the first measurement, a window
closes with the g-th arrival (the second, for the paper's).
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

from polyrhythm.errors import PolicyError
from polyrhythm.types import Seconds, Worker

TOO_FEW = 2  # a group of fewer is a single worker
LONGER, SHORTER = 2.0, 0.9  # the factors of the authors' published code
BURST = 0.5  # of the mean gap: arrivals closer than this are one burst
MEMORY = 2  # means cover about this many arrivals per worker


class CollectionWindow(Protocol):
    def record_arrival(self, worker: Worker, now: Seconds, num_workers: int) -> None:
        """Record that one of the `num_workers` present workers is ready."""

    def open(self, num_workers: int) -> Seconds:
        """Open a window and return its length."""

    def hold_open(self) -> Seconds:
        """Shortest time that the window stays open after an arrival."""

    def is_full(self, size: int) -> bool:
        """Whether to close the window at once, with `size` ready workers."""

    def record_group(self, size: int, num_workers: int) -> None:
        """Record that a window closed with `size` ready workers."""

    def record_leave(self, worker: Worker) -> None: ...


@dataclass(slots=True)
class RunningMean:
    """Exponentially weighted mean; the plain mean of the first `horizon` samples."""

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
                expected="0 seconds or more, 'rate' or 'paper'",
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
        self._last = math.nan  # if all workers leave for a while, the pause is no gap


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

"""Balanced: the global batch is constant; its micro-batches are assigned by measured speed.

All workers average gradients at every step, as in an all-reduce, but a straggler gets fewer
micro-batches, and each gradient is weighted by its samples; so the result equals that of equal
shares, and only the time changes. Every worker can have its own MicrobatchBalancer: with the same
measurements, all assign the same shares.

Source: none; the groups are those of `all_reduce`. Proportional shares with largest remainders are
the usual method; here each micro-batch goes to the worker that would finish it first, which makes
the slowest worker's time as short as whole micro-batches allow. It matters: of 256 among 16
workers, one of them six times slower, proportion rounds its 2.8 up to 3, and the step takes 18
units, not 17.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.types import Seconds, Worker


def balance_microbatches(
    speeds: Sequence[float], num_microbatches: int, min_count: int = 1
) -> list[int]:
    """Number of micro-batches per worker that minimizes the time of the slowest worker.

    Speeds are micro-batches per second, or proportional to that. Ties go to the first worker.
    """
    if not speeds or not all(0 < speed < float("inf") for speed in speeds):
        raise PolicyError(
            f"speeds={list(speeds)}", expected="one or more, all above 0", fix="measure them"
        )
    num_left = num_microbatches - min_count * len(speeds)
    if min_count < 0 or num_left < 0:
        raise PolicyError(
            f"{num_microbatches} micro-batches for {len(speeds)} workers",
            expected=f"at least {max(min_count, 0)} for each",
            fix="use more micro-batches, fewer workers, or min_count=0",
        )
    counts = [min_count] * len(speeds)
    finish = [((min_count + 1) / speed, i) for i, speed in enumerate(speeds)]
    heapq.heapify(finish)
    for _ in range(num_left):
        _, first = finish[0]
        counts[first] += 1
        heapq.heapreplace(finish, ((counts[first] + 1) / speeds[first], first))
    return counts


@dataclass(slots=True)
class MicrobatchBalancer:
    """Assigns micro-batches by smoothed measurements; changes shares only for a gain."""

    num_microbatches: int
    smoothing: float = 0.3  # weight of the newest measurement
    min_gain: float = 0.05  # fraction of the step; a smaller gain is noise
    min_count: int = 1  # a worker without micro-batches would not be measured any more
    _seconds: dict[Worker, Seconds] = field(default_factory=dict, init=False)  # per micro-batch
    _counts: dict[Worker, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not (0 < self.smoothing <= 1 and 0 <= self.min_gain < 1):
            raise PolicyError(
                f"smoothing={self.smoothing:g}, min_gain={self.min_gain:g}",
                expected="smoothing above 0 and up to 1, min_gain from 0 to below 1",
                fix="omit them for the defaults",
            )

    def record(self, worker: Worker, num_microbatches: int, seconds: Seconds) -> None:
        """Record that a worker took `seconds` for the micro-batches of one step."""
        if num_microbatches < 1 or not 0 < seconds < float("inf"):
            raise PolicyError(
                f"worker {worker} took {seconds:g} s for {num_microbatches} micro-batches",
                expected="at least one micro-batch, and a time above 0",
                fix="measure steps with work only",
            )
        newest = seconds / num_microbatches
        before = self._seconds.get(worker, newest)
        self._seconds[worker] = before + self.smoothing * (newest - before)

    def assign(self, workers: Iterable[Worker]) -> dict[Worker, int]:
        """Number of micro-batches per worker in the next step; the sum is constant."""
        present = sorted(workers)
        known = [self._seconds[worker] for worker in present if worker in self._seconds]
        typical = sum(known) / len(known) if known else 1.0  # for workers without measurement
        seconds = {worker: self._seconds.get(worker, typical) for worker in present}
        speeds = [1 / seconds[worker] for worker in present]
        balanced = balance_microbatches(speeds, self.num_microbatches, self.min_count)
        counts = dict(zip(present, balanced, strict=True))
        if self._counts.keys() != counts.keys() or (
            _step_time(counts, seconds) < (1 - self.min_gain) * _step_time(self._counts, seconds)
        ):
            self._counts = counts
        return dict(self._counts)


def _step_time(counts: Mapping[Worker, int], seconds: Mapping[Worker, Seconds]) -> Seconds:
    return max(num * seconds[worker] for worker, num in counts.items())

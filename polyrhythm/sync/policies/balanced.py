"""Balanced: the global batch stays as it is; its micro-batches are dealt by measured speed.

All workers average gradients at every step, as in an all-reduce, but a slow one gets fewer of the
micro-batches, and each gradient counts by its samples; so the result is that of equal shares, and
only the time changes. Every worker can hold a dealer of its own: fed with the same measurements,
all deal alike.

Source: none; the groups are those of `all_reduce`. Proportional shares with largest remainders
would be the usual way; here a micro-batch goes to whoever would finish it first, which makes the
slowest worker's time as short as whole micro-batches allow. It matters: of 256 among 16 workers,
one of them six times slower, proportion rounds its 2.8 up to 3, and the step takes 18 units, not
17.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.types import Seconds, Worker


def balance_microbatches(
    speeds: Sequence[float], num_microbatches: int, min_count: int = 1
) -> list[int]:
    """How many micro-batches each gets, so that all are dealt and the last one ends soonest.

    Speeds are micro-batches per second, or anything in proportion. Equal times go to the first.
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
            fix="use more micro-batches, fewer workers, or least=0",
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
    """Deals by smoothed measurements, and anew only if that is worth it."""

    num_microbatches: int
    smoothing: float = 0.3  # weight of the newest measurement
    min_gain: float = 0.05  # of the step: a smaller gain is noise, and changes nothing
    min_count: int = 1  # one that gets nothing is measured no more
    _seconds: dict[Worker, Seconds] = field(default_factory=dict, init=False)  # per micro-batch
    _counts: dict[Worker, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not (0 < self.smoothing <= 1 and 0 <= self.min_gain < 1):
            raise PolicyError(
                f"smoothing={self.smoothing:g}, worth={self.min_gain:g}",
                expected="smoothing above 0 and up to 1, worth from 0 to below 1",
                fix="leave them out",
            )

    def record(self, worker: Worker, num_microbatches: int, seconds: Seconds) -> None:
        """A worker took `seconds` for the micro-batches of one step."""
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
        """The micro-batches of each worker in the next step; they always add up to all."""
        present = sorted(workers)
        known = [self._seconds[worker] for worker in present if worker in self._seconds]
        typical = sum(known) / len(known) if known else 1.0  # for one that is not yet measured
        seconds = {worker: self._seconds.get(worker, typical) for worker in present}
        speeds = [1 / seconds[worker] for worker in present]
        counts = dict(
            zip(
                present,
                balance_microbatches(speeds, self.num_microbatches, self.min_count),
                strict=True,
            )
        )
        if self._counts.keys() != counts.keys() or (
            _step_time(counts, seconds) < (1 - self.min_gain) * _step_time(self._counts, seconds)
        ):
            self._counts = counts
        return dict(self._counts)


def _step_time(counts: Mapping[Worker, int], seconds: Mapping[Worker, Seconds]) -> Seconds:
    return max(num * seconds[worker] for worker, num in counts.items())

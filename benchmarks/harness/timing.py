"""Time of an action of all workers, and the share of it that the machine's host gave to others."""

import time
from collections.abc import Callable
from typing import TypeVar

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from polyrhythm.errors import peer_errors
from polyrhythm.types import Seconds

MAX_STOLEN = 0.04  # of all cores' time: beyond it, a step that sleeps takes visibly longer
_STOLEN, _NUM_KINDS = 7, 8  # of Linux' kinds of time; what guests get is part of the first ones

T = TypeVar("T")


def time_together(action: Callable[[], object] | None, *, head_start: Seconds) -> Seconds:
    """Return the time from a common start until the last worker is done; all workers call this.

    `head_start` must suffice for all workers to agree on the start. A worker whose `action` is None
    only learns the time.
    """
    start = max_over_workers(time.monotonic() + head_start)
    if action is not None:
        time.sleep(max(0.0, start - time.monotonic()))
        action()
    return max_over_workers(0.0 if action is None else time.monotonic()) - start


def max_over_workers(value: Seconds) -> Seconds:
    """Return the largest value of all workers, whose hosts share one clock; a barrier, too."""
    largest = torch.tensor(value, dtype=torch.float64)
    with peer_errors("another worker", "agreeing on a time"):
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


class StolenTime:
    """The time, of all cores, that the machine's host gave to others since this was made."""

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self) -> float:
        spent = [now - then for now, then in zip(psutil.cpu_times(), self._before, strict=True)]
        total = sum(spent[:_NUM_KINDS])
        return float(spent[_STOLEN] / total) if total else 0.0


def undisturbed(measure: Callable[[], T], *, max_tries: int) -> T:
    """Measure until the host takes at most `MAX_STOLEN`; return the least disturbed value.

    A value is chosen by what the host took, never by itself.
    """
    tries: list[tuple[float, T]] = []
    while not tries or (tries[-1][0] > MAX_STOLEN and len(tries) < max_tries):
        stolen, value = StolenTime(), measure()
        tries.append((stolen.share(), value))
    return min(tries, key=lambda one: one[0])[1]

"""The clock of a simulation: what is to happen when, in one order.

Of two things at the same time the one of the lower priority number comes first, and of two of the
same priority the one that was said first: a simulation comes out alike each time.
"""

import heapq
import math
from collections.abc import Callable
from typing import Any

from polyrhythm.types import Seconds

PRIORITY_CHANGE, PRIORITY_RETRY, PRIORITY_LAST = -1, 1, 2  # priorities other than 0: see Clock
RETRY_INTERVAL: Seconds = 1.0  # until one tries again to send over a link that is lost
_Entry = tuple[Seconds, int, int, Callable[..., None], tuple[Any, ...]]


class Clock:
    """What a scenario changes comes first; TRIES is what happens because nothing else did.

    All of it comes after what the engine has at the same time.
    """

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self._heap: list[_Entry] = []
        self._sequence = 0

    def at(
        self, time: Seconds, callback: Callable[..., None], *args: Any, priority: int = 0
    ) -> None:
        """Call it with what is given, at `time`; what is past happens now."""
        self._sequence += 1
        entry = (max(time, self.now), priority, self._sequence, callback, args)
        heapq.heappush(self._heap, entry)

    @property
    def next_time(self) -> Seconds:
        """Of what is to happen first; inf if there is nothing."""
        return self._heap[0][0] if self._heap else math.inf

    @property
    def only_retries(self) -> bool:
        """Whether what comes next is that."""
        return bool(self._heap) and self._heap[0][1] == PRIORITY_RETRY

    def run_next(self) -> None:
        self.now, _, _, callback, args = heapq.heappop(self._heap)
        callback(*args)

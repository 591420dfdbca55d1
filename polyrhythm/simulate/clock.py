"""The virtual clock: callbacks in one order.

Of two callbacks at the same time, the one with the lower priority number comes first, and of two
with the same priority, the one that was scheduled first: a simulation is deterministic.
"""

import heapq
import math
from collections.abc import Callable
from typing import Any

from polyrhythm.types import Seconds

PRIORITY_CHANGE, PRIORITY_RETRY, PRIORITY_LAST = -1, 1, 2  # priorities other than 0: see Clock
RETRY_INTERVAL: Seconds = 1.0  # between two tries to send over a lost link
_Entry = tuple[Seconds, int, int, Callable[..., None], tuple[Any, ...]]


class Clock:
    """A heap of callbacks: PRIORITY_CHANGE for a scenario, PRIORITY_RETRY for timers and retries.

    All callbacks come after the engine's events of the same time.
    """

    def __init__(self, start: Seconds = 0.0) -> None:
        self.now = start
        self._heap: list[_Entry] = []
        self._sequence = 0

    def at(
        self, time: Seconds, callback: Callable[..., None], *args: Any, priority: int = 0
    ) -> None:
        """Call `callback(*args)` at `time`, or now if that is in the past."""
        self._sequence += 1
        entry = (max(time, self.now), priority, self._sequence, callback, args)
        heapq.heappush(self._heap, entry)

    @property
    def next_time(self) -> Seconds:
        """Time of the next callback; inf if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    @property
    def only_retries(self) -> bool:
        """Whether the next callback is a retry."""
        return bool(self._heap) and self._heap[0][1] == PRIORITY_RETRY

    def run_next(self) -> None:
        self.now, _, _, callback, args = heapq.heappop(self._heap)
        callback(*args)

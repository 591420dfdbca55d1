"""Waits: who is ready and has no group yet, and when each will have waited too long."""

import heapq
import math
from typing import NamedTuple

from polyrhythm.sync.member import Member
from polyrhythm.types import Seconds


class Wait(NamedTuple):
    """The number is there so that no others are compared."""

    until: Seconds
    number: int
    patience: Seconds
    clock: int
    member: Member

    def goes_on(self) -> bool:
        member = self.member
        waits = member.is_ready and not member.line and not member.decider.is_gathering
        return waits and member.clock == self.clock


class Waits:
    def __init__(self) -> None:
        self._heap: list[Wait] = []
        self._num_waits = 0

    def add(self, member: Member, now: Seconds, patience: Seconds) -> None:
        self._num_waits += 1
        wait = Wait(now + patience, self._num_waits, patience, member.clock, member)
        heapq.heappush(self._heap, wait)

    def next_end(self) -> Seconds:
        """Inf if nobody waits."""
        while self._heap and not self._heap[0].goes_on():
            heapq.heappop(self._heap)
        return self._heap[0].until if self._heap else math.inf

    def take_next(self) -> Wait:
        """The one of `next_end`."""
        return heapq.heappop(self._heap)

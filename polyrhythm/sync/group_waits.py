"""Deadlines of workers that are ready and have no group yet."""

import heapq
import math
from typing import NamedTuple

from polyrhythm.sync.members import MemberState
from polyrhythm.types import Seconds


class GroupWait(NamedTuple):
    """One wait of one worker; `number` makes heap comparisons stop before `member`."""

    deadline: Seconds
    number: int
    wait_timeout: Seconds
    clock: int
    member: MemberState

    def is_waiting(self) -> bool:
        member = self.member
        waits = member.is_ready and not member.queue and not member.stage_policy.is_average_all
        return waits and member.clock == self.clock


class GroupWaits:
    def __init__(self) -> None:
        self._heap: list[GroupWait] = []
        self._num_waits = 0

    def add(self, member: MemberState, now: Seconds, wait_timeout: Seconds) -> None:
        self._num_waits += 1
        wait = GroupWait(now + wait_timeout, self._num_waits, wait_timeout, member.clock, member)
        heapq.heappush(self._heap, wait)

    def next_deadline(self) -> Seconds:
        """The earliest deadline; inf if no worker waits."""
        while self._heap and not self._heap[0].is_waiting():
            heapq.heappop(self._heap)
        return self._heap[0].deadline if self._heap else math.inf

    def pop_next(self) -> GroupWait:
        """Remove and return the wait with the deadline of `next_deadline`."""
        return heapq.heappop(self._heap)

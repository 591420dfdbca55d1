"""The group queue: one total order of groups; each worker runs its groups in that order.

Groups are numbered as they are formed. A group is first when it is first in the queue of each of
its members. The oldest group is first in all its queues, so no two groups can wait for each other,
and any two workers that share groups see them in the same order.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020, section 4.1. Departures: a group never overtakes an older one that shares a
member with it; a group can be removed from the queues, and has a deadline. So has the wait of a
ready worker that is in no group yet.
"""

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

from polyrhythm.sync.members import GroupRound, MemberState, StagePolicy
from polyrhythm.types import Group, Seconds


class GroupQueue:
    def __init__(self, first_gid: int) -> None:
        self.groups: dict[int, GroupRound] = {}
        self._next_gid = first_gid
        self._deadlines: list[tuple[Seconds, int]] = []  # a heap, including outdated entries

    def add(
        self, group: Group, members: list[MemberState], stage_policy: StagePolicy
    ) -> GroupRound:
        """Append a group to the queues of its members."""
        group_round = GroupRound(self._next_gid, group, members, stage_policy)
        self.groups[group_round.gid] = group_round
        self._next_gid += 1
        for member in members:
            member.queue.append(group_round)
        return group_round

    def remove(self, group_round: GroupRound) -> None:
        del self.groups[group_round.gid]
        for member in group_round.members:
            member.queue.remove(group_round)

    def is_first(self, group_round: GroupRound) -> bool:
        for member in group_round.members:
            if member.queue[0] is not group_round or (member.is_stopping and not member.is_ready):
                return False
        return True

    def set_deadline(self, group_round: GroupRound, deadline: Seconds) -> None:
        group_round.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, group_round.gid))

    def next_deadline(self) -> Seconds:
        """The earliest deadline of a group; inf if there is none."""
        while self._deadlines:
            deadline, gid = self._deadlines[0]
            group_round = self.groups.get(gid)
            if group_round is not None and group_round.deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return math.inf

    def expired(self, now: Seconds) -> Iterator[GroupRound]:
        """Yield groups past their deadline, by deadline; the caller removes or extends each."""
        while self.next_deadline() <= now:
            yield self.groups[heapq.heappop(self._deadlines)[1]]


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
    """Deadlines of workers that are ready and have no group yet."""

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

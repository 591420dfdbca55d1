"""Lines: all groups in one order, in which each worker has them one at a time.

Groups are numbered as they are formed. A group is first when it comes first in the line of each of
its members. The oldest group is first in all its lines, so no two groups can wait for each other,
and any two workers that share groups see them in the same order.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020, section 4.1. Departures: a group never overtakes an older one that shares a
member with it; a group can be taken out of the lines, and has a time by which it is due.
"""

import heapq
import math
from collections.abc import Iterator

from polyrhythm.sync.member import Assigned, Decider, Member
from polyrhythm.types import Group, Seconds


class Lines:
    def __init__(self, first_gid: int) -> None:
        self.groups: dict[int, Assigned] = {}
        self._next_gid = first_gid
        self._dues: list[tuple[Seconds, int]] = []  # a heap; some are out of date

    def add(self, group: Group, members: list[Member], decider: Decider) -> Assigned:
        """At the end of its members' lines."""
        assigned = Assigned(self._next_gid, group, members, decider)
        self.groups[assigned.gid] = assigned
        self._next_gid += 1
        for member in members:
            member.line.append(assigned)
        return assigned

    def remove(self, assigned: Assigned) -> None:
        del self.groups[assigned.gid]
        for member in assigned.members:
            member.line.remove(assigned)

    def is_first(self, assigned: Assigned) -> bool:
        for member in assigned.members:
            if member.line[0] is not assigned or (member.stops and not member.is_ready):
                return False
        return True

    def set_due(self, assigned: Assigned, due: Seconds) -> None:
        assigned.due = due
        heapq.heappush(self._dues, (due, assigned.gid))

    def next_due(self) -> Seconds:
        """When the first group is due; inf for never."""
        while self._dues:
            due, gid = self._dues[0]
            assigned = self.groups.get(gid)
            if assigned is not None and assigned.due == due:
                return due
            heapq.heappop(self._dues)
        return math.inf

    def overdue(self, now: Seconds) -> Iterator[Assigned]:
        """Groups that are due, the first one first; each has to be removed, or given more time."""
        while self.next_due() <= now:
            yield self.groups[heapq.heappop(self._dues)[1]]

"""Group buffers: groups planned ahead wait in one order that all their members share.

A planned group starts when it is first in the buffer of each of its members and each of them has
requested a group. Groups are planned one after another, and every buffer is a sub-sequence of that
one order, so no two groups can wait for each other: the oldest group is first for all its members,
and starts as soon as they have made their requests. A started group stays first until it is done.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020, section 5.1 (Group Buffer).
Departures: a group that has not started loses the members that leave; a single member that is left
keeps its position in the order as a group of one.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from polyrhythm.sync.group_ledger import GroupLedger
from polyrhythm.types import Group, Worker


@dataclass(slots=True, eq=False)
class _Planned:
    members: tuple[Worker, ...]
    why: str


@dataclass(slots=True)
class GroupBuffers:
    ledger: GroupLedger = field(default_factory=GroupLedger, init=False)
    _buffers: dict[Worker, deque[_Planned]] = field(default_factory=dict, init=False)

    def join(self, worker: Worker) -> None:
        self.ledger.join(worker)
        self._buffers[worker] = deque()

    def leave(self, worker: Worker) -> list[Group]:
        """Remove a worker from its planned groups; return the groups that can start now."""
        self.ledger.leave(worker)
        remaining: set[Worker] = set()
        for planned in self._buffers.pop(worker):
            planned.members = tuple(member for member in planned.members if member != worker)
            planned.why += f", without {worker}, which left"
            remaining.update(planned.members)
        return self._start(sorted(remaining))

    def request(self, worker: Worker) -> list[Group]:
        """Request the next group of a worker's buffer; it starts once all members have asked."""
        self.ledger.wait(worker)
        return self._start([worker])

    def plan(self, groups: Iterable[Group]) -> list[Group]:
        """Append groups to their members' buffers, in this order; return those that can start."""
        members: set[Worker] = set()
        for group in groups:
            planned = _Planned(group.members, group.why)
            for member in group.members:
                self._buffers[member].append(planned)
            members.update(group.members)
        return self._start(sorted(members))

    def finish(self, group: Group) -> None:
        """Close a group. No other group starts now: its members must make a request first."""
        if len(group.members) > 1:  # a group of one was over at once
            self.ledger.close(group)
            self._drop_first(group)

    def depth(self, worker: Worker) -> int:
        """Number of groups that a worker is planned for or in."""
        self.ledger.check(worker)
        return len(self._buffers[worker])

    def _start(self, workers: Iterable[Worker]) -> list[Group]:
        started = []
        for worker in workers:
            planned = self._first(worker)
            if planned is not None and all(
                self.ledger.is_waiting(member) and self._first(member) is planned
                for member in planned.members
            ):
                started.append(self.ledger.open(planned.members, planned.why))
                if len(planned.members) == 1:
                    self._drop_first(started[-1])
        return started

    def _drop_first(self, group: Group) -> None:
        for member in group.members:
            self._buffers[member].popleft()

    def _first(self, worker: Worker) -> _Planned | None:
        buffer = self._buffers[worker]
        return buffer[0] if buffer else None

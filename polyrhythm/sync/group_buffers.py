"""Group buffers: groups planned ahead wait in one order that all their members share.

A planned group begins when it comes first in the buffer of each of its members and each of them has
asked. Groups are planned one after the other, and every buffer is a sub-sequence of that one order,
so no two groups can wait for each other: the oldest one comes first for all its members, and begins
as soon as they have asked. A group that has begun stays first until it is done.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020, section 5.1 (Group Buffer).
Departures: a group that has not begun loses the members that leave; if one is left, it goes on
alone, so that its place in the order, and what it waits for, stays as it was.
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
        """Take a worker out of what it was planned for; what the others can begin now."""
        self.ledger.leave(worker)
        remaining: set[Worker] = set()
        for planned in self._buffers.pop(worker):
            planned.members = tuple(member for member in planned.members if member != worker)
            planned.why += f", without {worker}, which left"
            remaining.update(planned.members)
        return self._begin(sorted(remaining))

    def request(self, worker: Worker) -> list[Group]:
        """A worker wants the next group of its buffer; it begins if all the others asked too."""
        self.ledger.wait(worker)
        return self._begin([worker])

    def plan(self, groups: Iterable[Group]) -> list[Group]:
        """Put groups at the end of their members' buffers, in this order; those that can begin."""
        members: set[Worker] = set()
        for group in groups:
            planned = _Planned(group.members, group.why)
            for member in group.members:
                self._buffers[member].append(planned)
            members.update(group.members)
        return self._begin(sorted(members))

    def finish(self, group: Group) -> None:
        """A group is done. None begins by it: its members have to ask again first."""
        if len(group.members) > 1:  # one alone was over at once
            self.ledger.close(group)
            self._drop_first(group)

    def depth(self, worker: Worker) -> int:
        """How many groups a worker is planned for, or in."""
        self.ledger.check(worker)
        return len(self._buffers[worker])

    def _begin(self, workers: Iterable[Worker]) -> list[Group]:
        begun = []
        for worker in workers:
            planned = self._first(worker)
            if planned is not None and all(
                self.ledger.is_waiting(member) and self._first(member) is planned
                for member in planned.members
            ):
                begun.append(self.ledger.open(planned.members, planned.why))
                if len(planned.members) == 1:
                    self._drop_first(begun[-1])
        return begun

    def _drop_first(self, group: Group) -> None:
        for member in group.members:
            self._buffers[member].popleft()

    def _first(self, worker: Worker) -> _Planned | None:
        buffer = self._buffers[worker]
        return buffer[0] if buffer else None

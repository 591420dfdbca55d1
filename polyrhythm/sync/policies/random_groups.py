"""Random groups: each request draws a group at random; those that overlap take turns.

A request draws its group from all workers. If none of them is locked, it locks them at once; else
it waits in a queue, which is looked through again, oldest first, whenever locks fall. A locked
group is handed out once all its members have asked, and its locks fall when it is done.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020, section 4.1 (Group Generator, lock vector, pending groups); the group size
of 3 is from 7.1.3. Left open there, or decided otherwise here:
- A worker averages once per request. Section 4.1 draws a new group at each request while others
  have drawn the same worker too, which would make it average about `group_size` times a step. Here
  whichever of its groups comes first answers a request, and a worker whose own group is still
  waiting draws no other; so there are at most as many undone groups as workers.
- A younger group may pass an older one that waits for a lock, but no more than `max_passes` times:
  then it keeps its place, and none starves. Keeping the order always (0 passes) costs half the
  throughput of 16 equal workers in a simulation.
- Who leaves is taken out of the groups that have not begun; the groups it drew itself are dropped.
  A group may so shrink to one worker, which goes on alone.
"""

import random
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.sync.group_ledger import GroupLedger
from polyrhythm.sync.policy import Policy
from polyrhythm.types import Group, Seconds, Worker


@dataclass(slots=True, eq=False)
class _Drawn:
    owner: Worker
    members: set[Worker]
    num_passes: int = 0


@dataclass(slots=True)
class RandomGroups(Policy):
    group_size: int = 3
    seed: int = 0
    max_passes: int = 64
    _ledger: GroupLedger = field(default_factory=GroupLedger, init=False)
    _queue: list[_Drawn] = field(default_factory=list, init=False)  # oldest first, none locked
    _locks: dict[Worker, _Drawn] = field(default_factory=dict, init=False)
    _owners: set[Worker] = field(default_factory=set, init=False)  # whose own group is not done
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise PolicyError(
                f"group_size={self.group_size}",
                expected="at least 2: one alone does not average",
                fix="use 3, as the paper does, or every=n to average less often",
            )
        if self.max_passes < 0:
            raise PolicyError(
                f"max_passes={self.max_passes}", expected="0 or more", fix="leave it out"
            )
        self._random = random.Random(self.seed)

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self._ledger.join(worker)
        return []

    def on_request(self, worker: Worker, now: Seconds) -> list[Group]:
        self._ledger.wait(worker)
        if worker not in self._owners:
            others = [other for other in self._ledger.workers() if other != worker]
            drawn = self._random.sample(others, min(self.group_size - 1, len(others)))
            self._queue.append(_Drawn(worker, {worker, *drawn}))
            self._owners.add(worker)
            self._lock_what_is_free()
        return self._begin([worker])

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        if len(group.members) == 1:
            return []  # was over when it was handed out
        self._ledger.close(group)
        self._unlock(self._locks[group.members[0]])
        return self._begin(self._lock_what_is_free())

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        self._ledger.leave(worker)
        self._queue = [drawn for drawn in self._queue if drawn.owner != worker]
        self._owners.discard(worker)
        for drawn in self._queue:
            drawn.members.discard(worker)
        held = self._locks.get(worker)
        if held is None:
            return self._begin(self._lock_what_is_free())
        if held.owner == worker:
            self._unlock(held)
            return self._begin(self._lock_what_is_free())
        del self._locks[worker]
        held.members.remove(worker)
        return self._begin([held.owner, *self._lock_what_is_free()])

    def _lock_what_is_free(self) -> list[Worker]:
        """Lock the queued groups that can be, oldest first; their owners."""
        locked: list[Worker] = []
        waiting: list[_Drawn] = []
        for drawn in self._queue:
            older = [other for other in waiting if other.members & drawn.members]
            if drawn.members & self._locks.keys() or any(
                other.num_passes >= self.max_passes for other in older
            ):
                waiting.append(drawn)
                continue
            for other in older:
                other.num_passes += 1
            self._locks.update(dict.fromkeys(drawn.members, drawn))
            locked.append(drawn.owner)
        self._queue = waiting
        return locked

    def _unlock(self, drawn: _Drawn) -> None:
        self._owners.discard(drawn.owner)
        for member in drawn.members:
            del self._locks[member]

    def _begin(self, workers: list[Worker]) -> list[Group]:
        """Hand out the groups that lock these workers and whose members have all asked."""
        begun = []
        for worker in workers:
            drawn = self._locks.get(worker)
            if drawn is None or not all(map(self._ledger.is_waiting, drawn.members)):
                continue
            passed = f", passed {drawn.num_passes} times" if drawn.num_passes else ""
            begun.append(self._ledger.open(drawn.members, f"drawn for {drawn.owner}{passed}"))
            if len(drawn.members) == 1:
                self._unlock(drawn)  # no other group can begin by it before that worker asks
                self._lock_what_is_free()
        return begun

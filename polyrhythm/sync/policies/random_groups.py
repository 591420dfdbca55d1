"""Random groups: each request draws a group at random; groups that overlap run in sequence.

A request draws its group from all workers. If none of them is locked, it locks them at once; else
it waits in a queue, which is scanned again, oldest first, whenever locks are released. A locked
group starts once all its members have made a request, and its locks are released when it is done.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020, section 4.1 (Group Generator, lock vector, pending groups); the group size
of 3 is from 7.1.3. Left open there, or decided otherwise here:
- A worker averages once per request. Section 4.1 draws a new group at each request while others
  have drawn the same worker too, which would make it average about `group_size` times a step. Here
  the first of a worker's groups answers its request, and a worker whose own group is still waiting
  draws no other; so there are at most as many pending groups as workers.
- A younger group may pass an older one that waits for a lock, but at most `max_passes` times, so
  that no group starves. Never passing (0 passes) costs half the throughput of 16 equal workers in a
  simulation.
- A worker that leaves is removed from the groups that have not started; the group it drew itself is
  dropped. A group may so shrink to one worker, which continues alone.
"""

import random
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policy import GroupLedger, Policy
from polyrhythm.sync.snapshot import register_state
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
    _owners: set[Worker] = field(default_factory=set, init=False)  # their own group is not done
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise PolicyError(
                f"group_size={self.group_size}",
                expected="at least 2: a group of one does not average",
                fix="use 3, as the paper does, or every=n to average less often",
            )
        if self.max_passes < 0:
            raise PolicyError(
                f"max_passes={self.max_passes}", expected="0 or more", fix="omit it for 64"
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
            self._lock_free_groups()
        return self._start([worker])

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        if len(group.members) == 1:
            return []  # it was over when it was formed
        self._ledger.close(group)
        self._unlock(self._locks[group.members[0]])
        return self._start(self._lock_free_groups())

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        self._ledger.leave(worker)
        self._queue = [drawn for drawn in self._queue if drawn.owner != worker]
        self._owners.discard(worker)
        for drawn in self._queue:
            drawn.members.discard(worker)
        locked = self._locks.get(worker)
        if locked is None:
            return self._start(self._lock_free_groups())
        if locked.owner == worker:
            self._unlock(locked)
            return self._start(self._lock_free_groups())
        del self._locks[worker]
        locked.members.remove(worker)
        return self._start([locked.owner, *self._lock_free_groups()])

    def _lock_free_groups(self) -> list[Worker]:
        """Lock the queued groups that can be locked, oldest first; return their owners."""
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
            self._locks.update(dict.fromkeys(sorted(drawn.members), drawn))
            locked.append(drawn.owner)
        self._queue = waiting
        return locked

    def _unlock(self, drawn: _Drawn) -> None:
        self._owners.discard(drawn.owner)
        for member in drawn.members:
            del self._locks[member]

    def _start(self, workers: list[Worker]) -> list[Group]:
        """Start the groups that lock these workers and whose members have all made a request."""
        started = []
        for worker in workers:
            drawn = self._locks.get(worker)
            if drawn is None or not all(map(self._ledger.is_waiting, drawn.members)):
                continue
            passed = f", passed {drawn.num_passes} times" if drawn.num_passes else ""
            started.append(self._ledger.open(drawn.members, f"drawn for {drawn.owner}{passed}"))
            if len(drawn.members) == 1:
                self._unlock(drawn)  # lets no other group start before that worker's next request
                self._lock_free_groups()
        return started


register_state(RandomGroups, _Drawn)

"""Pairwise: an active worker averages with a random passive one, which does not stop for it.

Half of the workers are active: each of them, when it is ready, exchanges weights with one passive
worker and waits for the answer. A passive worker continues at once when it is ready, and answers
while it computes; if it becomes ready during an exchange, it continues when that ends. No worker
waits for another one's compute, and a worker is in one exchange at a time.

Source: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018
(arXiv:1710.06952), as described in Luo et al., "Prague", ASPLOS 2020, sections 2.3 (active and
passive sets) and 3.1 (conflicts). Left open there, or decided otherwise here:
- The graph is complete between the two sides. Workers are assigned to sides in the order of their
  joins, so that each node has both. If one side becomes larger by two or more, one of its workers
  changes sides at its next ready report, so that neither side becomes empty when workers leave.
- The partner is drawn among the passive workers in no exchange; if there is none, the active worker
  that waits longest gets the first free one. The source draws from all and then waits for it.
- If the passive side is empty, an active worker takes a local step.
"""

import random
from dataclasses import dataclass, field

from polyrhythm.sync.policy import GroupLedger, Policy
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds, Worker


@dataclass(slots=True)
class Pairwise(Policy):
    seed: int = 0
    _ledger: GroupLedger = field(default_factory=GroupLedger, init=False)
    _active: set[Worker] = field(default_factory=set, init=False)
    _passive: set[Worker] = field(default_factory=set, init=False)
    _queue: list[Worker] = field(default_factory=list, init=False)  # active ones, longest first
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self._ledger.join(worker)
        side = self._active if len(self._active) <= len(self._passive) else self._passive
        side.add(worker)
        return self._pair()

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        self._ledger.check(worker)
        self._balance_sides(worker)
        if worker in self._passive:
            if self._ledger.is_in_group(worker):
                return []
            return [Group((worker,), why="passive: continues, and answers meanwhile")]
        self._ledger.wait(worker)
        self._queue.append(worker)
        return self._pair()

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        if len(group.members) == 1:
            return []  # it was over when it was formed
        self._ledger.close(group)
        return self._pair()

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        self._ledger.leave(worker)
        self._active.discard(worker)
        self._passive.discard(worker)
        if worker in self._queue:
            self._queue.remove(worker)
        return self._pair()

    def _balance_sides(self, worker: Worker) -> None:
        own, other = self._passive, self._active
        if worker in self._active:
            own, other = other, own
        # A worker in an exchange stays passive: as an active one it would wait for itself.
        if len(own) >= len(other) + 2 and not self._ledger.is_in_group(worker):
            own.remove(worker)
            other.add(worker)

    def _pair(self) -> list[Group]:
        """Pair the active workers that wait longest with free passive ones."""
        groups = []
        while self._queue:
            free = [p for p in sorted(self._passive) if not self._ledger.is_in_group(p)]
            if free:
                partner = self._random.choice(free)
                active = self._queue.pop(0)
                groups.append(self._ledger.open([active, partner], f"{active} with {partner}"))
            elif not self._passive:
                groups.append(self._ledger.open([self._queue.pop(0)], "no passive worker"))
            else:
                break
        return groups


register_state(Pairwise)

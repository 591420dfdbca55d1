"""Pairwise: an active worker averages with a random passive one, which does not stop for it.

Half of the workers are active: each of them, when it is ready, exchanges weights with one passive
worker and waits for the answer. A passive worker goes on at once when it is ready, and answers
while it computes; if it gets ready in the midst of an exchange, the end of that sends it on. Nobody
waits for anybody's computation, and a worker is in one exchange at a time.

Source: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018
(arXiv:1710.06952), as described in Luo et al., "Prague", ASPLOS 2020, sections 2.3 (active and
passive sets) and 3.1 (conflicts). Left open there, or decided otherwise here:
- The graph is complete between the two sides. Workers take sides in the order they join, so that
  each node has both. If one side becomes larger by two or more, a worker of it changes over at its
  next ready report, so that both sides stay alive when workers leave.
- The partner is drawn among the passive workers in no exchange; if there is none, the active one
  that waits longest takes the first that is free. The source draws from all and then waits for it.
- With nobody on the other side, an active worker takes a local step.
"""

import random
from dataclasses import dataclass, field

from polyrhythm.sync.group_ledger import GroupLedger
from polyrhythm.sync.policy import Policy
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
        return self._serve()

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        self._ledger.check(worker)
        self._change_over(worker)
        if worker in self._passive:
            if self._ledger.is_in_group(worker):
                return []
            return [Group((worker,), why="passive: goes on, and answers meanwhile")]
        self._ledger.wait(worker)
        self._queue.append(worker)
        return self._serve()

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        if len(group.members) == 1:
            return []  # was over when it was handed out
        self._ledger.close(group)
        return self._serve()

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        self._ledger.leave(worker)
        self._active.discard(worker)
        self._passive.discard(worker)
        if worker in self._queue:
            self._queue.remove(worker)
        return self._serve()

    def _change_over(self, worker: Worker) -> None:
        mine, other = self._passive, self._active
        if worker in self._active:
            mine, other = other, mine
        # One that answers just now stays: as an active one it would wait for itself.
        if len(mine) >= len(other) + 2 and not self._ledger.is_in_group(worker):
            mine.remove(worker)
            other.add(worker)

    def _serve(self) -> list[Group]:
        """Give those that wait longest a partner each, as far as there are free ones."""
        begun = []
        while self._queue:
            free = [p for p in sorted(self._passive) if not self._ledger.is_in_group(p)]
            if free:
                partner = self._random.choice(free)
                active = self._queue.pop(0)
                begun.append(self._ledger.open([active, partner], f"{active} meets {partner}"))
            elif not self._passive:
                begun.append(self._ledger.open([self._queue.pop(0)], "nobody to meet"))
            else:
                break
        return begun

"""Smart groups: one division gives all idle workers conflict-free groups, slow ones left out.

A worker asks when it begins a step. If a group is planned for it, that is its group. If none is
when it has finished the step, it starts a division: all workers with nothing planned get groups at
once, none of which overlap, first among one head per node (and inside each node among the others),
then among all of a node. A division leaves out who has asked much less often than the others.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020, sections 5.1 (Group Buffer, Global Division), 5.2 (Inter-Intra), 5.3 (slow
workers). Left open there, or decided otherwise here:
- When (4.1, 5.1): a division waits for its initiator to finish the step. Drawn at the beginning of
  a step it would find nobody idle but those that left the last group together, the same groups
  would come again for ever, and all would wait for a slow initiator's whole step.
- Who (5.1): workers with nothing planned that have asked, so that nobody waits for one that has
  joined but not begun. If that is the initiator alone, it goes on alone.
- Sizes (5.1): n / `group_size` groups, rounded, their sizes differing by one at most. So the
  remainder joins other groups, for any number of nodes, and nobody is alone but a lone one.
- Heads (5.2): drawn at random among the node's workers in the division. A lone worker beside its
  head takes a local step, since with no first group it would wait for the head's second one.
- The second group (5.2): the workers of the node that are in this division; who has something
  planned, or was left out as slow, is not. None for a single one, nor if all are on one node: then
  a division is that of 5.1 alone.
- Slow (5.3): C_thres is not given. Here `slow_after` is 3, since a division gives each worker two
  groups at most, so that equal ones differ by two. It counts behind the most advanced idle worker,
  not behind the initiator: the paper's rule lets one slow worker's division draw in all the other
  slow ones. A slow initiator meets the others in the first group, where it is ready already, and
  has no second one, where they would wait for its whole next step.
- Counters (5.3) would keep a worker slow for ever after one long pause. Here all gaps are halved
  each time the leader has asked another 16 times, and who joins starts level with the leader. What
  no counter can tell is a slow worker from one that has waited for it: the two may stay together.
In a simulation of 16 workers, one six times slower, that is 5.3 times the throughput of an
all-reduce; with the paper's rules for the initiator and for the second group, 4.4 times.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.sync.group_buffers import GroupBuffers
from polyrhythm.sync.policy import Policy
from polyrhythm.types import Group, Seconds, Worker

HALVE_GAPS_EVERY = 16  # requests of the leader: a worker that is slow no more is soon forgiven


@dataclass(slots=True)
class SmartGroups(Policy):
    group_size: int = 3
    slow_after: int = 3  # C_thres: as many requests behind, and a division leaves a worker out
    seed: int = 0
    _buffers: GroupBuffers = field(default_factory=GroupBuffers, init=False)
    _nodes: dict[Worker, str] = field(default_factory=dict, init=False)
    _num_asked: dict[Worker, int] = field(default_factory=dict, init=False)  # c_w
    _failed: set[Worker] = field(default_factory=set, init=False)  # they ask again for that step
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise PolicyError(
                f"group_size={self.group_size}",
                expected="at least 2: one alone does not average",
                fix="use 3, or every=n to average less often",
            )
        if self.slow_after < 1:
            raise PolicyError(
                f"slow_after={self.slow_after}",
                expected="at least 1 request behind",
                fix="use 3; a large number leaves nobody out",
            )
        self._random = random.Random(self.seed)

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self._buffers.join(worker)
        self._nodes[worker] = node
        self._num_asked[worker] = max(self._num_asked.values(), default=0)
        return []

    def on_request(self, worker: Worker, now: Seconds) -> list[Group]:
        begun = self._buffers.request(worker)
        if worker in self._failed:
            self._failed.remove(worker)
        else:
            self._count(worker)
        return begun

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        if not self._is_idle(worker):
            return []
        return self._buffers.plan(self._division(worker))

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        self._buffers.finish(group)
        if not ok:
            self._failed.update(group.members)
        return []

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        begun = self._buffers.leave(worker)
        del self._nodes[worker], self._num_asked[worker]
        self._failed.discard(worker)
        return begun

    def _count(self, worker: Worker) -> None:
        leader_before = max(self._num_asked.values())
        self._num_asked[worker] += 1
        leader = self._num_asked[worker]
        if leader > leader_before and leader % HALVE_GAPS_EVERY == 0:
            for other, asked in self._num_asked.items():
                self._num_asked[other] = leader - (leader - asked) // 2

    def _is_idle(self, worker: Worker) -> bool:
        return self._buffers.ledger.is_waiting(worker) and self._buffers.depth(worker) == 0

    def _division(self, initiator: Worker) -> list[Group]:
        """Groups for all idle workers but the slow: the first ones, then the second ones."""
        idle = [worker for worker in sorted(self._nodes) if self._is_idle(worker)]
        slow_at = max(self._num_asked[worker] for worker in idle) - self.slow_after
        slow = {worker for worker in idle if self._num_asked[worker] <= slow_at}
        by_node: dict[str, list[Worker]] = {}
        for worker in idle:
            if worker == initiator or worker not in slow:
                by_node.setdefault(self._nodes[worker], []).append(worker)
        why = f"division by {initiator}"
        if left_out := slow - {initiator}:
            why += f" without {len(left_out)} slow"
        if len(by_node) == 1:
            return [group for local in by_node.values() for group in self._divided(local, why)]
        heads = [self._random.choice(local) for local in by_node.values()]
        first = self._divided(heads, f"{why}: heads")
        second = []
        for head, (node, local) in zip(heads, by_node.items(), strict=True):
            others = [worker for worker in local if worker != head]
            first += self._divided(others, f"{why}: inside {node}")
            together = tuple(worker for worker in local if worker not in slow)
            if len(together) > 1:
                second.append(Group(together, f"{why}: all of {node}"))
        return first + second

    def _divided(self, workers: Iterable[Worker], why: str) -> list[Group]:
        """Random groups of about `group_size` that cover `workers`."""
        shuffled = sorted(workers)
        self._random.shuffle(shuffled)
        # n / group_size rounded to nearest, halves down: two or more in each, if there are two.
        num_groups = (2 * len(shuffled) + self.group_size - 1) // (2 * self.group_size)
        num_groups = max(num_groups, 1 if shuffled else 0)
        return [Group(tuple(sorted(shuffled[i::num_groups])), why) for i in range(num_groups)]

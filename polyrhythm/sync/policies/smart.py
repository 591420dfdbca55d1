"""Smart groups: one division gives all idle workers conflict-free groups, without stragglers.

A worker makes a request when it starts a step. If a group is planned for it, it gets that group. If
none is when it has finished the step, it starts a division: all workers without a planned group get
groups at once, none of which overlap, first among one head per node (and inside each node among the
others), then among all of a node. A division leaves out workers with far fewer requests than the
others.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020, sections 5.1 (Group Buffer, Global Division), 5.2 (Inter-Intra), 5.3 (slow
workers). Left open there, or decided otherwise here:
- When (4.1, 5.1): a division waits for its initiator to finish the step. At the start of a step
  only the members of the last group would be idle, the same groups would repeat for ever, and all
  would wait for a slow initiator's whole step.
- Who (5.1): workers with a request and no planned group, so that none waits for a worker that has
  joined but not started. If that is the initiator alone, it continues alone.
- Sizes (5.1): n / `group_size` groups, rounded, whose sizes differ by at most one. So the remainder
  joins other groups, for any number of nodes, and a group of one exists only for a single worker.
- Heads (5.2): drawn at random among the node's workers in the division. The only other worker of a
  node takes a local step, since without a first group it would wait for the head's second one.
- The second group (5.2): the workers of the node that are in this division, without those with a
  planned group and the slow ones. None for a single worker, nor if all are on one node: then a
  division is that of 5.1 alone.
- Slow (5.3): C_thres is not given. Here `slow_after` is 3, since a division gives each worker at
  most two groups, so that equal workers differ by two. It counts behind the most advanced idle
  worker, not behind the initiator: with the paper's rule, the division of one slow worker includes
  all other slow ones. A slow initiator is in a first group, for which it is ready already, and in
  no second one, where the others would wait for its whole next step.
- Counters (5.3) would keep a worker slow for ever after one long pause. Here all gaps are halved
  after every 16 requests of the leader, and a worker that joins starts level with the leader. No
  counter can distinguish a slow worker from one that has waited for it: the two may stay in one
  group.
In a simulation of 16 workers, one six times slower, that is 5.3 times the throughput of an
all-reduce; with the paper's rules for the initiator and for the second group, 4.4 times.
"""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policy import GroupLedger, Policy
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds, Worker

HALVE_GAPS_EVERY = 16  # requests of the leader, so that a worker that recovers soon counts as fast


@dataclass(slots=True, eq=False)
class _Planned:
    members: tuple[Worker, ...]
    why: str


@dataclass(slots=True)
class GroupBuffers:
    """Groups planned ahead wait in one order that all their members share (section 5.1).

    A planned group starts when it is first in the buffer of each of its members and each of them
    has requested a group. Groups are planned one after another, and every buffer is a sub-sequence
    of that one order, so no two groups can wait for each other: the oldest group is first for all
    its members, and starts as soon as they have made their requests. A started group stays first
    until it is done. Departures from the paper: a group that has not started loses the members that
    leave; a single member that is left keeps its position in the order as a group of one.
    """

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


@dataclass(slots=True)
class SmartGroups(Policy):
    group_size: int = 3
    slow_after: int = 3  # C_thres: a division leaves out workers that many requests behind
    seed: int = 0
    _buffers: GroupBuffers = field(default_factory=GroupBuffers, init=False)
    _nodes: dict[Worker, str] = field(default_factory=dict, init=False)
    _num_requests: dict[Worker, int] = field(default_factory=dict, init=False)  # c_w
    _failed: set[Worker] = field(default_factory=set, init=False)  # they repeat their request
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise PolicyError(
                f"group_size={self.group_size}",
                expected="at least 2: a group of one does not average",
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
        self._num_requests[worker] = max(self._num_requests.values(), default=0)
        return []

    def on_request(self, worker: Worker, now: Seconds) -> list[Group]:
        started = self._buffers.request(worker)
        if worker in self._failed:
            self._failed.remove(worker)
        else:
            self._count(worker)
        return started

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
        started = self._buffers.leave(worker)
        del self._nodes[worker], self._num_requests[worker]
        self._failed.discard(worker)
        return started

    def _count(self, worker: Worker) -> None:
        leader_before = max(self._num_requests.values())
        self._num_requests[worker] += 1
        leader = self._num_requests[worker]
        if leader > leader_before and leader % HALVE_GAPS_EVERY == 0:
            for other, count in self._num_requests.items():
                self._num_requests[other] = leader - (leader - count) // 2

    def _is_idle(self, worker: Worker) -> bool:
        return self._buffers.ledger.is_waiting(worker) and self._buffers.depth(worker) == 0

    def _division(self, initiator: Worker) -> list[Group]:
        """First groups, then second groups, for all idle workers except the slow ones."""
        idle = [worker for worker in sorted(self._nodes) if self._is_idle(worker)]
        slow_at = max(self._num_requests[worker] for worker in idle) - self.slow_after
        slow = {worker for worker in idle if self._num_requests[worker] <= slow_at}
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
            members = tuple(worker for worker in local if worker not in slow)
            if len(members) > 1:
                second.append(Group(members, f"{why}: all of {node}"))
        return first + second

    def _divided(self, workers: Iterable[Worker], why: str) -> list[Group]:
        """Divide `workers` into random groups of about `group_size`."""
        shuffled = sorted(workers)
        self._random.shuffle(shuffled)
        # n / group_size rounded to nearest, halves down: at least two in each group, if possible.
        num_groups = (2 * len(shuffled) + self.group_size - 1) // (2 * self.group_size)
        num_groups = max(num_groups, 1 if shuffled else 0)
        return [Group(tuple(sorted(shuffled[i::num_groups])), why) for i in range(num_groups)]


register_state(SmartGroups, GroupBuffers, _Planned)

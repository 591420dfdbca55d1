"""Static groups: a fixed rule gives the groups of each step, without a scheduler.

Each worker computes its group from its index and the number of its step; all members compute the
same one, and the groups of a step never overlap. Four phases repeat: 0 groups the first workers of
all nodes and pairs neighbours inside each node; 1 and 3 group all of a node; 2 pairs the second
workers of opposite nodes and others inside each node. Phases 0 and 1 alone connect all workers. A
step here is one average: with several updates between two averages, the averages are numbered.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020, section 4.2; for 4 nodes of 4 workers the groups are those of its Figure 10.
Left open there, since it shows only that case:
- More than four workers on a node: phase 0 pairs (2, 3), (4, 5), ...; phase 2 pairs the first with
  the last, then (3, 4), (5, 6), ...; a worker without a partner takes a local step.
- Fewer: a worker without a partner takes a local step. On a node of two, the second one is paired
  with the opposite node in phase 2 and the first one is idle; the only worker of a node is paired
  with the opposite node.
- The opposite node: half the ring away. If the number of nodes is odd, one has none; a different
  one in each cycle of four steps.
- Workers that join or leave change the rule's input for all. A worker that has passed a step is not
  waited for there, and one that joins starts at the step of the most advanced; so the change may
  come at any time. Without a coordinator, all have to change at one agreed step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policy import Roster, RosterPolicy
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds, Worker

NUM_PHASES = 4


def group_of(index: int, step: int, node_sizes: Sequence[int]) -> tuple[int, ...]:
    """Members of the group of worker `index` at `step`; workers are numbered node by node."""
    first_of = _first_of_each(index, step, node_sizes)
    node = max(n for n, first in enumerate(first_of) if first <= index)
    first, size = first_of[node], node_sizes[node]
    local = index - first
    cycle, phase = divmod(step, NUM_PHASES)
    if phase in (1, 3):
        return tuple(range(first, first + size))
    if phase == 0:
        if local == 0:
            return tuple(first_of)
        partner = local ^ 1 if local >= 2 else local
    else:
        ambassador = min(1, size - 1)
        if local == ambassador:
            other = _opposite(node, cycle, len(node_sizes))
            return tuple(sorted({index, first_of[other] + min(1, node_sizes[other] - 1)}))
        if size > 2 and local in (0, size - 1):
            return first, first + size - 1
        shifted = local + 1 if local % 2 else local - 1
        partner = shifted if min(local, shifted) >= 3 and max(local, shifted) < size - 1 else local
    return tuple(sorted({index, first + partner})) if partner < size else (index,)


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """The rule's input for named workers: equal layouts give equal groups."""

    workers: tuple[Worker, ...]  # node by node
    node_sizes: tuple[int, ...]

    @classmethod
    def of(cls, nodes: Mapping[Worker, str]) -> Self:
        """Sort the workers of each node, and nodes by their lowest worker."""
        by_node: dict[str, list[Worker]] = {}
        for worker in sorted(nodes):
            by_node.setdefault(nodes[worker], []).append(worker)
        workers = tuple(worker for local in by_node.values() for worker in local)
        return cls(workers, tuple(len(local) for local in by_node.values()))

    def members(self, worker: Worker, step: int) -> tuple[Worker, ...]:
        members = group_of(self.workers.index(worker), step, self.node_sizes)
        return tuple(sorted(self.workers[index] for index in members))


def _first_of_each(index: int, step: int, node_sizes: Sequence[int]) -> list[int]:
    if not node_sizes or min(node_sizes) < 1:
        raise PolicyError(
            f"node_sizes={list(node_sizes)}",
            expected="at least one node, and at least one worker on each",
            fix="leave out nodes without workers",
        )
    if not 0 <= index < sum(node_sizes) or step < 0:
        raise PolicyError(
            f"worker {index} at step {step}",
            expected=f"a worker from 0 to {sum(node_sizes) - 1}, and a step from 0",
            fix="number the workers node by node, and the steps from 0",
        )
    return list(accumulate(node_sizes[:-1], initial=0))


def _opposite(node: int, cycle: int, num_nodes: int) -> int:
    """The node across the ring, or itself. Rotating an even ring changes no pair."""
    half = num_nodes // 2
    position = (node + cycle) % num_nodes
    if position == 2 * half:
        return node
    return (position + (half if position < half else -half) - cycle) % num_nodes


@dataclass(slots=True)
class StaticGroups(RosterPolicy):
    """The same groups as a policy, for the simulator, which has a central scheduler."""

    num_workers: int
    startup_timeout: Seconds = 60.0  # longest wait at the start for workers that have not joined
    _roster: Roster = field(init=False)
    _nodes: dict[Worker, str] = field(default_factory=dict, init=False)
    _layout: NodeLayout = field(default=NodeLayout((), ()), init=False)
    _step: dict[Worker, int] = field(default_factory=dict, init=False)  # the next average
    _passed: dict[Worker, int] = field(default_factory=dict, init=False)  # skipped when it left

    def __post_init__(self) -> None:
        self._roster = Roster(self.num_workers, self.startup_timeout)

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self._passed.pop(worker, None)  # of an earlier incarnation
        return self.on_return(worker, node, now)

    def on_return(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self._roster.join(worker, now)
        # A worker whose wait timed out continues with the next step: else it would miss many.
        next_step = self._passed.pop(worker, -1) + 1
        self._step[worker] = next_step or max(self._step.values(), default=0)
        self._nodes[worker] = node
        self._layout = NodeLayout.of(self._nodes)
        return self._release(now)

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        if not ok:  # the members retry the same step
            for member in group.members:
                self._step[member] -= 1
        return []

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        if worker in self._roster.ready:
            self._passed[worker] = self._step[worker]
        self._roster.leave(worker)
        del self._nodes[worker], self._step[worker]
        self._layout = NodeLayout.of(self._nodes)
        return self._release(now)

    def next_timer(self) -> Seconds:
        return self._roster.next_assembly_deadline()

    def _release(self, now: Seconds) -> list[Group]:
        """Release the groups whose members, without those past that step, are all ready."""
        ready = self._roster.ready
        if self._roster.is_assembling(now):
            return []
        released = []
        for worker in sorted(ready):
            if worker not in ready:
                continue  # released with an earlier worker
            step = self._step[worker]
            rule = self._layout.members(worker, step)
            members = tuple(member for member in rule if self._step[member] <= step)
            if all(self._step[member] == step and member in ready for member in members):
                for member in members:
                    self._step[member] += 1
                    del ready[member]
                released.append(Group(members, why=f"step {step}, phase {step % NUM_PHASES}"))
        return released


register_state(StaticGroups, NodeLayout)

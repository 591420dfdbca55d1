"""Average inside each node first, then across nodes: fewer bytes travel between nodes.

With two workers on each of two nodes, a worker sends half of its gradients to its neighbour, then
half of the sum to the other node: a quarter of all gradients crosses between nodes instead of half.
The all-gather runs in reverse order. All nodes have the same number of workers, so that the mean of
their means is the global mean.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from polyrhythm.run.comm.reduce_scatter import CollectivePhase, Collectives, Pending


def ranks_by_node(nodes: Sequence[str]) -> list[list[int]] | None:
    """Group ranks by node; `nodes[rank]` names the node. None if a hierarchy gains nothing."""
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    sizes = {len(ranks) for ranks in members.values()}
    if len(members) < 2 or len(sizes) > 1 or sizes == {1}:
        return None
    return list(members.values())


class HierarchicalCollectives:
    """`inside` connects the workers of this node, `across` one worker of each node."""

    waits_on_host = True

    def __init__(self, inside: Collectives, across: Collectives) -> None:
        self._inside, self._across = inside, across
        self.num_workers = inside.num_workers * across.num_workers
        self.rank = inside.rank * across.num_workers + across.rank  # of its shard, not in the job

    def expect(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        self._inside.expect(flat, number, phase)
        self._across.expect(self._node_shard(flat), number, phase)

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        first = self._inside.reduce_scatter(flat, number)
        return _Sequence(first, lambda: self._across.reduce_scatter(self._node_shard(flat), number))

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        first = self._across.all_gather(self._node_shard(flat), number)
        return _Sequence(first, lambda: self._inside.all_gather(flat, number))

    def _node_shard(self, flat: Tensor) -> Tensor:
        return flat.view(self._inside.num_workers, -1)[self._inside.rank]


class _Sequence:
    """Wait for one collective, then start the next and wait for it."""

    def __init__(self, first: Pending, then: Callable[[], Pending]) -> None:
        self._first, self._then = first, then

    def wait(self) -> None:
        self._first.wait()
        self._then().wait()

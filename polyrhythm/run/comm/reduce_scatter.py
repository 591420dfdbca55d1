"""Asynchronous reduce-scatter and all-gather of one buffer, the two phases of an all-reduce.

Over gloo they are point-to-point messages, all posted at once: in the reduce-scatter every worker
sends every other worker its shard and sums the shards that it receives; in the all-gather it
sends its own shard to all. Gloo's own reduce-scatter would move as many bytes as an all-reduce.
Over NCCL they are NCCL's own collectives.

Messages have tags by buffer and phase, so that waits may come in any order; they leave in the order
in which they are posted: post first what is needed first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.types import Seconds

HALF_PRECISION = (torch.float16, torch.bfloat16)
_NUM_TAGS = 2**20


class CollectivePhase(IntEnum):
    REDUCE_SCATTER = 0
    ALL_GATHER = 1
    FLAGS = 2


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Wait for its end; raises PeerError if a peer is lost. Call it once."""


class Collectives(Protocol):
    rank: int  # index of the shard that this worker owns
    num_workers: int
    waits_on_host: bool  # a wait blocks the thread; otherwise the current CUDA stream

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        """Post the receives of the next collective of this buffer and phase ahead of its call.

        A gloo sender waits for the receive: posting it early saves the latency of that request.
        """

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        """Average: after the wait, this worker's shard of `flat` is the mean over all workers."""

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        """Gather: after the wait, `flat` contains every worker's own shard."""


_Works = list[tuple[int, dist.Work]]


class GlooCollectives:
    """Collectives made of point-to-point messages of a gloo group."""

    waits_on_host = True

    def __init__(self, group: dist.ProcessGroup, *, timeout: Seconds) -> None:
        self.rank, self.num_workers = group.rank(), group.size()
        self._group, self._timeout = group, timedelta(seconds=timeout)
        self._others = [  # each worker starts at another peer: no peer gets all messages at once
            (self.rank + step) % self.num_workers for step in range(1, self.num_workers)
        ]
        self._buffers: dict[int, Tensor] = {}  # received addends by number; kept for reuse
        self._expected: dict[tuple[int, CollectivePhase], tuple[_Works, Tensor]] = {}

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        self._expected[number, phase] = self._post_receives(flat, number, phase)

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        shards = flat.view(self.num_workers, -1)
        works, received = self._pop_or_post(flat, number, CollectivePhase.REDUCE_SCATTER)
        works += self._send(
            [shards[other] for other in self._others], number, CollectivePhase.REDUCE_SCATTER
        )
        return _PendingReduceScatter(works, self._timeout, shards[self.rank], received)

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        own_shard = flat.view(self.num_workers, -1)[self.rank]
        works, _ = self._pop_or_post(flat, number, CollectivePhase.ALL_GATHER)
        works += self._send([own_shard] * len(self._others), number, CollectivePhase.ALL_GATHER)
        return _PendingMessages(works, self._timeout)

    def all_reduce_any(self, flags: Tensor, number: int) -> Pending:
        """Or: after the wait, `flags` (bytes of 0 and 1) are set where any worker has set them."""
        works, received = self._pop_or_post(flags, number, CollectivePhase.FLAGS)
        works += self._send([flags.clone()] * len(self._others), number, CollectivePhase.FLAGS)
        return _PendingAny(works, self._timeout, flags, received)

    def _pop_or_post(
        self, flat: Tensor, number: int, phase: CollectivePhase
    ) -> tuple[_Works, Tensor]:
        expected = self._expected.pop((number, phase), None)
        return expected or self._post_receives(flat, number, phase)

    def _post_receives(
        self, flat: Tensor, number: int, phase: CollectivePhase
    ) -> tuple[_Works, Tensor]:
        """Post one receive per peer, in the order of `_others`; return them and their buffer."""
        match phase:
            case CollectivePhase.ALL_GATHER:
                received = flat.view(self.num_workers, -1)
                into = [received[other] for other in self._others]
            case CollectivePhase.REDUCE_SCATTER:
                received = self._buffer(flat, number)
                into = list(received)
            case CollectivePhase.FLAGS:
                received = flat.new_empty(len(self._others), flat.numel())
                into = list(received)
        works, tag = [], _tag(number, phase)
        for other, tensor in zip(self._others, into, strict=True):
            with peer_errors(f"rank {other}", "averaging"):  # fails at once if the peer is lost
                works.append((other, self._group.recv([tensor], other, tag)))
        return works, received

    def _buffer(self, flat: Tensor, number: int) -> Tensor:
        shape = len(self._others), flat.numel() // self.num_workers
        buffer = self._buffers.get(number)
        if buffer is None or (buffer.shape, buffer.dtype) != (shape, flat.dtype):
            buffer = self._buffers[number] = flat.new_empty(shape)
        return buffer

    def _send(self, tensors: Sequence[Tensor], number: int, phase: CollectivePhase) -> _Works:
        works, tag = [], _tag(number, phase)
        for other, tensor in zip(self._others, tensors, strict=True):
            with peer_errors(f"rank {other}", "averaging"):
                works.append((other, self._group.send([tensor], other, tag)))
        return works


class HierarchicalCollectives:
    """Average inside each node first, then across nodes: fewer bytes travel between nodes.

    `inside` connects the workers of this node, `across` one worker of each node. With two workers
    on each of two nodes, a worker sends half of its gradients to its neighbour, then half of the
    sum to the other node: a quarter of all gradients crosses between nodes instead of half. The
    all-gather runs in reverse order. All nodes have the same number of workers, so that the mean of
    their means is the global mean.
    """

    waits_on_host = True

    def __init__(self, inside: Collectives, across: Collectives) -> None:
        self._inside, self._across = inside, across
        self.num_workers = inside.num_workers * across.num_workers
        self.rank = inside.rank * across.num_workers + across.rank  # of its shard, not in the job

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        self._inside.post_receives(flat, number, phase)
        self._across.post_receives(self._node_shard(flat), number, phase)

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        first, shard = self._inside.reduce_scatter(flat, number), self._node_shard(flat)
        return _PendingSequence(first, lambda: self._across.reduce_scatter(shard, number))

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        first = self._across.all_gather(self._node_shard(flat), number)
        return _PendingSequence(first, lambda: self._inside.all_gather(flat, number))

    def _node_shard(self, flat: Tensor) -> Tensor:
        return flat.view(self._inside.num_workers, -1)[self._inside.rank]


@dataclass(frozen=True)
class _PendingMessages:
    works: _Works
    timeout: timedelta

    def wait(self) -> None:
        for other, work in self.works:
            with peer_errors(f"rank {other}", "averaging"):
                work.wait(self.timeout)


@dataclass(frozen=True)
class _PendingReduceScatter(_PendingMessages):
    own_shard: Tensor
    received: Tensor

    def wait(self) -> None:
        """Average the shards; half-precision numbers in single precision, rounded once."""
        super().wait()
        num_workers = len(self.received) + 1
        if self.own_shard.dtype in HALF_PRECISION:
            total = self.own_shard.float() + self.received.float().sum(0)
            self.own_shard.copy_(total / num_workers)
        else:
            for row in self.received:
                self.own_shard.add_(row)
            self.own_shard.div_(num_workers)


@dataclass(frozen=True)
class _PendingAny(_PendingMessages):
    flags: Tensor
    received: Tensor

    def wait(self) -> None:
        super().wait()
        for row in self.received:
            self.flags.bitwise_or_(row)


@dataclass(frozen=True)
class _PendingSequence:
    """Wait for one collective, then start the next and wait for it."""

    first: Pending
    then: Callable[[], Pending]

    def wait(self) -> None:
        self.first.wait()
        self.then().wait()


def _tag(number: int, phase: CollectivePhase) -> int:
    return len(CollectivePhase) * (number % _NUM_TAGS) + phase

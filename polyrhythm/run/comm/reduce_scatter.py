"""The two halves of an all-reduce of one buffer, each on its way while the processor does else.

Over gloo, messages between each two workers, posted at once: every worker sends each other one its
part, which adds them up; later it sends its own part to all. Gloo's own reduce-scatter would move
as many bytes as a whole all-reduce. Over NCCL, its own collectives.

Messages have tags, by buffer and half, so that nothing depends on the order of waits; they leave in
the order in which they are posted, so that what is needed first comes first.
"""

from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.types import Seconds

_HALF_PRECISION = (torch.float16, torch.bfloat16)
_NUM_TAGS = 2**20


class CollectivePhase(IntEnum):
    REDUCE_SCATTER = 0
    ALL_GATHER = 1
    FLAGS = 2


class Pending(Protocol):
    """A half that is on its way."""

    def wait(self) -> None:
        """Until it is there; raises PeerError when a peer is lost. Called once."""


class Collectives(Protocol):
    rank: int  # of the part that is this worker's
    num_workers: int
    waits_on_host: bool  # a wait keeps a thread; otherwise the stream that is current

    def expect(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        """Receive from now on what `reduce_scatter` or `all_gather` of this buffer, soon to come, will need.

        Gloo sends nothing before its receiver asks for it: who asks early saves the way there.
        """

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        """In the end, this worker's part of `flat` has the mean over all workers."""

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        """In the end, `flat` has every worker's own part."""


_Works = list[tuple[int, dist.Work]]


class GlooCollectives:
    """Over messages of a gloo group."""

    waits_on_host = True

    def __init__(self, group: dist.ProcessGroup, *, timeout: Seconds) -> None:
        self.rank, self.num_workers = group.rank(), group.size()
        self._group, self._timeout = group, timedelta(seconds=timeout)
        self._others = [  # each begins with another one, so that not all send to the same
            (self.rank + step) % self.num_workers for step in range(1, self.num_workers)
        ]
        self._buffers: dict[int, Tensor] = {}  # for what is added up, by number; kept, as large
        self._expected: dict[tuple[int, CollectivePhase], tuple[_Works, Tensor]] = {}

    def expect(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        self._expected[number, phase] = self._post_receives(flat, number, phase)

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        shards = flat.view(self.num_workers, -1)
        works, theirs = self._pop_or_post(flat, number, CollectivePhase.REDUCE_SCATTER)
        works += self._send(
            [shards[other] for other in self._others], number, CollectivePhase.REDUCE_SCATTER
        )
        return _Scatter(works, self._timeout, shards[self.rank], theirs)

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        own_shard = flat.view(self.num_workers, -1)[self.rank]
        works, _ = self._pop_or_post(flat, number, CollectivePhase.ALL_GATHER)
        works += self._send([own_shard] * len(self._others), number, CollectivePhase.ALL_GATHER)
        return _Messages(works, self._timeout)

    def all_reduce_any(self, flags: Tensor, number: int) -> Pending:
        """In the end, `flags` (bytes of 0 and 1) has what any worker has set."""
        works, theirs = self._pop_or_post(flags, number, CollectivePhase.FLAGS)
        works += self._send([flags.clone()] * len(self._others), number, CollectivePhase.FLAGS)
        return _AnyOf(works, self._timeout, flags, theirs)

    def _pop_or_post(
        self, flat: Tensor, number: int, phase: CollectivePhase
    ) -> tuple[_Works, Tensor]:
        expected = self._expected.pop((number, phase), None)
        return expected or self._post_receives(flat, number, phase)

    def _post_receives(
        self, flat: Tensor, number: int, phase: CollectivePhase
    ) -> tuple[_Works, Tensor]:
        """What the others send, in the order of `_others`, and where it goes."""
        match phase:
            case CollectivePhase.ALL_GATHER:
                theirs = flat.view(self.num_workers, -1)
                into = [theirs[other] for other in self._others]
            case CollectivePhase.REDUCE_SCATTER:
                theirs = self._buffer(flat, number)
                into = list(theirs)
            case CollectivePhase.FLAGS:
                theirs = flat.new_empty(len(self._others), flat.numel())
                into = list(theirs)
        works, tag = [], _tag(number, phase)
        for other, tensor in zip(self._others, into, strict=True):
            with peer_errors(f"rank {other}", "averaging"):  # fails at once if it has gone
                works.append((other, self._group.recv([tensor], other, tag)))
        return works, theirs

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


class _Messages:
    def __init__(self, works: Sequence[tuple[int, dist.Work]], timeout: timedelta) -> None:
        self._works, self._timeout = works, timeout

    def wait(self) -> None:
        for other, work in self._works:
            with peer_errors(f"rank {other}", "averaging"):
                work.wait(self._timeout)


class _Scatter(_Messages):
    def __init__(
        self,
        works: Sequence[tuple[int, dist.Work]],
        timeout: timedelta,
        own_shard: Tensor,
        theirs: Tensor,
    ) -> None:
        super().__init__(works, timeout)
        self._own_shard, self._theirs = own_shard, theirs

    def wait(self) -> None:
        """Sums of half-precision numbers are made in single precision, and rounded once."""
        super().wait()
        num_workers = len(self._theirs) + 1
        if self._own_shard.dtype in _HALF_PRECISION:
            total = self._own_shard.float() + self._theirs.float().sum(0)
            self._own_shard.copy_(total / num_workers)
        else:
            for their in self._theirs:
                self._own_shard.add_(their)
            self._own_shard.div_(num_workers)


class _AnyOf(_Messages):
    def __init__(
        self,
        works: Sequence[tuple[int, dist.Work]],
        timeout: timedelta,
        flags: Tensor,
        theirs: Tensor,
    ) -> None:
        super().__init__(works, timeout)
        self._flags, self._theirs = flags, theirs

    def wait(self) -> None:
        super().wait()
        for their in self._theirs:
            self._flags.bitwise_or_(their)


def _tag(number: int, phase: CollectivePhase) -> int:
    return len(CollectivePhase) * (number % _NUM_TAGS) + phase

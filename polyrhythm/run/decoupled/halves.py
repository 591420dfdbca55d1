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

from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds

_HALF = (torch.float16, torch.bfloat16)
_NUM_TAGS = 2**20


class Half(IntEnum):
    SCATTER = 0
    GATHER = 1
    FLAGS = 2


class Pending(Protocol):
    """A half that is on its way."""

    def wait(self) -> None:
        """Until it is there; raises PeerError when a peer is lost. Called once."""


class Halves(Protocol):
    rank: int  # of the part that is this worker's
    num_workers: int
    waits_on_host: bool  # a wait keeps a thread; otherwise the stream that is current

    def expect(self, flat: Tensor, number: int, half: Half) -> None:
        """Receive from now on what `scatter` or `gather` of this buffer, soon to come, will need.

        Gloo sends nothing before its receiver asks for it: who asks early saves the way there.
        """

    def scatter(self, flat: Tensor, number: int) -> Pending:
        """In the end, this worker's part of `flat` has the mean over all workers."""

    def gather(self, flat: Tensor, number: int) -> Pending:
        """In the end, `flat` has every worker's own part."""


_Works = list[tuple[int, dist.Work]]


class PeerHalves:
    """Over messages of a gloo group."""

    waits_on_host = True

    def __init__(self, group: dist.ProcessGroup, *, timeout: Seconds) -> None:
        self.rank, self.num_workers = group.rank(), group.size()
        self._group, self._timeout = group, timedelta(seconds=timeout)
        self._others = [  # each begins with another one, so that not all send to the same
            (self.rank + step) % self.num_workers for step in range(1, self.num_workers)
        ]
        self._rooms: dict[int, Tensor] = {}  # for what is added up, by number; kept, as large
        self._expected: dict[tuple[int, Half], tuple[_Works, Tensor]] = {}

    def expect(self, flat: Tensor, number: int, half: Half) -> None:
        self._expected[number, half] = self._receive(flat, number, half)

    def scatter(self, flat: Tensor, number: int) -> Pending:
        parts = flat.view(self.num_workers, -1)
        works, theirs = self._received(flat, number, Half.SCATTER)
        works += self._send([parts[other] for other in self._others], number, Half.SCATTER)
        return _Scatter(works, self._timeout, parts[self.rank], theirs)

    def gather(self, flat: Tensor, number: int) -> Pending:
        own = flat.view(self.num_workers, -1)[self.rank]
        works, _ = self._received(flat, number, Half.GATHER)
        works += self._send([own] * len(self._others), number, Half.GATHER)
        return _Messages(works, self._timeout)

    def unite(self, flags: Tensor, number: int) -> Pending:
        """In the end, `flags` (bytes of 0 and 1) has what any worker has set."""
        works, theirs = self._received(flags, number, Half.FLAGS)
        works += self._send([flags.clone()] * len(self._others), number, Half.FLAGS)
        return _Union(works, self._timeout, flags, theirs)

    def _received(self, flat: Tensor, number: int, half: Half) -> tuple[_Works, Tensor]:
        expected = self._expected.pop((number, half), None)
        return expected or self._receive(flat, number, half)

    def _receive(self, flat: Tensor, number: int, half: Half) -> tuple[_Works, Tensor]:
        """What the others send, in the order of `_others`, and where it goes."""
        match half:
            case Half.GATHER:
                theirs = flat.view(self.num_workers, -1)
                into = [theirs[other] for other in self._others]
            case Half.SCATTER:
                theirs = self._room(flat, number)
                into = list(theirs)
            case Half.FLAGS:
                theirs = flat.new_empty(len(self._others), flat.numel())
                into = list(theirs)
        works, tag = [], _tag(number, half)
        for other, tensor in zip(self._others, into, strict=True):
            with waiting_for(f"rank {other}", "averaging"):  # fails at once if it has gone
                works.append((other, self._group.recv([tensor], other, tag)))
        return works, theirs

    def _room(self, flat: Tensor, number: int) -> Tensor:
        shape = len(self._others), flat.numel() // self.num_workers
        room = self._rooms.get(number)
        if room is None or (room.shape, room.dtype) != (shape, flat.dtype):
            room = self._rooms[number] = flat.new_empty(shape)
        return room

    def _send(self, tensors: Sequence[Tensor], number: int, half: Half) -> _Works:
        works, tag = [], _tag(number, half)
        for other, tensor in zip(self._others, tensors, strict=True):
            with waiting_for(f"rank {other}", "averaging"):
                works.append((other, self._group.send([tensor], other, tag)))
        return works


class _Messages:
    def __init__(self, works: Sequence[tuple[int, dist.Work]], timeout: timedelta) -> None:
        self._works, self._timeout = works, timeout

    def wait(self) -> None:
        for other, work in self._works:
            with waiting_for(f"rank {other}", "averaging"):
                work.wait(self._timeout)


class _Scatter(_Messages):
    def __init__(
        self,
        works: Sequence[tuple[int, dist.Work]],
        timeout: timedelta,
        own: Tensor,
        theirs: Tensor,
    ) -> None:
        super().__init__(works, timeout)
        self._own, self._theirs = own, theirs

    def wait(self) -> None:
        """Sums of half-precision numbers are made in single precision, and rounded once."""
        super().wait()
        num_workers = len(self._theirs) + 1
        if self._own.dtype in _HALF:
            total = self._own.float() + self._theirs.float().sum(0)
            self._own.copy_(total / num_workers)
        else:
            for their in self._theirs:
                self._own.add_(their)
            self._own.div_(num_workers)


class _Union(_Messages):
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


def _tag(number: int, half: Half) -> int:
    return len(Half) * (number % _NUM_TAGS) + half

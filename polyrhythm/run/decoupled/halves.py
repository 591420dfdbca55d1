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

    def scatter(self, flat: Tensor, number: int) -> Pending:
        """In the end, this worker's part of `flat` has the mean over all workers."""

    def gather(self, flat: Tensor, number: int) -> Pending:
        """In the end, `flat` has every worker's own part."""


class PeerHalves:
    """Over messages of a gloo group."""

    waits_on_host = True

    def __init__(self, group: dist.ProcessGroup, *, timeout: Seconds) -> None:
        self.rank, self.num_workers = group.rank(), group.size()
        self._group, self._timeout = group, timedelta(seconds=timeout)
        self._others = [  # each begins with another one, so that not all send to the same
            (self.rank + step) % self.num_workers for step in range(1, self.num_workers)
        ]

    def scatter(self, flat: Tensor, number: int) -> Pending:
        parts, tag = flat.view(self.num_workers, -1), _tag(number, Half.SCATTER)
        theirs = flat.new_empty(len(self._others), parts.shape[1])
        works = [
            (other, self._group.recv([into], other, tag))
            for other, into in zip(self._others, theirs, strict=True)
        ]
        works += [(other, self._group.send([parts[other]], other, tag)) for other in self._others]
        return _Scatter(works, self._timeout, parts[self.rank], theirs)

    def gather(self, flat: Tensor, number: int) -> Pending:
        parts, tag = flat.view(self.num_workers, -1), _tag(number, Half.GATHER)
        works = [(other, self._group.recv([parts[other]], other, tag)) for other in self._others]
        works += [
            (other, self._group.send([parts[self.rank]], other, tag)) for other in self._others
        ]
        return _Messages(works, self._timeout)

    def unite(self, flags: Tensor, number: int) -> Pending:
        """In the end, `flags` (bytes of 0 and 1) has what any worker has set."""
        tag = _tag(number, Half.FLAGS)
        theirs = flags.new_empty(len(self._others), flags.numel())
        works = [
            (other, self._group.recv([into], other, tag))
            for other, into in zip(self._others, theirs, strict=True)
        ]
        sent = flags.clone()
        works += [(other, self._group.send([sent], other, tag)) for other in self._others]
        return _Union(works, self._timeout, flags, theirs)


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

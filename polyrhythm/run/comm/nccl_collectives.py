"""Buckets on GPUs that reach each other: NCCL's own collectives, in place.

Nothing here keeps the processor waiting: a wait lets the caller's stream wait, so it is the stream
that needs the bucket that has to be current then. Collectives are begun by all workers in the same
order, and follow each other in one stream: a gather may be begun behind a scatter of the same
bucket without a wait in between. A lost peer is noticed by NCCL's watchdog, which ends the process.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.reduce_scatter import CollectivePhase, Pending

# Torch 2.11 has the old names alone; where there are new ones, the old ones warn.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_HALF_PRECISION = (torch.float16, torch.bfloat16)


class NcclCollectives:
    """Over a group that torch.distributed knows. Begun and waited for by one thread at a time."""

    waits_on_host = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.num_workers, self._group = group.rank(), group.size(), group

    def expect(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        """NCCL needs no notice."""

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        """Half-precision numbers are divided before they are added up, as in DDP.

        NCCL's mean multiplies by the reciprocal, rounded to their type: a third would be 0.2 % off.
        """
        flat = _real(flat)
        own_shard = flat.view(self.num_workers, -1)[self.rank]
        operation = dist.ReduceOp.AVG
        if flat.dtype in _HALF_PRECISION:
            flat.div_(self.num_workers)
            operation = dist.ReduceOp.SUM
        return _start(
            lambda: _reduce_scatter(own_shard, flat, op=operation, group=self._group, async_op=True)
        )

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        flat = _real(flat)
        own_shard = flat.view(self.num_workers, -1)[self.rank]
        return _start(lambda: _all_gather(flat, own_shard, group=self._group, async_op=True))

    def all_reduce_any(self, flag: Tensor) -> None:
        """Whether any worker has set it, for what follows in the current stream."""
        _start(lambda: dist.all_reduce(flag, dist.ReduceOp.MAX, self._group, async_op=True)).wait()


@dataclass(frozen=True, slots=True)
class _Collective:
    work: dist.Work

    def wait(self) -> None:
        with peer_errors("another worker", "averaging"):
            self.work.wait()  # with a timeout it would keep the processor


def _start(collective: Callable[[], dist.Work]) -> Pending:
    with peer_errors("another worker", "averaging"):  # the first one connects all
        return _Collective(collective())


def _real(flat: Tensor) -> Tensor:
    """The same memory, of which NCCL knows the type."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat

"""NCCL's own collectives for buckets on GPUs, in place.

A wait blocks the current CUDA stream, not the host: wait in the stream that needs the bucket. All
workers start collectives in the same order, in one stream: an all-gather may be started after a
reduce-scatter of the same bucket without a wait in between. NCCL's watchdog notices a lost peer and
ends the process.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.reduce_scatter import HALF_PRECISION, CollectivePhase, Pending

# Torch 2.11 has only the old names; newer releases warn about them.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NcclCollectives:
    """Collectives over a group of torch.distributed; used by one thread at a time."""

    waits_on_host = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.num_workers, self._group = group.rank(), group.size(), group

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        """Do nothing: NCCL posts no receives ahead."""

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        """Average; divide half-precision numbers before the sum, as DDP does.

        NCCL's mean multiplies by the reciprocal rounded to their type: a third would be 0.2 % off.
        """
        flat = _real(flat)
        own_shard = flat.view(self.num_workers, -1)[self.rank]
        operation = dist.ReduceOp.AVG
        if flat.dtype in HALF_PRECISION:
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
        """Set `flag`, for later work in the current stream, if any worker has set it."""
        _start(lambda: dist.all_reduce(flag, dist.ReduceOp.MAX, self._group, async_op=True)).wait()


@dataclass(frozen=True, slots=True)
class _Collective:
    work: dist.Work

    def wait(self) -> None:
        with peer_errors("another worker", "averaging"):
            self.work.wait()  # with a timeout it would block the host


def _start(collective: Callable[[], dist.Work]) -> Pending:
    with peer_errors("another worker", "averaging"):  # the first collective connects all workers
        return _Collective(collective())


def _real(flat: Tensor) -> Tensor:
    """View complex numbers as real ones: NCCL has no complex types."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat

"""Replicas over NCCL are lost, on CPUs: after an abort its kernels end with whatever they have.

Gloo moves the bytes. A wait does not fail: like a stream of a GPU it goes on with what has come,
and only `confirm` tells.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.reduce_scatter import GlooCollectives, NcclCollectives, Pending
from polyrhythm.run.decoupled import gradient_sync
from tests.gloo import faults
from tests.gloo.emulated_nccl import EmulatedNccl, emulate_nccl
from tests.gloo.faults import Fault, at_call, both
from tests.gloo.surviving_jobs import NUM_STEPS, check, train
from tests.gloo.trainer_jobs import fit
from tests.grids import long_except

_GARBAGE = 7.0


class AbortedNccl(EmulatedNccl):
    """Fills what has not come with garbage."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, host: GlooCollectives
    ) -> None:
        super().__init__(group, device, host)
        self._has_failed = False

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        return self._try(partial(super().reduce_scatter, flat, number), flat, keeps_own=False)

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        return self._try(partial(super().all_gather, flat, number), flat, keeps_own=True)

    def copy_to_buddy(self, flat: Tensor, number: int) -> Pending:
        return self._try(partial(super().copy_to_buddy, flat, number), flat, keeps_own=False)

    def all_reduce_sum(self, numbers: Tensor) -> None:
        def start() -> Pending:
            NcclCollectives.all_reduce_sum(self, numbers)
            return Pending(lambda: None)

        self._try(start, numbers.view(1, -1).expand(self.num_workers, -1), keeps_own=True)

    def confirm(self) -> None:
        if self._has_failed:
            raise PeerError("another worker", action="a test", waited=0.0, cause="lost")

    def _try(self, start: Callable[[], Pending], flat: Tensor, *, keeps_own: bool) -> Pending:
        def wait() -> None:
            try:
                started.append(start()) if not started else None
                started[0].wait()
            except (PeerError, RuntimeError):
                self._has_failed = True
                shards = flat.view(self.num_workers, -1) if flat.dim() == 1 else flat[:0]
                for shard in range(len(shards)):
                    if shard != self.rank or not keeps_own:
                        shards[shard].fill_(_GARBAGE)

        started = list[Pending]()
        try:
            started.append(start())
        except (PeerError, RuntimeError):
            self._has_failed = True
        return Pending(wait)


def over_nccl(ctx: DistContext) -> None:
    emulate_nccl(pytest.MonkeyPatch(), AbortedNccl)
    gradient_sync.site_of = lambda *_: "here"  # of replicas; stages are connected by gloo


POINTS: dict[str, Callable[[int], Fault]] = {
    "before its vote": faults.before_vote,
    "after its vote": faults.after_vote,
    "after the commit": faults.after_commit,
    "in a reduce-scatter": partial(at_call, AbortedNccl, "reduce_scatter", 5),
    "in a copy of a shard": partial(at_call, AbortedNccl, "copy_to_buddy", 5),
    "in an all-gather": partial(at_call, AbortedNccl, "all_gather", 5),
}


@pytest.mark.parametrize("point", long_except(list(POINTS), 2))
def test_a_loss_at_each_point_of_a_step(tmp_path: Path, point: str) -> None:
    found = train(tmp_path, (1, 3), both(over_nccl, POINTS[point](1)))
    assert found.keys() == {0, 2}
    check(found, fit(tmp_path / "alone", 1, 1, steps=NUM_STEPS)[1])

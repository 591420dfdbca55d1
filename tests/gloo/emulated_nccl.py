"""NCCL's branches of a DistributedOptimizer on CPUs: gloo moves the bytes.

Gloo's collectives match by the order in which they are started, as NCCL's do. A wait blocks the
host, which NCCL's does not: tests of overlap need a GPU.
"""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.run.comm.process_groups import new_gloo_group
from polyrhythm.run.comm.reduce_scatter import GlooCollectives, NcclCollectives, Pending
from polyrhythm.run.decoupled import gradient_sync


class EmulatedNccl(NcclCollectives):
    """Records which collectives have been started, in which order."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, host: GlooCollectives
    ) -> None:
        super().__init__(group, device, host)
        self.started: list[str] = []

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        """Divide before the sum: gloo has no mean.

        Wait at once: what is started next may read the sum, and gloo runs several at a time.
        """
        self.started.append(f"reduce-scatter {number}")
        flat.div_(self.num_workers)
        own_shard = flat.view(self.num_workers, -1)[self.rank]
        self._group._reduce_scatter_base(own_shard, flat, dist.ReduceScatterOptions()).wait()
        return Pending(lambda: None)

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        self.started.append(f"all-gather {number}")
        return super().all_gather(flat, number)

    def copy_to_buddy(self, flat: Tensor, number: int) -> Pending:
        self.started.append(f"copy {number}")
        return super().copy_to_buddy(flat, number)

    def confirm(self) -> None:
        """Do nothing: a wait for gloo ends when all has arrived."""


def emulate_nccl(monkeypatch: pytest.MonkeyPatch, kind: type[EmulatedNccl] = EmulatedNccl) -> None:
    """Let workers on CPUs have sites; the default one, "auto", is that of all."""

    def select_backend(
        device: torch.device, nccl: dist.ProcessGroup | None, host: GlooCollectives, *, start: Any
    ) -> Any:
        return host if nccl is None else kind(nccl, device, host)

    monkeypatch.setattr(gradient_sync, "site_of", lambda site, *_: site)
    monkeypatch.setattr(gradient_sync, "new_nccl_group", new_gloo_group)
    monkeypatch.setattr(gradient_sync, "connect_all", lambda *_, **__: None)
    monkeypatch.setattr(gradient_sync, "select_backend", select_backend)
    for name in ("Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())

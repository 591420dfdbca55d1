"""A DistributedOptimizer over NCCL on CPUs: its groups, and steps that only the GPU could skip."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.decoupled import gradient_sync
from tests.gloo.decoupled import TIMEOUT, stack, train_steps, wrap_optimizer
from tests.gloo.emulated_nccl import emulate_nccl
from tests.gloo.pipelines import run_stages


def test_the_users_nccl_group_is_neither_used_nor_aborted(tmp_path: Path) -> None:
    """Its timeout and its failures are the user's; ours must end with the optimizer."""

    def work(ctx: DistContext) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            emulate_nccl(monkeypatch)
            bounded: list[dist.ProcessGroup] = []
            monkeypatch.setattr(
                gradient_sync, "set_timeout", lambda group, _: bounded.append(group)
            )
            model = stack()
            optimizer = wrap_optimizer(model)
            train_steps(ctx, model, optimizer, range(2))
            collectives, world = optimizer._gradient_sync.collectives, dist.group.WORLD
            assert world is not None
            optimizer.synchronize()
            start = time.monotonic()
            if ctx.rank == 0:
                optimizer.abort()
            else:
                with pytest.raises((PeerError, RuntimeError)):
                    collectives.all_gather(torch.zeros(4), 0).wait()
            ended_after = time.monotonic() - start
            world.allreduce([torch.zeros(1)]).wait()
            optimizer.abort()
            return {
                "own": collectives._group is not world,
                "bounded": collectives._group in bounded,
                "ended_after": ended_after,
            }

    for found in run_stages(2, work, tmp_path):
        assert found["own"]
        assert found["bounded"]
        assert found["ended_after"] < TIMEOUT / 2

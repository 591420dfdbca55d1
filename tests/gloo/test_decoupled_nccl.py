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


def test_close_aborts_no_group_before_all_workers_have_their_weights(tmp_path: Path) -> None:
    """NCCL's abort drops what is not sent yet; a slower worker would keep old weights."""

    def work(ctx: DistContext) -> tuple[float, float]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            emulate_nccl(monkeypatch)
            model = stack()
            optimizer = wrap_optimizer(model)
            train_steps(ctx, model, optimizer, range(2))
            comm_thread, times = optimizer._collectives.comm_thread, [0.0, 0.0]
            end, finish = comm_thread.close, optimizer._collectives.finish_on_device

            def finish_late() -> None:
                time.sleep(1.0 * ctx.rank)
                finish()
                times[0] = time.monotonic()

            def record_end() -> None:
                times[1] = time.monotonic()
                end()

            monkeypatch.setattr(optimizer._collectives, "finish_on_device", finish_late)
            monkeypatch.setattr(comm_thread, "close", record_end)
            optimizer.close()
            return times[0], times[1]

    found = run_stages(2, work, tmp_path)
    assert max(finished for finished, _ in found) <= min(ended for _, ended in found)


def test_close_waits_for_no_lost_worker(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> float:
        with pytest.MonkeyPatch.context() as monkeypatch:
            emulate_nccl(monkeypatch)
            model = stack()
            optimizer = wrap_optimizer(model)
            train_steps(ctx, model, optimizer, range(2))
            optimizer.synchronize()
            start = time.monotonic()
            if ctx.rank == 0:
                optimizer.abort()
            else:
                optimizer.close()
            return time.monotonic() - start

    assert max(run_stages(2, work, tmp_path)) < TIMEOUT / 2

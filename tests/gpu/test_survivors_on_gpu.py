"""Workers of a Trainer's job on GPUs are lost: the others go on, over NCCL as over gloo.

All share the first GPU: each names another host to NCCL, which then uses sockets.
"""

import faulthandler
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.plan.plan import PipelinePlan, Plan, PlanRegion
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.reduce_scatter import NcclCollectives
from polyrhythm.run.coordinator.epoch_server import LossTimeouts
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.trainer.config import CheckpointConfig, DeviceConfig
from tests.gloo import faults
from tests.gloo.faults import Fault, after_step, at_call, both
from tests.gloo.pipelines import run_single_process
from tests.gloo.surviving_jobs import NUM_STEPS, Found, stopped_until_lost, train
from tests.gloo.surviving_jobs import check as check_survivors
from tests.gloo.trainer_jobs import LAYERS, fit

pytestmark = [
    pytest.mark.skipif(not torch.cuda.device_count(), reason="this machine has no CUDA device"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL"),
    pytest.mark.timeout(200),
]


_LIMIT = 120.0  # of a job: processes that start CUDA at once are slow


def on_own_host(ctx: DistContext) -> None:
    faulthandler.dump_traceback_later(0.75 * _LIMIT)  # where it waits, if it hangs
    os.environ |= {
        "NCCL_HOSTID": f"host{ctx.rank}",  # NCCL refuses two workers of a host on one GPU
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def train_on_gpu(
    folder: Path, shape: tuple[int, int], fault: Fault, backend: str, **more: Any
) -> dict[int, Found]:
    more = {"device": DeviceConfig("cuda", backend=backend), **more}
    return train(folder, shape, both(on_own_host, fault), limit=_LIMIT, **more)


def check(found: dict[int, Found], folder: Path) -> None:
    """Check the steps and the weights of the survivors; this process does not touch the GPU."""
    alone, on_cpu = folder / "alone", DeviceConfig("cpu")
    alone.mkdir()
    expected = run_single_process(
        lambda: fit(alone, 1, 1, steps=NUM_STEPS, device=on_cpu)[1], alone
    )
    check_survivors(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("num", "sync", "backend", "victim"),
    [
        (3, "decoupled", "nccl", 0),
        (4, "decoupled", "nccl", 2),
        (3, "all_reduce", "nccl", 1),
        (3, "decoupled", "gloo", 1),
        (4, "all_reduce", "gloo", 0),
    ],
)
def test_a_killed_replica(tmp_path: Path, num: int, sync: str, backend: str, victim: int) -> None:
    found = train_on_gpu(tmp_path, (1, num), after_step(4, victim), backend, sync=sync)
    assert found.keys() == {*range(num)} - {victim}
    check(found, tmp_path)


@pytest.mark.parametrize(
    ("sync", "backend"), [("decoupled", "nccl"), ("all_reduce", "nccl"), ("decoupled", "gloo")]
)
def test_a_killed_stage(tmp_path: Path, sync: str, backend: str) -> None:
    found = train_on_gpu(tmp_path, (2, 2), after_step(4, 3), backend, sync=sync)
    assert found.keys() == {0, 1}  # process 2 is a spare
    check(found, tmp_path)


POINTS: dict[str, Callable[[int], Fault]] = {
    "before its vote": faults.before_vote,
    "after its vote": faults.after_vote,
    "after the commit": faults.after_commit,
    "in a reduce-scatter": partial(at_call, NcclCollectives, "reduce_scatter", 5),
    "in a copy of a shard": partial(at_call, NcclCollectives, "copy_to_buddy", 5),
    "in an all-gather": partial(at_call, NcclCollectives, "all_gather", 5),
}


@pytest.mark.parametrize("point", list(POINTS))
def test_a_loss_at_each_point_of_a_step_over_nccl(tmp_path: Path, point: str) -> None:
    found = train_on_gpu(tmp_path, (1, 3), POINTS[point](1), "nccl", sync="decoupled")
    assert found.keys() == {0, 2}
    check(found, tmp_path)


def test_a_stopped_worker(tmp_path: Path) -> None:
    """Its connections stay open, and kernels of NCCL wait for it until they are aborted."""
    timeouts = LossTimeouts(min_heartbeat=2.0, max_heartbeat=8.0)
    with stopped_until_lost(tmp_path, step=4, rank=1) as fault:
        found = train_on_gpu(tmp_path, (1, 3), fault, "nccl", sync="decoupled", timeouts=timeouts)
    assert found.keys() == {0, 2}
    check(found, tmp_path)


def test_a_second_loss_while_the_survivors_connect(tmp_path: Path) -> None:
    fault = both(after_step(4, 1), faults.after_joining(3))
    found = train_on_gpu(tmp_path, (1, 4), fault, "nccl", sync="decoupled")
    assert found.keys() == {0, 2}
    check(found, tmp_path)


def test_a_second_loss_after_a_few_steps(tmp_path: Path) -> None:
    """The copies of shards are new ones then."""
    fault = both(after_step(3, 1), after_step(7, 2))
    found = train_on_gpu(tmp_path, (1, 4), fault, "nccl", sync="decoupled")
    assert found.keys() == {0, 3}
    check(found, tmp_path)


def test_a_loss_between_sites(tmp_path: Path) -> None:
    """NCCL inside of two regions, gloo between them; afterwards regions are of unequal size."""
    devices = [f"d{number}" for number in range(4)]
    plan = Plan(
        layers_per_stage=LAYERS[1],
        pipelines=tuple(PipelinePlan(devices=(device,)) for device in devices),
        regions=tuple(
            PlanRegion(name=name, devices=tuple(devices[start : start + 2]))
            for name, start in (("east", 0), ("west", 2))
        ),
    )

    def noting(ctx: DistContext) -> None:
        original = DistributedOptimizer.__init__

        def init(self: Any, *args: Any, **more: Any) -> None:
            original(self, *args, **more)
            if self._collectives.has_hierarchy:
                path = tmp_path / f"hierarchy{ctx.rank}"
                path.write_text(str(self._collectives.has_nccl))

        DistributedOptimizer.__init__ = init  # type: ignore[method-assign]

    fault = both(noting, after_step(4, 1))
    found = train_on_gpu(tmp_path, (1, 4), fault, "auto", sync="decoupled", plan=plan)
    assert found.keys() == {0, 2, 3}
    check(found, tmp_path)
    assert [path.read_text() for path in tmp_path.glob("hierarchy*")] == ["True"] * 4


@pytest.mark.parametrize("sync", ["age", "local"])
def test_groups_go_on_without_a_stage(tmp_path: Path, sync: str) -> None:
    """Stages are connected by NCCL, replicas by gloo."""
    fault = faults.after_own_steps(3, 3)
    found = train_on_gpu(tmp_path, (2, 3), fault, "nccl", sync=sync)
    assert found.keys() >= {0, 1, 4, 5}
    weights = dict[str, Tensor]()
    for rank in (0, 1, 4, 5):
        for name, value in found[rank].weights.items():
            torch.testing.assert_close(value, weights.setdefault(name, value), rtol=0, atol=0)


def test_a_loss_during_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = train_on_gpu(
        tmp_path,
        (1, 3),
        faults.during_checkpoint(0),
        "nccl",
        sync="decoupled",
        run_dir=run,
        checkpoint=CheckpointConfig(every=3),
    )
    assert found.keys() == {1, 2}
    check(found, tmp_path)
    assert (run / "checkpoints" / f"step-{NUM_STEPS:08}").is_dir()

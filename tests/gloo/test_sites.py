"""Which GPU a process uses, and which workers of a job communicate over NCCL."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyrhythm as pr
from polyrhythm.errors import LaunchError
from polyrhythm.plan.plan import PipelinePlan, Plan, PlanRegion
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.trainer.autoplan import DeviceMemory
from polyrhythm.run.trainer.rank_assignment import (
    Gpu,
    JobProcesses,
    choose_sites,
    describe_backends,
    device_of_process,
)
from polyrhythm.types import Worker

NEEDS = "(NCCL needs a GPU for each, and equally many in each region)"
GPUS = [Gpu(host, f"{host}{number}") for host in "ab" for number in range(2)]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    properties = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return monkeypatch


@pytest.mark.parametrize("name", [None, "cuda", torch.device("cuda")])
def test_the_plan_counts_the_gpu_that_each_process_uses(
    name: str | torch.device | None, four_gpus: pytest.MonkeyPatch
) -> None:
    contexts = [DistContext(rank=rank, world_size=4, local_rank=rank) for rank in range(4)]
    used = [str(device_of_process(name, ctx)) for ctx in contexts]
    assert used == [f"cuda:{rank}" for rank in range(4)]
    memory = [DeviceMemory.of(pr.DeviceConfig(name), ctx) for ctx in contexts]
    assert [each.device for each in memory] == used
    assert memory[0].share(memory) == int(0.9 * (80 << 30)), "no GPU is shared"


def test_a_named_gpu_is_used_by_all_processes(four_gpus: pytest.MonkeyPatch) -> None:
    ctx = DistContext(rank=3, world_size=4, local_rank=3)
    assert str(device_of_process("cuda:1", ctx)) == "cuda:1"
    assert str(device_of_process("cpu", ctx)) == "cpu"


def test_without_a_launcher_the_gpu_is_the_current_one(four_gpus: pytest.MonkeyPatch) -> None:
    """As after mp.spawn, torch.cuda.set_device(2) and init_process_group in the script."""
    four_gpus.setattr(torch.cuda, "current_device", lambda: 2)
    four_gpus.delenv("RANK", raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ctx = JobProcesses(timeout=10.0).ctx
    finally:
        dist.destroy_process_group()
    assert {str(device_of_process(name, ctx)) for name in (None, "cuda")} == {"cuda:2"}


def test_gpus_of_a_region_are_a_site() -> None:
    assert choose_sites("auto", GPUS, ["eu", "eu", "us", "us"]) == ["eu", "eu", "us", "us"]


def test_workers_without_a_gpu_of_their_own_use_gloo() -> None:
    gpus = [GPUS[0], GPUS[1], GPUS[1], None]
    assert choose_sites("auto", gpus, ["eu"] * 4) == ["eu", None, None, None]


def test_equal_gpus_of_two_hosts_are_not_shared() -> None:
    """A virtual machine may have the same identifiers as another one."""
    gpus = [Gpu("a", "0"), Gpu("b", "0")]
    assert choose_sites("nccl", gpus, ["", ""]) == ["", ""]


def test_a_given_backend_ignores_regions() -> None:
    assert choose_sites("nccl", GPUS, ["eu", "eu", "us", "us"]) == [""] * 4
    assert choose_sites("gloo", GPUS, ["eu"] * 4) == [None] * 4


@pytest.mark.parametrize(
    ("gpus", "problem"),
    [
        ([GPUS[0], None], "worker 1 has no GPU"),
        ([GPUS[0], GPUS[1], GPUS[0]], "worker 0 shares its GPU with 2"),
    ],
)
def test_nccl_is_refused_without_a_gpu_for_each_worker(
    gpus: list[Gpu | None], problem: str
) -> None:
    with pytest.raises(LaunchError, match=problem):
        choose_sites("nccl", gpus, [""] * len(gpus))


@pytest.mark.parametrize(
    ("num_stages", "sites", "text"),
    [
        (1, ["", ""], "NCCL between replicas"),
        (1, ["eu", "eu", "us", "us"], "NCCL between replicas of a region, gloo between regions"),
        (1, ["eu", "us"], "gloo between replicas"),
        (1, [None, None], "gloo between replicas"),
        (1, ["eu", "eu", "us"], f"gloo between replicas {NEEDS}"),
        (1, ["", "", None], f"gloo between replicas {NEEDS}"),
        (2, ["eu", "eu"], "NCCL between stages"),
        (2, ["eu", None], "gloo between stages"),
        (2, ["", "", "", ""], "NCCL between stages, NCCL between replicas"),
        (2, ["eu", "us", "eu", "us"], "gloo between stages, NCCL between replicas"),
        (2, ["eu", "eu", "us", "us"], "NCCL between stages, gloo between replicas"),
        (
            2,
            ["eu", "eu", "eu", "us"],
            "NCCL between stages in 1 of 2 places, gloo in the others, "
            "stage 0: NCCL between replicas, stage 1: gloo between replicas",
        ),
    ],
)
def test_backends_are_described(num_stages: int, sites: list[str | None], text: str) -> None:
    places = (divmod(rank, num_stages) for rank in range(len(sites)))
    of_workers = {Worker(s, p): site for (p, s), site in zip(places, sites, strict=True)}
    assert describe_backends(of_workers, is_decoupled=True) == text
    *_, averages = describe_backends(of_workers, is_decoupled=False).split(", ")
    assert averages == "gloo between replicas" or len(sites) == num_stages


def test_a_site_needs_a_gpu() -> None:
    with pytest.raises(LaunchError, match="site='here' of a worker on cpu"):
        pr.Pipeline(nn.Linear(2, 2), 1, site="here")


def test_region_of_a_worker() -> None:
    regions = (PlanRegion(name="eu", devices=("a",)), PlanRegion(name="us", devices=("b", "c")))
    pipelines = (PipelinePlan(devices=("a", "b")),)
    plan = Plan(layers_per_stage=(1, 1), pipelines=pipelines, regions=regions)
    assert [plan.region_of(Worker(stage, 0)) for stage in range(2)] == ["eu", "us"]
    without = Plan(layers_per_stage=(1, 1), pipelines=(PipelinePlan(),))
    assert without.region_of(Worker(1, 0)) == ""

"""Which workers of a job communicate over NCCL follows from their GPUs and the plan's regions."""

import pytest
from torch import nn

import polyrhythm as pr
from polyrhythm.errors import LaunchError
from polyrhythm.plan.plan import PipelinePlan, Plan, PlanRegion
from polyrhythm.run.trainer.rank_assignment import Gpu, choose_sites, describe_sites
from polyrhythm.types import Worker

GPUS = [Gpu(host, f"{host}{number}") for host in "ab" for number in range(2)]


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
    ("sites", "text"),
    [
        (["", ""], "NCCL between 2 workers"),
        (["eu", "eu", "us"], "NCCL between 2 workers in eu, gloo between regions"),
        (["eu", "eu", None], "NCCL between 2 workers in eu, gloo between the others"),
        (["eu", "us"], "gloo between all workers"),
        ([None, None], "gloo between all workers"),
    ],
)
def test_description(sites: list[str | None], text: str) -> None:
    assert describe_sites(sites) == text


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

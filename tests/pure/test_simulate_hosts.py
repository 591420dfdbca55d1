"""Hosts share their connection among stages and pushes; balanced and result fractions add up."""

from dataclasses import replace

import pytest

from polyrhythm.cost.step import Replica, StageRun, StageWork
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import Kill, Scenario, Slow
from polyrhythm.schedule.builders import build
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.simulator import SimulatedBalancer, simulate
from polyrhythm.sync.setup import Setup
from tests.pure.simulate_cases import equal_job


def cluster(num_devices: int, latency: float = 0.0) -> Cluster:
    """A cluster without known uplinks, with links of 1 GB/s."""
    return Cluster(
        name="plain",
        devices=tuple(Device(name=f"d{i}", region="here") for i in range(num_devices)),
        regions=("here",),
        latency=((latency,),),
        bandwidth=((1e9,),),
    )


def replicas(num_stages: int, policy: str, **more: object) -> SimulatedJob:
    """Two devices, each with all stages; 4 GB of gradients in total."""
    stage = StageWork(
        forward=0.1 / num_stages,
        backward=0.2 / num_stages,
        activation_bytes=0.0,
        gradient_bytes=4e9 / num_stages,
    )
    built = build("1f1b", num_stages=1, num_microbatches=1)
    return SimulatedJob(
        cluster=cluster(2),
        stages=(stage,) * num_stages,
        pipelines=tuple(
            Replica(runs=(StageRun(device, 0, num_stages),), schedule=built) for device in range(2)
        ),
        sync=Setup(policy=policy, num_stages=num_stages, num_pipelines=2),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("policy", ["all_reduce", "adaptive"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_stages_of_one_device_share_its_connection(policy: str, decoupled: bool) -> None:
    one = simulate(replicas(1, policy, decoupled=decoupled), num_steps=10)
    four = simulate(replicas(4, policy, decoupled=decoupled), num_steps=10)
    assert four.step_time == pytest.approx(one.step_time, rel=0.05)


def test_parameter_server_is_limited_by_its_connection() -> None:
    def step_time(num_workers: int) -> float:
        job = equal_job(
            num_pipelines=num_workers,
            forward=0.1,
            backward=0.2,
            gradient_bytes=1e9,
            policy="ssp",
            options={"staleness": 0},
        )
        return simulate(replace(job, cluster=cluster(num_workers)), num_steps=5).step_time

    # All workers but the server's own push and pull 1 GB in each step.
    assert step_time(8) == pytest.approx(0.3 + 2 * 7, rel=0.1)
    assert step_time(16) == pytest.approx(0.3 + 2 * 15, rel=0.1)


def test_balanced_assigns_the_whole_batch_once() -> None:
    job = equal_job(
        num_pipelines=3,
        forward=0.002,
        backward=0.004,
        num_microbatches=8,
        policy="balanced",
        scenario=Scenario(name="s", slow=(Slow(device="d2", factor=2.0),)),
    )
    balancer = SimulatedBalancer(job)
    for pipeline in range(3):
        balancer.add(pipeline)
    sums = []
    for _ in range(5):
        for pipeline, duration in enumerate((0.05, 0.05, 0.1)):
            balancer.step_ended(pipeline, duration)
        counts = [len(balancer.schedule(pipeline)[0]) // 2 for pipeline in range(2)]
        balancer.step_ended(0, 0.05)  # its next step, before pipeline 2 has its schedule
        sums.append(sum(counts) + len(balancer.schedule(2)[0]) // 2)
    assert sums == [24] * 5


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("gradients", [1e6, 1e9])
def test_shares_of_time_add_up(decoupled: bool, gradients: float) -> None:
    job = equal_job(
        num_pipelines=4,
        forward=0.1,
        backward=0.2,
        gradient_bytes=gradients,
        bandwidth=1e9,
        decoupled=decoupled,
    )
    found = simulate(job, num_steps=50)
    assert found.computing + found.bubble + found.waiting == pytest.approx(1.0, abs=0.03)


def test_absent_device_has_no_share_of_time() -> None:
    job = equal_job(num_pipelines=3, forward=0.1, backward=0.2)
    lost = Scenario(name="lost", kill=(Kill(device="d1", at=3.0),))
    found = simulate(replace(job, scenario=lost), num_steps=50)
    assert found.computing + found.bubble + found.waiting == pytest.approx(1.0, abs=0.05)
    assert found.present[1] == pytest.approx(3.0)
    assert found.present[0] == found.duration


def test_models_are_averaged_by_their_own_size() -> None:
    def sent(policy: str) -> float:
        job = equal_job(num_pipelines=2, forward=0.1, backward=0.2, gradient_bytes=4e6)
        work = replace(job.stages[0], parameter_bytes=1e6)
        setup = Setup(policy=policy, num_stages=1, num_pipelines=2)
        found = simulate(replace(job, stages=(work,), sync=setup), num_steps=10)
        return float(found.bytes_sent.sum()) / 10

    assert sent("all_reduce") == pytest.approx(8e6)
    assert sent("adaptive") == pytest.approx(2e6, rel=0.1)

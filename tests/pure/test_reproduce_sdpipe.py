"""SDPipe's set-up as it is modelled, and its main claim on a small run."""

from collections import Counter
from dataclasses import replace

import pytest

from polyrhythm.errors import PolicyError
from polyrhythm.simulate.convergence import ConvergenceCurve
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.simulator import simulate
from polyrhythm.types import Worker
from reproduction.sdpipe.matching import MatchingSetup, RandomMatching
from reproduction.sdpipe.testbed import (
    AD_PSGD,
    ALL_REDUCE,
    BERT,
    ETHERNET,
    HETPIPE,
    METHODS,
    RESNET,
    SDPIPE,
    SdpipeGrid,
    job_of,
    sleeps,
    stages_of,
)
from reproduction.sdpipe.throughput import group_quartiles, ring_share, server_share
from reproduction.sdpipe.time_to_loss import relative_times


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(RESNET, 25_557_032), (BERT, 110e6 + 30522 * 768)],  # two stages hold the word embedding
)
def test_stages_hold_the_published_parameters_and_all_operations(model, parameters):
    for num_stages in (1, 2, 4):
        stages = stages_of(model, num_stages)
        assert len(stages) == num_stages
        total = sum(stage.gradient_bytes for stage in stages)
        assert total / 4 == pytest.approx(parameters, rel=0.01)
        whole = stages_of(model, 1)[0]
        assert sum(stage.forward for stage in stages) == pytest.approx(whole.forward)


def test_a_pipeline_is_within_a_node_and_replicas_are_on_different_nodes():
    grid = SdpipeGrid(4, 16)
    job = job_of(ALL_REDUCE, RESNET, grid, sleeps(RESNET, grid, "B"))
    assert grid.num_pipelines // grid.pipelines_per_node == 8
    assert job.gateways is not None
    homes = [{job.gateways[run.device] for run in pipeline.runs} for pipeline in job.pipelines]
    assert all(len(home) == 1 for home in homes)
    assert Counter(home.pop() for home in homes) == dict.fromkeys(range(64, 72), 2)
    assert {job.cluster.devices[at].uplink for at in job.gateways} == {ETHERNET}
    assert job.in_flight == (4, 3, 2, 1)


def test_all_workers_sleep_for_the_printed_seconds():
    grid = SdpipeGrid(4, 4)
    stages = stages_of(BERT, 4)
    found = sleeps(BERT, grid, "B").slow
    assert len(found) == 16
    for place, slow in enumerate(found):
        stage = stages[place % 4]
        assert slow.sleep_factor is not None
        assert slow.sleep_factor * (stage.forward + stage.backward) == pytest.approx(0.6)
        assert slow.probability == 0.1
    assert sleeps(BERT, grid, "homogeneous").slow == ()


def test_a_matching_pairs_all_workers_and_is_the_same_in_all_stages():
    one, other = RandomMatching(8, seed=3), RandomMatching(8, seed=3)
    drawn = [[one.partner(p, step) for p in range(8)] for step in range(20)]
    for partners in drawn:
        assert all(partners[partners[p]] == p != partners[p] for p in range(8))
    assert [other.partner(2, step) for step in reversed(range(20))] == [
        partners[2] for partners in reversed(drawn)
    ]
    assert len({tuple(partners) for partners in drawn}) > 10


def test_a_matched_worker_waits_for_its_partner_of_that_step():
    policy = RandomMatching(4, seed=0)
    partner = policy.partner(0, 0)
    rest = [p for p in range(1, 4) if p != partner]
    assert policy.on_ready(Worker(0, 0), 0.0) == []
    assert policy.on_ready(Worker(0, rest[0]), 1.0) == []
    (group,) = policy.on_ready(Worker(0, partner), 2.0)
    assert set(group.members) == {Worker(0, 0), Worker(0, partner)}
    # A worker that is a step ahead does not join the step before.
    ahead = policy.on_ready(Worker(0, 0), 3.0) + policy.on_ready(Worker(0, partner), 3.0)
    assert all(Worker(0, rest[0]) not in group.members for group in ahead)
    (group,) = policy.on_ready(Worker(0, rest[1]), 4.0)
    assert Worker(0, rest[0]) in group.members


def test_a_pair_that_failed_is_matched_again_for_the_same_step():
    policy = RandomMatching(8, seed=0)
    both = (Worker(0, 0), Worker(0, policy.partner(0, 0)))
    (group,) = policy.on_ready(both[0], 0.0) + policy.on_ready(both[1], 0.0)
    assert policy.on_done(group, ok=False, now=1.0) == []
    assert policy.on_ready(both[1], 1.0) + policy.on_ready(both[0], 1.0) == [group]


def test_a_matching_of_an_odd_number_is_refused():
    with pytest.raises(PolicyError, match="3 workers in pairs"):
        MatchingSetup(policy="static", num_stages=1, num_pipelines=3)


def test_sdpipe_loses_least_to_sleeps():
    grid = SdpipeGrid(4, 4)
    steps = {
        method: simulate(
            job_of(method, RESNET, grid, sleeps(RESNET, grid, "B")), num_steps=40
        ).step_time
        for method in METHODS
    }
    assert min(steps, key=steps.__getitem__) == SDPIPE
    assert steps[ALL_REDUCE] > 1.2 * steps[SDPIPE]


def test_ad_psgd_averages_only_in_pairs():
    grid = SdpipeGrid(2, 8)
    found = simulate(job_of(AD_PSGD, RESNET, grid, sleeps(RESNET, grid, "A")), num_steps=10)
    assert set(found.group_sizes) == {2}


def test_a_server_is_slower_the_more_workers_push_to_it():
    few, many = SdpipeGrid(4, 4), SdpipeGrid(4, 16)

    def step(grid: SdpipeGrid) -> float:
        job = job_of(HETPIPE, RESNET, grid, sleeps(RESNET, grid, "homogeneous"))
        return simulate(job, num_steps=10).step_time

    assert step(many) > 2 * step(few)


def test_gpus_on_the_node_of_the_server_push_without_ethernet():
    grid = SdpipeGrid(4, 2)  # one node
    job = job_of(HETPIPE, RESNET, grid, sleeps(RESNET, grid, "homogeneous"))
    assert job.coordinator is not None
    assert job.gateways is not None
    assert job.cluster.devices[job.coordinator].name == "server"
    assert job.gateways[job.coordinator] == job.gateways[0]
    slow_port = [
        replace(device, uplink=1e3) if device.name.endswith("/port") else device
        for device in job.cluster.devices
    ]
    slow = replace(job, cluster=replace(job.cluster, devices=tuple(slow_port)))
    steps = [simulate(each, num_steps=6).step_time for each in (job, slow)]
    assert steps[0] == pytest.approx(steps[1]), "nothing leaves the node"


def test_on_4_x_4_a_server_receives_fewer_bytes_than_a_ring_sends():
    assert server_share(SdpipeGrid(4, 4)) == pytest.approx(1.1)
    assert ring_share(SdpipeGrid(4, 4)) == pytest.approx(1.5)


def test_with_p_of_one_every_group_has_all_workers():
    assert group_quartiles(1) == (8, 8, 8)


def test_the_target_is_the_loss_of_all_reduce_after_80_steps():
    found = simulate(
        job_of(ALL_REDUCE, RESNET, SdpipeGrid(4, 4), sleeps(RESNET, SdpipeGrid(4, 4), "A")),
        num_steps=2,
    )
    curve = _falling(found)
    slower = replace(curve, times=(0.0, 4.0, 8.0))
    times = relative_times([dict.fromkeys(METHODS, curve) | {HETPIPE: slower}])
    assert times == {SDPIPE: 1.0, ALL_REDUCE: 1.0, AD_PSGD: 1.0, HETPIPE: 4.0}


def _falling(simulated: SimulationResult) -> ConvergenceCurve:
    return ConvergenceCurve(
        times=(0.0, 1.0, 2.0),
        steps=(0.0, 80.0, 100.0),
        losses=(3.0, 2.0, 1.0),
        distances=(0.0, 0.0, 0.0),
        simulated=simulated,
    )

"""The reproduction of DT-FM: what goes in is as published, and its models keep their promises."""

import math
from itertools import pairwise

import numpy as np
import pytest

from polyrhythm.cost.dtfm import PUBLISHED
from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, simulate
from polyrhythm.cost.sync import ReplicaGroup
from polyrhythm.schedule.spec import ScheduleSpec
from reproduction.dtfm.blocking import blocking_1f1b, blocking_ends
from reproduction.dtfm.claims import step_rows
from reproduction.dtfm.curves import (
    BASELINE,
    OURS,
    RANDOM,
    baseline_weights,
    curves,
)
from reproduction.dtfm.megatron import (
    GRID,
    Degrees,
    Job,
    megatron_iterations,
    ring_times,
)
from reproduction.dtfm.networks import (
    SEEDS,
    Network,
    launched,
    networks,
    random_layout,
    random_order,
    random_ranks,
)
from reproduction.dtfm.runtime import dtfm_iterations
from reproduction.dtfm.steps import CaseSteps, case_steps
from reproduction.dtfm.workload import (
    FORWARD_FLOPS_PER_LAYER,
    GPU_FLOPS,
    NUM_BYTES,
    PARAMETERS_PER_LAYER,
    WORKLOADS,
    Workload,
    gradient_bytes,
    petaflops,
)

CASES = networks()
ON_DEMAND, SPOT, TWO_CENTRES, _, WORLDWIDE = CASES
GBIT = 1e9 / 8


def pipeline(*, forward: float, backward: float, busy: float, latency: float) -> PipelineTimes:
    links = (LinkTimes(busy=(busy,), latency=latency),) * 3
    return PipelineTimes(
        forward=(forward,) * 4, backward=(backward,) * 4, activations=links, gradients=links
    )


def test_the_model_has_the_published_size():
    assert PARAMETERS_PER_LAYER == 50_358_272
    assert FORWARD_FLOPS_PER_LAYER == 240_518_168_576
    parameters = sum(gradient_bytes(24, 8)) / NUM_BYTES
    assert round(parameters / 1e9, 1) == 1.3  # "1.3 billion parameters"
    assert GPU_FLOPS == 62.5e12
    assert len(WORKLOADS) == 9


def test_petaflops_are_those_of_the_gpus_less_what_is_repeated():
    workload = Workload(24, 1024)
    busy = 4 * FORWARD_FLOPS_PER_LAYER * 24 * 1024 / (64 * GPU_FLOPS)
    assert petaflops(workload, busy) == pytest.approx(0.75 * 64 * GPU_FLOPS / 1e15)


@pytest.mark.parametrize("network", CASES, ids=lambda network: network.name)
def test_a_network_has_64_gpus_each_in_one_machine(network: Network):
    assert sorted(gpu for gpus in network.machines for gpu in gpus) == list(range(64))
    assert network.bandwidth.shape == network.latency.shape == (64, 64)


def test_machines_are_those_of_the_text():
    assert sorted(map(len, ON_DEMAND.machines)) == [8] * 8
    assert sorted(map(len, SPOT.machines)) == [1] * 32 + [4] * 8
    assert {len(gpus) for network in CASES[2:] for gpus in network.machines} == {1}
    assert TWO_CENTRES.bandwidth[0, 1] == pytest.approx(10 * GBIT)
    assert TWO_CENTRES.bandwidth[0, 63] == pytest.approx(1.12 * GBIT)


def test_transfers_at_one_time_share_a_machines_network():
    alone = ON_DEMAND.rates([(0, 8)])
    assert alone[0, 8] == pytest.approx(25 * GBIT)
    together = ON_DEMAND.rates([(gpu, gpu + 8) for gpu in range(8)] + [(16, 17)])
    assert together[3, 11] == pytest.approx(25 * GBIT / 8)
    assert together[16, 17] == pytest.approx(100 * GBIT)  # inside of a machine
    assert ON_DEMAND.busy_links.bandwidth[0, 8] == pytest.approx(25 * GBIT / 8)
    assert ON_DEMAND.links([(0, 8)]).bandwidth[8, 0] == pytest.approx(25 * GBIT)


def test_random_layouts_are_the_published_scripts():
    # As generate_assignment.py draws them.
    assert random_ranks(2022, 64)[0] == 0
    np.random.seed(2022)
    others = np.arange(1, 64)
    np.random.shuffle(others)
    assert random_ranks(2022, 64)[1:] == others.tolist()
    layout = random_layout(2023, 64)
    ranks = random_ranks(2023, 64)
    assert sorted(gpu for stage in layout for gpu in stage) == list(range(64))
    assert all(
        ranks[layout[stage][replica]] == 8 * replica + stage
        for stage in range(8)
        for replica in range(8)
    )


def test_megatron_has_the_random_layouts_of_dtfm():
    """Appendix B.2: "the same random layouts"."""
    for seed in SEEDS:
        layout, order = random_layout(seed, 64), random_order(seed, 64)
        assert [layout[rank % 8][rank // 8] for rank in range(64)] == list(order)
        machines = [ON_DEMAND.machine_of[gpu] for gpu in order]
        assert sum(a != b for a, b in pairwise(machines)) > 40, "machines are torn apart"


def test_by_the_other_reading_megatron_keeps_the_gpus_of_a_machine_together():
    for seed in SEEDS:
        order = launched(seed, SPOT)
        assert sorted(order) == list(range(64))
        machines = [SPOT.machine_of[gpu] for gpu in order]
        assert sum(a != b for a, b in pairwise(machines)) == 39
    assert len({launched(seed, WORLDWIDE) for seed in SEEDS}) == 3


def test_the_grid_is_all_degrees_up_to_8_for_64_gpus():
    assert len(GRID) == len(set(GRID)) == 10
    assert all(math.prod(degrees) == 64 and max(degrees) <= 8 for degrees in GRID)


def test_a_stage_that_waits_for_its_messages_takes_them_and_its_work_together():
    times = pipeline(forward=1.0, backward=2.0, busy=0.5, latency=0.25)
    one = ScheduleSpec("gpipe").build(num_stages=4, num_microbatches=1)
    assert max(blocking_ends(one, times)) == pytest.approx(times.first)
    many = [ScheduleSpec("gpipe").build(num_stages=4, num_microbatches=n) for n in (20, 30)]
    few, more = (max(blocking_ends(schedule, times)) for schedule in many)
    assert (more - few) / 10 == pytest.approx(1.0 + 0.5 + 2.0 + 0.5)
    hidden = [simulate(schedule, times).length for schedule in many]
    assert (hidden[1] - hidden[0]) / 10 == pytest.approx(1.0 + 2.0)


def test_1f1b_that_waits_has_as_many_round_trips_to_pay_as_it_has_stages_in_flight():
    times = pipeline(forward=1.0, backward=2.0, busy=0.5, latency=4.0)
    four_more = blocking_1f1b(times, 60) - blocking_1f1b(times, 56)
    assert four_more == pytest.approx(times.first)


@pytest.mark.parametrize("latency", [0.0, 0.1, 3.0])
def test_many_micro_batches_are_reckoned_as_if_all_were_run(latency: float):
    times = pipeline(forward=1.0, backward=2.2, busy=0.7, latency=latency)
    whole = ScheduleSpec("1f1b").build(num_stages=4, num_microbatches=300)
    assert blocking_1f1b(times, 300) == pytest.approx(max(blocking_ends(whole, times)))


def test_a_ring_is_as_slow_as_its_slowest_link():
    members = (0, 8, 24)  # Oregon, Virginia, Tokyo
    takes = ring_times(
        [ReplicaGroup(members=members, size=3e6), ReplicaGroup(members=(1,), size=3e6)], WORLDWIDE
    )
    assert takes[0] == pytest.approx(4 * (0.143 + 1e6 / (0.523 * GBIT)), rel=0.1)
    assert takes[0] == pytest.approx(
        4
        * max(
            WORLDWIDE.latency[f] + 1e6 / WORLDWIDE.bandwidth[f] for f in [(0, 8), (8, 24), (24, 0)]
        )
    )
    assert takes[1] == 0.0


def test_a_batch_twice_as_large_fills_and_drains_dtfms_pipelines_twice_as_often():
    layout = random_layout(2022, 64)
    found = dtfm_iterations(layout, 24, (1024, 2048), WORLDWIDE)
    small, large = found[Workload(24, 1024)], found[Workload(24, 2048)]
    assert large.pipeline == pytest.approx(2 * small.pipeline)
    assert large.total - large.pipeline == pytest.approx(small.total - small.pipeline)
    hidden = dtfm_iterations(layout, 24, (1024,), WORLDWIDE, overlap=True)
    assert hidden[Workload(24, 1024)].pipeline < small.pipeline


def test_tensor_parallelism_pays_inside_of_machines_only():
    for devices, network, best in (
        (launched(2022, ON_DEMAND), ON_DEMAND, Degrees(2, 4, 8)),
        (random_order(2022, 64), ON_DEMAND, Degrees(1, 8, 8)),
        (random_order(2022, 64), WORLDWIDE, Degrees(1, 8, 8)),
    ):
        takes = {
            degrees: megatron_iterations(
                Job(devices=devices, degrees=degrees, network=network), 24, (1024,)
            )[Workload(24, 1024)]
            for degrees in (Degrees(1, 8, 8), Degrees(2, 4, 8), Degrees(8, 1, 8))
        }
        assert min(takes, key=takes.__getitem__) == best


def test_dtfm_is_faster_than_at_random_and_both_than_megatron():
    workload = Workload(24, 1024)
    case = case_steps(TWO_CENTRES, (workload,))
    assert case.scheduled[workload] < case.at_random[workload] < case.megatron[workload]
    assert case.overlapped[workload] < case.scheduled[workload]
    assert 0 < case.scheduled_pipeline[workload] < case.scheduled[workload]
    assert case.best_degrees == Degrees(1, 8, 8)


def test_published_kernighan_lin_weights_have_the_wrong_sign():
    assert PUBLISHED.activation_bytes < PUBLISHED.gradient_bytes
    weights = baseline_weights(WORLDWIDE.name)
    assert (weights[~np.eye(64, dtype=bool)] < 0).all()


def test_searches_come_in_the_papers_order_and_never_get_worse():
    found = curves(TWO_CENTRES.name, num_evaluations=110)
    assert {len(curve) for curve in found.values()} == {110}
    for curve in found.values():
        assert all(after <= before for before, after in pairwise(curve))
    assert found[OURS][-1] < found[BASELINE][-1] < found[RANDOM][-1]
    assert found[OURS][-1] == pytest.approx(16.0868, abs=1e-4)  # the best there is


def test_rows_compare_what_the_text_does():
    takes = {workload: float(workload.num_layers * workload.batch) for workload in WORKLOADS}

    def case(scheduled: float, megatron: float, degrees: Degrees) -> CaseSteps:
        # With a part that no workload changes, so that ratios differ from one to the next.
        return CaseSteps(
            planned_cost=1.0,
            launched=takes,
            launched_degrees=dict.fromkeys(WORKLOADS, near),
            scheduled={of: scheduled * (step + 1e5) for of, step in takes.items()},
            scheduled_pipeline=takes,
            at_random={of: 2.7 * scheduled * (step + 1e5) for of, step in takes.items()},
            megatron={of: megatron * step for of, step in takes.items()},
            degrees=dict.fromkeys(WORKLOADS, degrees),
            overlapped=takes,
            random_overlapped=takes,
        )

    near, far = Degrees(2, 4, 8), Degrees(1, 8, 8)
    rows = step_rows([case(1, 2, near), *[case(1, 3, far)] * 3, case(2, 9, far)])
    assert [row.printed for row in rows] == [4.8, 3.8, 1.2, 2.5, 1.7, 3.5, 2.3, 2.7, 4, 8, 8, 8, 8]
    smallest, largest = 24 * 1024, 40 * 4096
    assert rows[0].ours == pytest.approx(4.5 * largest / (largest + 1e5))
    assert rows[1].ours == pytest.approx(4.5 * smallest / (smallest + 1e5))
    assert rows[2].ours == pytest.approx(2 * smallest / (smallest + 1e5))
    assert rows[3].ours == pytest.approx(3 * largest / (largest + 1e5))
    assert rows[4].ours == pytest.approx((largest + 1e5) / largest)
    assert rows[4].keeps_order
    assert rows[5].ours == pytest.approx((smallest + 1e5) / smallest)
    assert rows[7].ours == pytest.approx(2.7)
    assert rows[7].passes
    assert all(row.passes for row in rows[8:])
    swapped = step_rows([case(1, 2, far), *[case(1, 3, far)] * 3, case(2, 9, near)])
    assert [row.passes for row in swapped[8:]] == [False, True, True, True, False]

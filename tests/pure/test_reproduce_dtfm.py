"""DT-FM's reproduction: its inputs are the published ones, and its models behave as described."""

import math
from itertools import pairwise

import numpy as np
import pytest

from polyrhythm.cost.dtfm import PUBLISHED
from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, simulate
from polyrhythm.cost.sync import ReplicaGroup
from polyrhythm.schedule.spec import ScheduleSpec
from reproduction.dtfm.curves import (
    BASELINE,
    OURS,
    RANDOM,
    baseline_weights,
    curves,
)
from reproduction.dtfm.paper import degree_rows, step_rows
from reproduction.dtfm.steps import CaseSteps, case_steps
from reproduction.dtfm.systems import (
    ALL_DEGREES,
    Degrees,
    MegatronJob,
    blocking_1f1b,
    blocking_ends,
    dtfm_iteration,
    megatron_iteration,
    ring_times,
)
from reproduction.dtfm.testbed import (
    ELEMENT_BYTES,
    FORWARD_FLOPS_PER_LAYER,
    GPU_FLOPS,
    PARAMETERS_PER_LAYER,
    SEEDS,
    WORKLOADS,
    DtfmNetwork,
    GptWorkload,
    gradient_bytes,
    launcher_order,
    networks,
    petaflops,
    random_layout,
    random_order,
    random_ranks,
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
    parameters = sum(gradient_bytes(24, 8)) / ELEMENT_BYTES
    assert round(parameters / 1e9, 1) == 1.3  # "1.3 billion parameters"
    assert GPU_FLOPS == 62.5e12
    assert len(WORKLOADS) == 9


def test_petaflops_do_not_count_recomputed_forwards():
    workload = GptWorkload(24, 1024)
    busy = 4 * FORWARD_FLOPS_PER_LAYER * 24 * 1024 / (64 * GPU_FLOPS)
    assert petaflops(workload, busy) == pytest.approx(0.75 * 64 * GPU_FLOPS / 1e15)


@pytest.mark.parametrize("network", CASES, ids=lambda network: network.name)
def test_a_network_has_64_gpus_each_in_one_machine(network: DtfmNetwork):
    assert sorted(gpu for gpus in network.machines for gpu in gpus) == list(range(64))
    assert network.bandwidth.shape == network.latency.shape == (64, 64)


def test_machines_are_those_of_the_text():
    assert sorted(map(len, ON_DEMAND.machines)) == [8] * 8
    assert sorted(map(len, SPOT.machines)) == [1] * 32 + [4] * 8
    assert {len(gpus) for network in CASES[2:] for gpus in network.machines} == {1}
    assert TWO_CENTRES.bandwidth[0, 1] == pytest.approx(10 * GBIT)
    assert TWO_CENTRES.bandwidth[0, 63] == pytest.approx(1.12 * GBIT)


def test_concurrent_transfers_share_the_network_of_a_machine():
    alone = ON_DEMAND.rates([(0, 8)])
    assert alone[0, 8] == pytest.approx(25 * GBIT)
    together = ON_DEMAND.rates([(gpu, gpu + 8) for gpu in range(8)] + [(16, 17)])
    assert together[3, 11] == pytest.approx(25 * GBIT / 8)
    assert together[16, 17] == pytest.approx(100 * GBIT)  # inside a machine
    assert ON_DEMAND.busy_links.bandwidth[0, 8] == pytest.approx(25 * GBIT / 8)
    assert ON_DEMAND.links([(0, 8)]).bandwidth[8, 0] == pytest.approx(25 * GBIT)


def test_random_layouts_are_those_of_the_published_script():
    # As generate_assignment.py draws them.
    assert random_ranks(2022)[0] == 0
    np.random.seed(2022)
    others = np.arange(1, 64)
    np.random.shuffle(others)
    assert random_ranks(2022)[1:] == others.tolist()
    layout = random_layout(2023)
    ranks = random_ranks(2023)
    assert sorted(gpu for stage in layout for gpu in stage) == list(range(64))
    assert all(
        ranks[layout[stage][replica]] == 8 * replica + stage
        for stage in range(8)
        for replica in range(8)
    )


def test_megatron_has_the_random_layouts_of_dtfm():
    """Appendix B.2: "the same random layouts"."""
    for seed in SEEDS:
        layout, order = random_layout(seed), random_order(seed)
        assert [layout[rank % 8][rank // 8] for rank in range(64)] == list(order)
        machines = [ON_DEMAND.machine_of[gpu] for gpu in order]
        assert sum(a != b for a, b in pairwise(machines)) > 40, (
            "consecutive ranks are on different machines"
        )


def test_a_launcher_gives_the_gpus_of_a_machine_consecutive_ranks():
    for seed in SEEDS:
        order = launcher_order(seed, SPOT)
        assert sorted(order) == list(range(64))
        machines = [SPOT.machine_of[gpu] for gpu in order]
        assert sum(a != b for a, b in pairwise(machines)) == 39
    assert len({launcher_order(seed, WORLDWIDE) for seed in SEEDS}) == 3


def test_all_degrees_up_to_8_are_tried_for_64_gpus():
    assert len(ALL_DEGREES) == len(set(ALL_DEGREES)) == 10
    assert all(math.prod(degrees) == 64 and max(degrees) <= 8 for degrees in ALL_DEGREES)


def test_a_blocking_stage_takes_the_sum_of_compute_and_messages():
    times = pipeline(forward=1.0, backward=2.0, busy=0.5, latency=0.25)
    one = ScheduleSpec("gpipe").build(num_stages=4, num_microbatches=1)
    assert max(blocking_ends(one, times)) == pytest.approx(times.first)
    many = [ScheduleSpec("gpipe").build(num_stages=4, num_microbatches=n) for n in (20, 30)]
    few, more = (max(blocking_ends(schedule, times)) for schedule in many)
    assert (more - few) / 10 == pytest.approx(1.0 + 0.5 + 2.0 + 0.5)
    hidden = [simulate(schedule, times).length for schedule in many]
    assert (hidden[1] - hidden[0]) / 10 == pytest.approx(1.0 + 2.0)


def test_blocking_1f1b_pays_one_round_trip_per_stage_in_flight():
    times = pipeline(forward=1.0, backward=2.0, busy=0.5, latency=4.0)
    four_more = blocking_1f1b(times, 60) - blocking_1f1b(times, 56)
    assert four_more == pytest.approx(times.first)


@pytest.mark.parametrize("latency", [0.0, 0.1, 3.0])
def test_extrapolated_micro_batches_take_as_long_as_simulated_ones(latency: float):
    times = pipeline(forward=1.0, backward=2.2, busy=0.7, latency=latency)
    whole = ScheduleSpec("1f1b").build(num_stages=4, num_microbatches=300)
    assert blocking_1f1b(times, 300) == pytest.approx(max(blocking_ends(whole, times)))


def test_a_ring_is_as_slow_as_its_slowest_link():
    members = (0, 8, 24)  # Oregon, Virginia, Tokyo
    seconds = ring_times(
        [ReplicaGroup(members=members, size=3e6), ReplicaGroup(members=(1,), size=3e6)], WORLDWIDE
    )
    assert seconds[0] == pytest.approx(4 * (0.143 + 1e6 / (0.523 * GBIT)), rel=0.1)
    assert seconds[0] == pytest.approx(
        4
        * max(
            WORLDWIDE.latency[f] + 1e6 / WORLDWIDE.bandwidth[f] for f in [(0, 8), (8, 24), (24, 0)]
        )
    )
    assert seconds[1] == 0.0


def test_a_batch_twice_as_large_fills_and_drains_dtfms_pipelines_twice_as_often():
    layout = random_layout(2022)
    workloads = GptWorkload(24, 1024), GptWorkload(24, 2048)
    small, large = (dtfm_iteration(layout, workload, WORLDWIDE) for workload in workloads)
    assert large.pipeline == pytest.approx(2 * small.pipeline)
    assert large.total - large.pipeline == pytest.approx(small.total - small.pipeline)
    hidden = dtfm_iteration(layout, workloads[0], WORLDWIDE, overlap=True)
    assert hidden.pipeline < small.pipeline


def test_tensor_parallelism_pays_only_inside_machines():
    for devices, network, best in (
        (launcher_order(2022, ON_DEMAND), ON_DEMAND, Degrees(2, 4, 8)),
        (random_order(2022), ON_DEMAND, Degrees(1, 8, 8)),
        (random_order(2022), WORLDWIDE, Degrees(1, 8, 8)),
    ):
        seconds = {
            degrees: megatron_iteration(
                MegatronJob(devices=devices, degrees=degrees, network=network),
                GptWorkload(24, 1024),
            )
            for degrees in (Degrees(1, 8, 8), Degrees(2, 4, 8), Degrees(8, 1, 8))
        }
        assert min(seconds, key=seconds.__getitem__) == best


def test_dtfm_is_faster_than_random_layouts_and_both_than_megatron():
    workload = GptWorkload(24, 1024)
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


def test_rows_compare_the_ratios_of_the_text():
    seconds = {workload: float(workload.num_layers * workload.batch) for workload in WORKLOADS}

    def case(scheduled: float, megatron: float, degrees: Degrees) -> CaseSteps:
        # A constant part makes the ratios differ between workloads.
        return CaseSteps(
            planned_cost=1.0,
            launched=seconds,
            best_launched=near,
            scheduled={of: scheduled * (step + 1e5) for of, step in seconds.items()},
            scheduled_pipeline=seconds,
            at_random={of: 2.7 * scheduled * (step + 1e5) for of, step in seconds.items()},
            megatron={of: megatron * step for of, step in seconds.items()},
            best_degrees=degrees,
            overlapped=seconds,
            random_overlapped=seconds,
        )

    near, far = Degrees(2, 4, 8), Degrees(1, 8, 8)
    cases = [case(1, 2, near), *[case(1, 3, far)] * 3, case(2, 9, far)]
    rows = [*step_rows(cases), *degree_rows(cases)]
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
    swapped = degree_rows([case(1, 2, far), *[case(1, 3, far)] * 3, case(2, 9, near)])
    assert [row.passes for row in swapped] == [False, True, True, True, False]

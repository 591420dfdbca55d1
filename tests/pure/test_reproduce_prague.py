"""Prague's set-up and claims, on small runs."""

from dataclasses import replace

import pytest

from polyrhythm.simulate.simulator import simulate
from reproduction.paper_row import ordered
from reproduction.prague.figures import (
    IMAGES,
    OVERALL,
    STEPS,
    image_rows,
    step_rows,
    vgg_rows,
)
from reproduction.prague.runs import (
    FIVE_TIMES,
    HOMOGENEOUS,
    TWICE,
    TrainingTime,
    one_sleeps,
    settled_step_time,
    step_time,
)
from reproduction.prague.testbed import (
    AD_PSGD,
    ALL_REDUCE,
    GRPC,
    INFINIBAND,
    METHODS,
    PCIE,
    RANDOM,
    RESNET_18,
    SERVER,
    SMART,
    STATIC,
    VGG_16,
    PragueWorkers,
    job,
)

NEAR = 0.01  # expected values leave out latencies


def simulated_ends(*ends):
    """A run whose steps end at the given times."""
    run = simulate(job(ALL_REDUCE, VGG_16, PragueWorkers(number=2)), num_steps=2)
    return replace(run, ends=ends, duration=max(end for one in ends for end in one))


def test_vgg_16_has_the_published_number_of_weights():
    convolutions, classifier = 14_714_688, 512 * 10 + 10
    assert VGG_16.parameters == convolutions + classifier


def test_an_image_of_cifar_10_takes_as_long_as_its_operations_at_the_rate_of_resnet_18():
    assert VGG_16.image / RESNET_18.image == pytest.approx(0.313 / 1.82, rel=NEAR)


def test_an_all_reduce_is_one_ring_however_many_workers_a_node_has():
    for workers in (PragueWorkers(number=8), PragueWorkers(number=8, per_node=1)):
        seconds = step_time(job(ALL_REDUCE, VGG_16, workers), num_steps=6) - VGG_16.compute
        assert seconds == pytest.approx(2 * 7 / 8 * VGG_16.size / INFINIBAND, rel=NEAR)


def test_workers_of_one_node_average_over_pcie():
    seconds = (
        step_time(job(ALL_REDUCE, VGG_16, PragueWorkers(number=4)), num_steps=6) - VGG_16.compute
    )
    assert seconds == pytest.approx(2 * 3 / 4 * VGG_16.size / PCIE, rel=3 * NEAR)


def test_as_many_servers_as_workers_are_limited_by_the_process_of_a_worker():
    seconds = step_time(job(SERVER, VGG_16), num_steps=6) - VGG_16.compute
    assert seconds == pytest.approx(2 * VGG_16.size / GRPC, rel=NEAR)


def test_step_times_are_in_the_printed_order_except_static_and_smart_which_are_near():
    steps = {method: step_time(job(method, VGG_16), num_steps=40) for method in METHODS}
    assert steps[SMART] == pytest.approx(steps[STATIC], rel=0.1)
    others = {method: step for method, step in steps.items() if method not in (STATIC, SMART)}
    assert ordered(others, highest_first=False) == (ALL_REDUCE, RANDOM, AD_PSGD, SERVER)
    assert max(steps[STATIC], steps[SMART]) < steps[ALL_REDUCE]


def test_all_workers_wait_for_the_sleeping_one_except_with_smart_groups():
    for method in (ALL_REDUCE, STATIC):
        step = step_time(job(method, VGG_16, scenario=one_sleeps(FIVE_TIMES)), num_steps=30)
        assert step > 5 * VGG_16.compute
    smart = step_time(job(SMART, VGG_16, scenario=one_sleeps(FIVE_TIMES)), num_steps=40)
    assert smart < 2 * VGG_16.compute


def test_only_the_second_half_of_a_run_counts():
    slow_then_fast = (10.0, 20.0, 22.0, 24.0, 26.0, 28.0, 30.0, 32.0, 34.0, 36.0, 38.0, 40.0)
    once = (10.0, 20.0, 40.0)
    assert settled_step_time(simulated_ends(slow_then_fast, slow_then_fast)) == pytest.approx(2.0)
    assert settled_step_time(simulated_ends(slow_then_fast, once)) == pytest.approx(
        2 / (1 / 2 + 1 / 20)
    )


def test_the_printed_tables_pass():
    rows = [row for name in IMAGES for row in image_rows(name, IMAGES[name])]
    rows += step_rows(STEPS)
    assert len(rows) == 18
    assert all(row.passes and row.ours == pytest.approx(row.printed) for row in rows)


def test_rows_over_the_server_compare_total_times_and_state_why_they_differ():
    found = {
        times: {
            method: TrainingTime(step=1 / speed, num_steps=100.0)
            for method, speed in column.items()
        }
        for times, column in (*OVERALL.items(), (FIVE_TIMES, OVERALL[TWICE]))
    }
    found[HOMOGENEOUS][SERVER] = TrainingTime(step=1.0, num_steps=100.0)
    whole = [row for row in vgg_rows(found) if "to the loss" in row.what and "7.4" in row.place]
    assert sum(row.passes for row in whole) == len(whole) - 1  # all but 4.4, which is of 5x
    found[HOMOGENEOUS][SERVER] = TrainingTime(step=1.0, num_steps=50.0)  # twice as fast
    halved = [row for row in vgg_rows(found) if f"over {SERVER}" in row.what]
    assert all(row.why for row in halved if not row.passes)
    assert not any(row.passes for row in halved if row.place.startswith("Fig. 20"))

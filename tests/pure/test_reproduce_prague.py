"""Prague's set-up and claims, in small."""

from dataclasses import replace

import pytest

from polyrhythm.simulate.simulator import simulate
from reproduction.claim import ordered
from reproduction.prague.models import RESNET_18, VGG_16
from reproduction.prague.pace import pace, settled
from reproduction.prague.stated import IMAGES, ITERATIONS, OVERALL
from reproduction.prague.table_claims import image_rows, iteration_rows
from reproduction.prague.testbed import (
    AD_PSGD,
    ALL_REDUCE,
    GRPC,
    INFINIBAND,
    METHODS,
    PCIE,
    RANDOM,
    SERVER,
    SMART,
    STATIC,
    Workers,
    job,
)
from reproduction.prague.training import (
    FIVE_TIMES,
    HOMOGENEOUS,
    TWICE,
    Trained,
    slowed,
)
from reproduction.prague.vgg_claims import vgg_rows

NEAR = 0.01  # latencies are left out of what is expected


def simulated_ends(*ends):
    """Any run, with other ends of steps."""
    run = simulate(job(ALL_REDUCE, VGG_16, Workers(number=2)), num_steps=2)
    return replace(run, ends=ends, duration=max(end for one in ends for end in one))


def test_vgg_16_has_the_published_number_of_weights():
    convolutions, classifier = 14_714_688, 512 * 10 + 10
    assert VGG_16.parameters == convolutions + classifier


def test_an_image_of_cifar_10_takes_the_part_of_resnet_18s_that_its_operations_are():
    assert VGG_16.image / RESNET_18.image == pytest.approx(0.313 / 1.82, rel=NEAR)


def test_an_all_reduce_is_one_ring_however_many_workers_a_node_has():
    for workers in (Workers(number=8), Workers(number=8, per_node=1)):
        took = pace(job(ALL_REDUCE, VGG_16, workers), num_steps=6) - VGG_16.compute
        assert took == pytest.approx(2 * 7 / 8 * VGG_16.size / INFINIBAND, rel=NEAR)


def test_workers_of_one_node_average_over_pcie():
    took = pace(job(ALL_REDUCE, VGG_16, Workers(number=4)), num_steps=6) - VGG_16.compute
    assert took == pytest.approx(2 * 3 / 4 * VGG_16.size / PCIE, rel=3 * NEAR)


def test_as_many_servers_as_workers_are_as_fast_as_one_workers_process():
    took = pace(job(SERVER, VGG_16), num_steps=6) - VGG_16.compute
    assert took == pytest.approx(2 * VGG_16.size / GRPC, rel=NEAR)


def test_steps_come_in_the_printed_order_but_for_static_and_smart_which_are_near():
    steps = {method: pace(job(method, VGG_16), num_steps=40) for method in METHODS}
    assert steps[SMART] == pytest.approx(steps[STATIC], rel=0.1)
    others = {method: step for method, step in steps.items() if method not in (STATIC, SMART)}
    assert ordered(others, highest_first=False) == (ALL_REDUCE, RANDOM, AD_PSGD, SERVER)
    assert max(steps[STATIC], steps[SMART]) < steps[ALL_REDUCE]


def test_all_wait_for_the_one_that_sleeps_but_those_of_smart_groups():
    for method in (ALL_REDUCE, STATIC):
        step = pace(job(method, VGG_16, scenario=slowed(FIVE_TIMES)), num_steps=30)
        assert step > 5 * VGG_16.compute
    smart = pace(job(SMART, VGG_16, scenario=slowed(FIVE_TIMES)), num_steps=40)
    assert smart < 2 * VGG_16.compute


def test_only_the_second_half_counts():
    slow_then_fast = (10.0, 20.0, 22.0, 24.0, 26.0, 28.0, 30.0, 32.0, 34.0, 36.0, 38.0, 40.0)
    once = (10.0, 20.0, 40.0)
    assert settled(simulated_ends(slow_then_fast, slow_then_fast)) == pytest.approx(2.0)
    assert settled(simulated_ends(slow_then_fast, once)) == pytest.approx(2 / (1 / 2 + 1 / 20))


def test_the_papers_own_tables_pass():
    rows = [row for name in IMAGES for row in image_rows(name, IMAGES[name])]
    rows += iteration_rows(ITERATIONS)
    assert len(rows) == 18
    assert all(row.passes and row.ours == pytest.approx(row.printed) for row in rows)
    assert not any(row.why for row in rows)


def test_rows_over_the_server_are_of_the_whole_time_and_say_why_they_differ():
    found = {
        times: {method: Trained(step=1 / speed, steps=100.0) for method, speed in column.items()}
        for times, column in (*OVERALL.items(), (FIVE_TIMES, OVERALL[TWICE]))
    }
    found[HOMOGENEOUS][SERVER] = Trained(step=1.0, steps=100.0)
    whole = [row for row in vgg_rows(found) if "to the loss" in row.what and "7.4" in row.place]
    assert sum(row.passes for row in whole) == len(whole) - 1  # all but 4.4, which is of 5x
    found[HOMOGENEOUS][SERVER] = Trained(step=1.0, steps=50.0)  # twice as fast
    halved = [row for row in vgg_rows(found) if f"over {SERVER}" in row.what]
    assert all(row.why for row in halved if not row.passes)
    assert not any(row.passes for row in halved if row.place.startswith("Fig. 20"))

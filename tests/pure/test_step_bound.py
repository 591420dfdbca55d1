"""The bound of a step is below every plan, and near the best one in simple cases."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from polyrhythm.plan.predict import predict
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.search import search_plan
from polyrhythm.plan.step_bound import least_price, least_step, step_bound
from tests.pure.plan_problems import all_plans, cluster, problem, small_problems

pytestmark = pytest.mark.long


@settings(max_examples=15, deadline=None)
@given(small_problems())
def test_no_plan_is_faster_than_the_bound_and_the_search_finds_a_good_one(over: Problem) -> None:
    bound = step_bound(over, sizes=(1,))
    best = min(predict(plan, over).time.total for plan in all_plans(over))
    assert bound <= best * (1 + 1e-9)
    found = search_plan(over).best.time.total
    assert bound <= found * (1 + 1e-9)
    assert found <= best * 1.15


def test_equal_devices_side_by_side_come_near_the_bound() -> None:
    planned = search_plan(problem(cluster([4]), (1.0,) * 8, batch=64))
    assert planned.best.plan.predicted is not None
    assert planned.best.plan.predicted.gap < 0.05


def test_one_device_reaches_the_bound() -> None:
    planned = search_plan(problem(cluster([1]), (0.5, 1.0), batch=3))
    assert planned.best.time.total == pytest.approx(4.5)
    assert planned.bound == pytest.approx(4.5)


def test_fewer_devices_and_far_islands_raise_the_bound() -> None:
    near, far = problem(cluster([8])), problem(cluster([4, 4], outer=(0.03, 1e6)))
    # One pipeline stays on an island of four, or sends everything over the slow link.
    assert least_step(far, 1, 1) > 1.5 * least_step(near, 1, 1)
    assert least_step(near, 1, 2, num_devices=4) > 1.5 * least_step(near, 1, 2, num_devices=8)


def test_gradients_raise_the_bound_of_several_pipelines() -> None:
    light = problem(cluster([2], inner=(1e-4, 1e8)), gradient_bytes=0.0)
    heavy = problem(cluster([2], inner=(1e-4, 1e8)), gradient_bytes=1.0)
    # 8 layers of 100 MB: both devices send half of them in each collective, at 100 MB/s.
    assert least_step(heavy, 1, 2) - least_step(light, 1, 2) == pytest.approx(8.0)


def test_the_least_price_is_that_of_the_compute_alone() -> None:
    over = problem(cluster([2], speeds=(1.0, 2.0), price_per_hour=3.6), (1.0,), batch=10)
    assert least_price(over, (1,)) == pytest.approx(10 * 0.001 / 2)
    assert least_price(problem(cluster([2])), (1,)) is None


@pytest.mark.parametrize("sync", ["ring", "sequential"])
def test_slow_uplink_raises_only_the_bound_of_all_reduce(sync: str) -> None:
    over = problem(cluster([2], inner=(1e-4, 1e9), uplink=1e6), (0.1,), batch=2, sync=sync)
    assert search_plan(over).bound <= search_plan(over).best.time.total


def test_layers_that_send_nothing_have_a_bound() -> None:
    over = problem(cluster([2, 2]), (0.0, 0.0, 0.1))
    table = tuple(replace(layer, activation_bytes=0) for layer in over.profile.layers)
    over = replace(over, profile=replace(over.profile, layers=table))
    assert 0 <= search_plan(over).bound <= search_plan(over).best.time.total

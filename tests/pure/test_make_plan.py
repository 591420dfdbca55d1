"""Plans fit, use helpful devices, leave out harmful ones, and are deterministic."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyrhythm
from polyrhythm.errors import PlanError
from polyrhythm.plan.options import PlanOptions
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.predict import Prediction, predict
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.search import pareto_front, search_plan
from tests.pure.plan_problems import GIGABYTE, cluster, layers, problem, small_problems

pytestmark = pytest.mark.long


def devices_of(plan: Plan) -> list[str]:
    return [part.device for pipeline in plan.pipelines for part in pipeline.parts]


@settings(max_examples=6, deadline=None)
@given(small_problems(max_devices=6, max_layers=6), st.integers(0, 3))
def test_a_plan_uses_or_leaves_out_every_device_and_does_the_whole_batch(
    over: Problem, seed: int
) -> None:
    plan = search_plan(over, seed=seed).best.plan
    assert sorted([*devices_of(plan), *plan.left_out]) == sorted(over.index)
    assert sum(plan.layers_per_stage) == over.num_layers
    assert plan.batch == over.job.batch_size
    assert plan.predicted is not None
    assert predict(plan, over).time.total == pytest.approx(plan.predicted.step)
    assert sum(part.takes for part in plan.predicted.parts) == pytest.approx(plan.predicted.step)


def test_the_same_measurements_give_the_same_plan() -> None:
    plans = [search_plan(problem(cluster([5, 3], speeds=(1.0, 0.5)))).best.plan for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("count", [5, 7])
def test_a_prime_number_of_devices_is_all_used(count: int) -> None:
    over = problem(cluster([count]), (0.1,) * 24, batch=64)
    best = search_plan(over).best
    assert len(devices_of(best.plan)) == count
    assert best.time.total < 1.25 * 64 * 2.4 / count


def test_a_slow_device_far_away_is_left_out() -> None:
    over = problem(cluster([4, 1], speeds=(1.0, 1.0, 1.0, 1.0, 0.05)), batch=16)
    plan = search_plan(over).best.plan
    assert plan.left_out == ("r1/0",)


def test_layers_follow_device_speed() -> None:
    over = problem(
        cluster([4], speeds=(1.0, 1.0, 1 / 3, 1 / 3)),
        (0.1,) * 32,
        batch=24,
        num_stages=4,
        num_pipelines=1,
    )
    planned = search_plan(over)
    uses = {use.device: len(use.layers) for use in planned.best.uses}
    assert uses["r0/0"] >= 11
    assert uses["r0/2"] <= 5
    even = replace(
        planned.best.plan,
        layers_per_stage=(8, 8, 8, 8),
        pipelines=tuple(replace(p, schedule="auto") for p in planned.best.plan.pipelines),
    )
    assert predict(even, over).time.total / planned.best.time.total > 1.75


def test_a_fast_and_a_slow_region_make_pipelines_of_unequal_work() -> None:
    speeds = (1.0, 1.0, 0.5, 0.5)
    far = cluster([2, 2], speeds=speeds, outer=(0.03, 2e6))
    over = problem(far, (0.2,) * 8, batch=60, gradient_bytes=1e-3)
    plan = search_plan(over).best.plan
    numbers = Counter[str]()
    for pipeline in plan.pipelines:
        numbers[pipeline.devices[0][:2]] += pipeline.num_microbatches or 0
    assert numbers == {"r0": 40, "r1": 20}


def test_unequal_pipelines_can_be_forbidden() -> None:
    speeds = (1.0, 1.0, 0.5, 0.5)
    over = problem(cluster([2, 2], speeds=speeds), batch=60, unequal=False)
    plan = search_plan(over).best.plan
    assert len({pipeline.num_microbatches for pipeline in plan.pipelines}) == 1
    assert len({len(pipeline.parts) for pipeline in plan.pipelines}) == 1


def test_more_memory_needs_fewer_stages() -> None:
    """8 layers of 100 MB of weights take 0.4 GB each with gradients and Adam."""

    def num_stages(memory: int) -> int:
        over = problem(cluster([8], memory=memory), num_pipelines=1)
        best = search_plan(over).best
        assert all(use.memory <= (use.limit or 0) for use in best.uses)
        return min(len(pipeline.parts) for pipeline in best.plan.pipelines)

    assert num_stages(GIGABYTE * 6 // 10) == 8
    assert num_stages(GIGABYTE * 40) <= 8


def test_model_that_fits_nowhere_is_refused_with_the_missing_memory() -> None:
    over = problem(cluster([4], memory=GIGABYTE // 4))
    with pytest.raises(PlanError, match=r"'layer1' alone needs 0.4\d GiB.*0.21 GiB") as caught:
        search_plan(over)
    assert "GiB more" in caught.value.fix
    few = problem(cluster([2], memory=GIGABYTE))
    message = r"stage 1 \(layers 4 to 7\) needs 1.58 GiB and 'r0/1' has 0.84 GiB to give"
    with pytest.raises(PlanError, match=message) as caught:
        search_plan(few)
    assert "0.75 GiB to 'r0/1'" in caught.value.fix


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_stages": 9}, "9 stages x 1 pipelines for 4 devices and 8 layers"),
        ({"num_stages": 2, "num_pipelines": 3}, "2 stages x 3 pipelines for 4 devices"),
        ({"microbatch_size": 3}, "micro-batches of 3"),
        ({"objective": "cost"}, "'r0/0' has no price"),
        ({"sync": "gossip"}, "gossip"),
        ({"batch": 0}, "batch_size=0"),
    ],
)
def test_infeasible_job_is_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises((PlanError, ValueError), match=message):
        search_plan(problem(cluster([4]), **asked))


def priced(over: Problem, prices: dict[str, float]) -> Problem:
    devices = [replace(d, price_per_hour=prices[d.region]) for d in over.cluster.devices]
    return replace(over, cluster=replace(over.cluster, devices=tuple(devices)))


def test_expensive_region_is_left_out_for_cost_and_used_for_time() -> None:
    over = problem(cluster([2, 2], outer=(0.001, 1e9)), (0.2,) * 8, batch=32)
    over = priced(over, {"r0": 1.0, "r1": 20.0})
    fast = search_plan(over).best
    cheap = search_plan(replace(over, job=replace(over.job, objective="cost"))).best
    assert {"r1/0", "r1/1"} <= set(cheap.plan.left_out)
    assert fast.plan.left_out == ()
    assert cheap.price is not None
    assert fast.price is not None
    assert cheap.price < fast.price
    assert cheap.time.total > fast.time.total


def test_front_has_no_dominated_plan() -> None:
    over = priced(problem(cluster([2, 2])), {"r0": 1.0, "r1": 2.0})
    planned = search_plan(over)
    times = [one.time.total for one in planned.front]
    prices = [one.price for one in planned.front]
    assert times == sorted(times)
    assert prices == sorted(prices, key=lambda price: -(price or 0.0))
    assert planned.front[0].time.total == planned.best.time.total
    assert search_plan(problem(cluster([2, 2]))).front == ()


def test_a_front_keeps_the_cheaper_of_two_equally_fast_ones() -> None:
    one = search_plan(priced(problem(cluster([2])), {"r0": 1.0})).best

    def at(price: float) -> Prediction:
        return replace(one, price=price)

    assert [each.price for each in pareto_front([at(3.0), at(2.0)])] == [2.0]


def test_sizes_of_micro_batches_are_chosen() -> None:
    """Twice the samples take hardly longer: larger micro-batches must win."""
    from polyrhythm.describe.model import AtSize, ModelProfile

    over = problem(cluster([2]), batch=32)
    table = tuple(
        replace(
            layer,
            sizes=(
                AtSize(
                    microbatch_size=4,
                    forward=layer.forward * 1.2,
                    backward=layer.backward * 1.2,
                    activation_bytes=layer.activation_bytes * 4,
                    stored_bytes=layer.stored_bytes * 4,
                ),
            ),
        )
        for layer in layers((1.0,) * 8)
    )
    profile = ModelProfile(name="model", microbatch_size=1, layers=table)
    assert search_plan(replace(over, profile=profile)).best.plan.microbatch_size == 4


def test_public_make_plan_gives_the_same_plan() -> None:
    over = problem(cluster([2, 2]), batch=8)
    plan = polyrhythm.make_plan(over.cluster, over.profile, batch_size=8)
    assert plan == search_plan(over).best.plan
    with pytest.raises(PlanError, match="9 stages"):
        polyrhythm.make_plan(
            over.cluster, over.profile, batch_size=8, options=PlanOptions(num_stages=9)
        )


def test_devices_of_unequal_memory_get_what_they_can_hold() -> None:
    """No partition fits in the cluster's order; a large device must be between the small ones."""
    sizes = [14, 5, 14, 9]
    over = problem(cluster([4], inner=(1e-4, 1e8)), (1.0,) * 5, batch=16)
    table = [
        replace(layer, parameter_bytes=size * GIGABYTE)
        for layer, size in zip(over.profile.layers, (1, 2, 1, 1, 2), strict=True)
    ]
    devices = [
        replace(device, memory=size * GIGABYTE)
        for device, size in zip(over.cluster.devices, sizes, strict=True)
    ]
    over = replace(
        over,
        cluster=replace(over.cluster, devices=tuple(devices)),
        profile=replace(over.profile, layers=tuple(table)),
    )
    best = search_plan(over).best
    assert all(use.memory <= (use.limit or 0) for use in best.uses)
    assert best.time.total <= 36


def test_stages_group_devices_of_equal_memory() -> None:
    over = problem(cluster([4]), (1.0,) * 8, batch=16, num_stages=2, num_pipelines=2)
    devices = [
        replace(device, memory=int(size * GIGABYTE))
        for device, size in zip(over.cluster.devices, (4.0, 4.0, 1.2, 1.2), strict=True)
    ]
    over = replace(over, cluster=replace(over.cluster, devices=tuple(devices)))
    plan = search_plan(over).best.plan
    assert {plan.pipelines[0].devices[0], plan.pipelines[1].devices[0]} in (
        {"r0/0", "r0/1"},
        {"r0/2", "r0/3"},
    )


def test_requested_number_of_pipelines_is_planned() -> None:
    over = problem(cluster([3], speeds=(1.0, 1.0, 100.0)), num_pipelines=3)
    assert search_plan(over).best.plan.num_pipelines == 3


def test_layers_with_large_gradients_are_on_different_stages() -> None:
    """Links are the bottleneck, and the first layer has most of the gradients."""
    over = problem(cluster([2, 2], outer=(0.001, 5e7)), (0.01,) * 8, batch=64)
    heavy = replace(over.profile.layers[0], parameter_bytes=2 * GIGABYTE)
    profile = replace(over.profile, layers=(heavy, *over.profile.layers[1:]))
    over = replace(over, profile=profile, job=replace(over.job, num_stages=2, num_pipelines=2))
    assert search_plan(over).best.plan.layers_per_stage[0] == 1

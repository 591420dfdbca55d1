"""Refining never makes a plan worse, keeps it complete, and puts the coordinator in the middle."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.plan.local_search import refine_plan
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import Prediction, predict
from polyrhythm.plan.problem import Problem
from tests.pure.plan_problems import cluster, problem

pytestmark = pytest.mark.long


def step(prediction: Prediction) -> float:
    return prediction.time.total


def plan_of(columns: list[list[str]], counts: tuple[int, ...], numbers: list[int]) -> Plan:
    return Plan(
        layers_per_stage=counts,
        pipelines=tuple(
            PipelinePlan(devices=tuple(column), num_microbatches=number)
            for column, number in zip(columns, numbers, strict=True)
        ),
        microbatch_size=1,
    )


def devices(plan: Plan) -> Counter[str]:
    return Counter(device for pipeline in plan.pipelines for device in pipeline.devices)


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(4)), st.integers(1, 7), st.integers(1, 15))
def test_refined_plan_is_no_worse_and_complete(order: list[int], cut: int, share: int) -> None:
    over = problem(cluster([2, 2], speeds=(1.0, 0.5), outer=(0.02, 5e7)), (0.2,) * 8, batch=16)
    names = [over.cluster.devices[place].name for place in order]
    rough = predict(plan_of([names[:2], names[2:]], (cut, 8 - cut), [share, 16 - share]), over)
    better = refine_plan(rough, over, step)
    assert better.time.total <= rough.time.total * (1 + 1e-9)
    assert devices(better.plan) == devices(rough.plan)
    assert sum(better.plan.layers_per_stage) == 8
    assert better.plan.batch == 16


def test_refining_moves_layers_and_microbatches() -> None:
    over = problem(cluster([2, 2], speeds=(1.0, 1.0, 0.5, 0.5)), (0.2,) * 8, batch=48)
    lopsided = plan_of([["r0/0", "r0/1"], ["r1/0", "r1/1"]], (6, 2), [24, 24])
    better = refine_plan(predict(lopsided, over), over, step).plan
    assert better.layers_per_stage in [(4, 4), (5, 3)]
    first, second = (pipeline.num_microbatches or 0 for pipeline in better.pipelines)
    assert abs(first - second) >= 12, "a fast pipeline has more of them"


def far_and_near() -> Problem:
    """Return a problem with three regions; region 0 is in the middle."""
    over = cluster([2, 2, 2], outer=(0.1, 1e9))
    rows = [list(row) for row in over.latency]
    for other in (1, 2):
        rows[0][other] = rows[other][0] = 0.04
    return problem(replace(over, latency=tuple(map(tuple, rows))), batch=24)


def test_rank_0_is_nearest_to_all_devices() -> None:
    over = far_and_near()
    columns = [["r1/0", "r1/1"], ["r2/0", "r2/1"], ["r0/0", "r0/1"]]
    rough = predict(plan_of(columns, (4, 4), [8, 8, 8]), over)
    better = refine_plan(rough, over, step)
    assert better.plan.pipelines[0].devices[0].startswith("r0")
    assert better.time.sync < rough.time.sync


def test_equal_pipelines_stay_equal_if_required() -> None:
    over = problem(cluster([2], speeds=(1.0, 0.5)), batch=8, unequal=False)
    rough = predict(plan_of([["r0/0"], ["r0/1"]], (8,), [4, 4]), over)
    numbers = [p.num_microbatches for p in refine_plan(rough, over, step).plan.pipelines]
    assert numbers == [4, 4]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_requested_schedule_is_kept(name: str) -> None:
    over = problem(cluster([2]), batch=8, schedule=name)
    rough = predict(plan_of([["r0/0", "r0/1"]], (6, 2), [8]), over)
    assert refine_plan(rough, over, step).plan.pipelines[0].schedule == name

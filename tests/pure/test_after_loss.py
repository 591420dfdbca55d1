"""After a loss: layers are divided anew only if that pays off, and if their state exists."""

from dataclasses import replace
from itertools import accumulate

import pytest

from polyrhythm.plan.after_loss import decide_after_loss
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.survivors import assign_survivors, first_assignment
from tests.pure.plan_problems import cluster, problem

OVER = problem(cluster([4]), batch=16, sync="all_reduce")
NAMES = [device.name for device in OVER.cluster.devices]


def plan_of(num_pipelines: int) -> Plan:
    each = len(NAMES) // num_pipelines
    return Plan(
        layers_per_stage=(8 // each,) * each,
        pipelines=tuple(
            PipelinePlan(
                devices=tuple(NAMES[p * each : (p + 1) * each]),
                num_microbatches=16 // num_pipelines,
                schedule="1f1b",
            )
            for p in range(num_pipelines)
        ),
        microbatch_size=1,
    )


def kept_without(plan: Plan, *lost: str) -> Plan:
    ranks = [i for i, name in enumerate(NAMES) if name not in lost]
    kept = assign_survivors(first_assignment(plan), ranks)
    assert kept is not None
    return kept.plan


@pytest.mark.long
def test_a_spare_is_used_if_enough_steps_are_left() -> None:
    kept, left = kept_without(plan_of(2), NAMES[3]), {*NAMES[:3]}
    found = decide_after_loss(kept, left, OVER, steps=1000)
    assert found.plan is not None
    assert {d for p in found.plan.pipelines for d in p.devices} == left
    assert found.plan.batch == 16
    assert found.pause > 0
    assert decide_after_loss(kept, left, OVER, steps=1000) == found
    slow = replace(OVER, cluster=cluster([4], inner=(1e-4, 1e6)))
    few = decide_after_loss(kept, left, slow, steps=1)
    assert few.plan is None
    assert "does not pay off in 1 steps" in few.why


@pytest.mark.long
def test_layers_are_kept_where_nothing_better_exists() -> None:
    kept = kept_without(plan_of(4), NAMES[3])
    found = decide_after_loss(kept, NAMES[:3], OVER, steps=1000)
    assert found.plan is None
    assert "keep the running plan" in found.why
    assert decide_after_loss(kept, NAMES[:3], OVER, steps=0).plan is None


def test_layers_whose_state_is_lost_are_not_divided() -> None:
    found = decide_after_loss(plan_of(1), NAMES[:3], OVER, steps=1000)
    assert found.plan is None
    assert found.why == "no device has the state of layers 6, 7"


def test_no_device_that_is_left_is_no_error() -> None:
    assert decide_after_loss(plan_of(1), (), OVER, steps=1000).plan is None


@pytest.mark.parametrize("layer_blocks", [(2, 3, 3), (1, 6, 1), (8,)])
def test_blocks_of_layers_stay_on_one_stage(layer_blocks: tuple[int, ...]) -> None:
    plan = plan_of(2)  # with stages of four layers, which split blocks already
    found = decide_after_loss(
        kept_without(plan, NAMES[3]), NAMES[:3], OVER, steps=1000, layer_blocks=layer_blocks
    )
    assert found.plan is not None
    assert sum(found.plan.layers_per_stage) == 8
    cuts = {*accumulate(found.plan.layers_per_stage)}
    assert cuts <= {*accumulate(layer_blocks)} | {*accumulate(plan.layers_per_stage)}


def test_each_device_has_one_stage_if_that_is_wanted() -> None:
    uneven = problem(cluster([4], speeds=[4.0, 1.0, 1.0, 1.0]), batch=16, sync="all_reduce")
    kept = kept_without(plan_of(2), NAMES[3])
    found = decide_after_loss(kept, NAMES[:3], uneven, steps=1000, one_stage_per_device=True)
    assert found.plan is not None
    devices = [device for pipeline in found.plan.pipelines for device in pipeline.devices]
    assert len(devices) == len({*devices})


def test_nothing_is_searched_for_little_time() -> None:
    kept = kept_without(plan_of(2), NAMES[3])
    found = decide_after_loss(kept, NAMES[:3], OVER, steps=2, min_left=1e6)
    assert found.plan is None
    assert "the steps that are left take about" in found.why
    assert decide_after_loss(kept, NAMES[:3], OVER, steps=1000, min_left=1.0).plan is not None

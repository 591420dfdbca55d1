"""In decoupled a replica holds the copy of a shard of another one, which needs memory."""

import math
from dataclasses import replace

import pytest

from polyrhythm.errors import PlanError
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import predict
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.search import search_plan
from polyrhythm.plan.survivors import assign_survivors, first_assignment
from polyrhythm.plan.unequal_pipelines import _Outliner, unequal_plans
from tests.pure.plan_problems import cluster, problem

WORKS = (1.0,) * 4
WEIGHTS = 4 * 10**8  # bytes of the whole model, in layers of 10^8
# Weights, gradients, two moments, and the activations of some micro-batches.
ONE_REPLICA = 4 * WEIGHTS + 4 * 2 * 10**7 * 2


def job(num_devices: int, memory: int, *, sync: str = "decoupled", **options: object) -> Problem:
    over = cluster([num_devices], memory=memory)
    return problem(over, WORKS, batch=8, sync=sync, memory_reserve=0.0, **options)


def replicas(over: Problem, num_pipelines: int) -> Plan:
    names = [device.name for device in over.cluster.devices]
    each = 8 // num_pipelines
    return Plan(
        layers_per_stage=(4,),
        pipelines=tuple(
            PipelinePlan(devices=(names[p],), num_microbatches=each) for p in range(num_pipelines)
        ),
        microbatch_size=1,
        sync=over.job.sync,
    )


@pytest.mark.parametrize(
    ("num_pipelines", "optimizer", "expected"),
    # After losses two replicas may be left: each has half of the state, and the other's half.
    [(1, 2.0, 0.0), (2, 2.0, 0.5), (3, 2.0, 0.5), (2, 1.0, 0.5), (3, 1.0, 0.5), (4, 0.0, 0.5)],
)
def test_copies_count_as_far_as_they_exceed_a_whole_optimizer_state(
    num_pipelines: int, optimizer: float, expected: float
) -> None:
    over = job(2, 10**12, optimizer_bytes=optimizer)
    assert over.copies_per_weight(num_pipelines) == pytest.approx(expected)
    for options in ({"buddy": False}, {"sync": "all_reduce"}, {"sync": "groups"}):
        other = replace(over, job=replace(over.job, **options))
        assert other.copies_per_weight(num_pipelines) == 0.0


def test_a_device_without_memory_for_a_copy_is_refused() -> None:
    over = job(2, ONE_REPLICA)
    with pytest.raises(PlanError, match="the copy of a shard of another replica") as caught:
        predict(replicas(over, 2), over)
    assert "buddy=False (saves 0.19 GiB; a loss then ends the job)" in caught.value.fix
    for options in ({"buddy": False}, {"sync": "all_reduce"}):
        other = replace(over, job=replace(over.job, **options))
        assert predict(replicas(other, 2), other).uses[0].memory <= ONE_REPLICA
    roomy = job(2, ONE_REPLICA + WEIGHTS // 2)
    with_copy, without = (
        predict(replicas(each, 2), each).uses[0].memory
        for each in (roomy, replace(roomy, job=replace(roomy.job, buddy=False)))
    )
    assert with_copy - without == WEIGHTS // 2
    third = job(3, ONE_REPLICA)
    assert predict(replace(replicas(third, 1), sync="decoupled"), third).plan.num_pipelines == 1


def test_the_planner_divides_layers_so_that_copies_fit() -> None:
    over = job(4, ONE_REPLICA, num_pipelines=2)
    found = search_plan(over).best
    assert found.plan.num_stages == 2
    assert all(use.limit is None or use.memory <= use.limit for use in found.uses)
    too_small = job(2, ONE_REPLICA, num_pipelines=2)
    with pytest.raises(PlanError, match=r"buddy=False \(a loss then ends the job\)"):
        search_plan(too_small)
    assert search_plan(replace(too_small, job=replace(too_small.job, buddy=False)))


def test_survivors_of_a_plan_fit_with_their_larger_copies() -> None:
    """With fewer replicas each has a larger shard, and a larger copy of another one."""
    three = job(3, ONE_REPLICA)
    with pytest.raises(PlanError, match="the copy of a shard of another replica"):
        predict(replicas(three, 3), three)
    roomy = job(3, ONE_REPLICA + WEIGHTS // 2)
    plan = replicas(roomy, 3)
    assert predict(plan, roomy).plan.num_pipelines == 3
    for lost in range(2):
        kept = assign_survivors(first_assignment(plan), range(lost + 1, 3))
        assert kept is not None
        assert predict(kept.plan, roomy).plan.num_pipelines == 2 - lost


def test_plans_of_unequal_pipelines_count_the_copies() -> None:
    """Two pipelines of one device each do not fit; of two devices each, they do."""
    over = job(4, ONE_REPLICA, num_pipelines=2)
    for plan in unequal_plans(over, (1,), below=math.inf):
        predict(plan, over)  # raises if it does not fit
    outline = _Outliner(over, 1).outline(((0,), (1,)))
    assert outline is None
    assert _Outliner(over, 1).outline(((0, 1), (2, 3))) is not None

"""Re-planning migrates only if it pays off, moves little, and is deterministic."""

from dataclasses import replace

import pytest

from polyrhythm.describe.cluster import Cluster
from polyrhythm.errors import PlanError
from polyrhythm.plan.migration import migration, minimize_moves
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import predict
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.replan import replan
from polyrhythm.plan.search import search_plan
from tests.pure.plan_problems import cluster, problem

pytestmark = pytest.mark.long


def without(over: Problem, *names: str) -> Problem:
    kept = tuple(device for device in over.cluster.devices if device.name not in names)
    return replace(over, cluster=replace(over.cluster, devices=kept))


def with_bandwidth(over: Cluster, a: int, b: int, bandwidth: float) -> Cluster:
    rows = [list(row) for row in over.bandwidth]
    rows[a][b] = rows[b][a] = bandwidth
    return replace(over, bandwidth=tuple(map(tuple, rows)))


def running_on(over: Problem) -> Plan:
    return search_plan(over).best.plan


def test_unchanged_cluster_keeps_the_plan() -> None:
    over = problem(cluster([4, 4], outer=(0.01, 1e8)), batch=64)
    running = running_on(over)
    found = replan(running, over, steps=1000)
    assert found.stays
    assert found.moved == ()
    assert found.planned.best.plan.pipelines == running.pipelines
    assert "keep the running plan" in found.why


def test_a_lost_device_is_replaced_by_an_idle_one() -> None:
    over = problem(cluster([5]), batch=64, num_stages=2, num_pipelines=2)
    running = running_on(over)
    (idle,) = running.left_out
    lost = running.pipelines[0].devices[0]
    found = replan(running, without(over, lost), steps=100)
    assert not found.stays
    assert found.moved == (idle,)
    assert found.from_checkpoint == ()
    assert found.migration > 0
    assert lost not in {d for p in found.planned.best.plan.pipelines for d in p.devices}


def test_without_idle_device_the_other_pipelines_continue() -> None:
    over = problem(cluster([4]), batch=64, num_stages=2, num_pipelines=2)
    running = running_on(over)
    lost = running.pipelines[1].devices[1]
    smaller = without(replace(over, job=replace(over.job, num_pipelines=None)), lost)
    found = replan(running, smaller, steps=100)
    plan = found.planned.best.plan
    assert lost not in {d for p in plan.pipelines for d in p.devices}
    assert plan.batch == 64, "the batch stays as it was"
    assert found.from_checkpoint == (), "the other pipeline has them all"


def test_layers_on_no_device_come_from_a_checkpoint() -> None:
    over = problem(cluster([3]), batch=64, num_stages=2, num_pipelines=1)
    running = running_on(over)
    lost = running.pipelines[0].devices[0]
    found = replan(running, without(over, lost), steps=100)
    assert found.from_checkpoint == tuple(running.layers(0))


def test_slower_link_justifies_a_migration_only_with_enough_steps_left() -> None:
    base = cluster([2, 2], outer=(0.001, 2e7))
    over = problem(base, (0.05,) * 8, batch=64, gradient_bytes=1e-3, num_stages=2, num_pipelines=2)
    # Pipelines cross the regions, as if the link between them had been fast.
    running = Plan(
        layers_per_stage=(4, 4),
        pipelines=(
            PipelinePlan(devices=("r0/0", "r1/0"), num_microbatches=32),
            PipelinePlan(devices=("r0/1", "r1/1"), num_microbatches=32),
        ),
        microbatch_size=1,
    )
    slow = replace(over, cluster=with_bandwidth(base, 0, 1, 2e6))
    assert replan(running, slow, steps=0).stays
    found = replan(running, slow, steps=10_000)
    stayed = replan(running, slow, steps=0)
    assert not found.stays
    assert found.planned.best.time.total < 0.8 * stayed.planned.best.time.total
    assert "pays for a pause" in found.why


def test_all_nodes_choose_the_same_plan() -> None:
    over = problem(cluster([3, 2], speeds=(1.0, 0.5)), batch=32)
    running = running_on(over)
    lost = without(over, running.pipelines[0].devices[0])
    first, second = (replan(running, lost, steps=50) for _ in range(2))
    assert first.planned.best.plan == second.planned.best.plan
    assert first.why == second.why


def test_a_plan_of_another_model_is_refused() -> None:
    over = problem(cluster([2]))
    running = running_on(problem(cluster([2]), (1.0,) * 3))
    with pytest.raises(PlanError, match="a running plan of 3 layers"):
        replan(running, over, steps=1)
    with pytest.raises(PlanError, match="-1 steps"):
        replan(running_on(over), over, steps=-1)


def one_pipeline(*devices: str, counts: tuple[int, ...]) -> Plan:
    return Plan(
        layers_per_stage=counts,
        pipelines=(PipelinePlan(devices=devices, num_microbatches=16),),
        microbatch_size=1,
    )


def test_device_receives_missing_layers_from_the_nearest_holder() -> None:
    """A layer is 100 MB of weights and 200 MB of Adam's state."""
    over = problem(cluster([2, 1], inner=(0.0, 1e9), outer=(0.0, 1e8)), (1.0,) * 4)
    before = one_pipeline("r0/0", "r1/0", counts=(2, 2))
    after = one_pipeline("r0/0", "r0/1", counts=(1, 3))
    found = migration(before, after, over)
    assert found.moved == ("r0/1",)
    assert found.size == 3 * 300_000_000
    assert found.takes == pytest.approx(0.3 + 2 * 3.0), "one from its own region, two from afar"
    assert found.lost == ()


def test_equal_devices_keep_their_layers() -> None:
    over = problem(cluster([4]), (1.0,) * 4)
    before = one_pipeline("r0/0", "r0/1", counts=(2, 2))
    after = one_pipeline("r0/1", "r0/3", counts=(2, 2))
    assert migration(before, after, over).moved == ("r0/1", "r0/3")
    kept = minimize_moves(before, after, over)
    assert kept.pipelines[0].devices == ("r0/0", "r0/1")
    assert migration(before, kept, over).moved == ()


def test_changed_batch_is_reassigned() -> None:
    over = problem(cluster([2]), batch=16, num_stages=1, num_pipelines=2)
    running = running_on(over)
    larger = replace(over, job=replace(over.job, batch_size=64))
    assert replan(running, larger, steps=10).planned.best.plan.batch == 64
    odd = replace(over, job=replace(over.job, batch_size=3, num_pipelines=None))
    assert replan(running, odd, steps=10).planned.best.plan.batch == 3


def test_replan_keeps_the_requested_degrees() -> None:
    over = problem(cluster([4]), batch=16, num_stages=1, num_pipelines=4)
    running = running_on(over)
    fewer = replace(over, job=replace(over.job, num_stages=None, num_pipelines=2))
    assert replan(running, fewer, steps=1).planned.best.plan.num_pipelines == 2
    plain = replace(over, job=replace(over.job, schedule="gpipe"))
    pipelines = replan(running, plain, steps=1).planned.best.plan.pipelines
    assert {pipeline.schedule for pipeline in pipelines} == {"gpipe"}
    decoupled = replace(over, job=replace(over.job, sync="decoupled"))
    assert not replan(running, decoupled, steps=1).stays, "to change that is a restart, too"


def test_the_prediction_is_that_of_the_plan_that_is_written() -> None:
    base = cluster([4])
    slow_uplink = [replace(d, uplink=1e6 if i < 2 else None) for i, d in enumerate(base.devices)]
    over = problem(replace(base, devices=tuple(slow_uplink)), batch=16)
    running = Plan(
        layers_per_stage=(8,),
        pipelines=(
            PipelinePlan(devices=("r0/0",), num_microbatches=8),
            PipelinePlan(devices=("r0/1",), num_microbatches=8),
        ),
        microbatch_size=1,
    )
    best = replan(running, over, steps=1000).planned.best
    assert predict(best.plan, over).time.total == pytest.approx(best.time.total)
    used = {device for pipeline in best.plan.pipelines for device in pipeline.devices}
    assert {use.device for use in best.uses} == used
    assert set(best.plan.left_out) == set(over.index) - used

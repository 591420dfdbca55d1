"""Converts a plan, with its cluster and model profile, to a job that can be simulated."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from polyrhythm.cost.step import StageWork
from polyrhythm.cost.sync import BUCKET, Sync
from polyrhythm.describe.scenario import Scenario
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.predict import predict
from polyrhythm.plan.problem import Problem
from polyrhythm.simulate.job import EMPTY_SCENARIO, PlannedInputs, SimulatedJob
from polyrhythm.sync.modes import SyncMode
from polyrhythm.sync.setup import Setup

# The sync modes of plans whose averages have another name in the cost model.
_SIMULATED_AS: dict[str, str] = {
    Sync.GROUPS: "adaptive",
    Sync.RING: "all_reduce",
    Sync.SEQUENTIAL: "all_reduce",
}


def planned_job(
    plan: Plan,
    problem: Problem,
    *,
    sync: str | None = None,
    schedule: str | None = None,
    overlap: bool = False,
    scenario: Scenario = EMPTY_SCENARIO,
    options: Mapping[str, object] | None = None,
    seed: int = 0,
) -> SimulatedJob:
    """Create the job of a plan; `sync` (a policy, or "decoupled") and `schedule` override the plan.

    `overlap` has no effect under a policy that cannot overlap.
    Raises PlanError if the plan is for another cluster or model, or does not fit.
    """
    if schedule is not None:
        pipelines = tuple(replace(pipeline, schedule=schedule) for pipeline in plan.pipelines)
        plan = replace(plan, pipelines=pipelines)
    predicted = predict(plan, problem)  # chooses open settings, and refuses invalid ones
    plan = predicted.plan
    assert plan.microbatch_size is not None, "predict refuses a plan without micro-batch size"
    name = plan.sync if sync is None else sync
    mode = SyncMode.named(_SIMULATED_AS.get(name, name))
    stages = problem.stages(plan.layers_per_stage, plan.microbatch_size, plan.recompute)
    setup = Setup(
        policy="all_reduce" if mode.decoupled else mode.name,
        num_stages=plan.num_stages,
        num_pipelines=plan.num_pipelines,
        options=options or {},
        seed=seed,
    )
    return SimulatedJob(
        cluster=problem.cluster,
        stages=stages,
        pipelines=predicted.replicas,
        sync=setup,
        decoupled=mode.decoupled,
        num_buckets=num_buckets(plan, stages),
        overlap=overlap and setup.mode.can_overlap,
        scenario=scenario,
        samples=tuple(
            plan.microbatch_size * (pipeline.num_microbatches or 0) for pipeline in plan.pipelines
        ),
        planned=PlannedInputs(plan=plan, problem=problem),
    )


def num_buckets(plan: Plan, stages: Sequence[StageWork]) -> int:
    """Buckets of about `BUCKET` bytes, at most one per layer: a forward waits layer by layer."""
    size = max(stage.gradient_bytes for stage in stages)
    return max(1, min(max(plan.layers_per_stage), math.ceil(size / BUCKET)))

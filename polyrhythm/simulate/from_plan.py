"""Converts a plan, with its cluster and model profile, to a job that can be simulated."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from polyrhythm.cost.step import Replica, StageRun, StageWork
from polyrhythm.cost.sync import BUCKET
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.scenario import Scenario
from polyrhythm.errors import PolicyError
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.plan import AUTO, Plan, Sources
from polyrhythm.plan.predict import predict
from polyrhythm.plan.problem import Problem
from polyrhythm.simulate.job import EMPTY_SCENARIO, SimulatedJob
from polyrhythm.sync.registry import POLICIES
from polyrhythm.sync.setup import Setup

# The policy of each sync mode of a plan.
_POLICIES = {
    "all_reduce": "all_reduce",
    "decoupled": "all_reduce",
    "groups": "adaptive",
    "ring": "all_reduce",
    "sequential": "all_reduce",
}


def problem_of(
    plan: Plan, cluster: Cluster, profile: ModelProfile, *, gradient_bytes: float | None = None
) -> Problem:
    """The problem that the plan solves, with the plan's settings of gradients and memory."""
    sources = plan.sources or Sources(cluster="", profile="")
    job = TrainingJob(
        batch_size=plan.batch or 1,  # `predict` refuses a plan without a batch
        sync=plan.sync,
        gradient_bytes=sources.gradient_bytes if gradient_bytes is None else gradient_bytes,
        optimizer_bytes=sources.optimizer_bytes,
        memory_reserve=sources.memory_reserve,
    )
    return Problem(cluster=cluster, profile=profile, job=job)


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
    plan = predict(plan, problem).plan  # chooses open settings, and refuses invalid ones
    assert plan.microbatch_size is not None, "predict refuses a plan without micro-batch size"
    mode = plan.sync if sync is None else sync
    if mode not in POLICIES and mode not in _POLICIES:
        raise _unknown(mode)
    replicas = []
    for pipeline in plan.pipelines:
        assert pipeline.num_microbatches is not None, "predict sets the number of micro-batches"
        assert pipeline.schedule != AUTO, "predict sets the schedule"
        built = problem.schedules.build(
            pipeline.schedule,
            num_stages=len(pipeline.parts),
            num_microbatches=pipeline.num_microbatches,
        )
        runs = tuple(
            StageRun(problem.index[part.device], part.first, part.end) for part in pipeline.parts
        )
        replicas.append(Replica(runs=runs, schedule=built))
    stages = problem.stages(plan.layers_per_stage, plan.microbatch_size)
    setup = Setup(
        policy=_POLICIES.get(mode, mode),
        num_stages=plan.num_stages,
        num_pipelines=plan.num_pipelines,
        options=options or {},
        seed=seed,
    )
    return SimulatedJob(
        cluster=problem.cluster,
        stages=stages,
        pipelines=tuple(replicas),
        sync=setup,
        decoupled=mode == "decoupled",
        num_buckets=_num_buckets(plan, stages),
        overlap=overlap and setup.can_overlap and mode != "decoupled",
        scenario=scenario,
        samples=tuple(
            plan.microbatch_size * (pipeline.num_microbatches or 0) for pipeline in plan.pipelines
        ),
    )


def _unknown(mode: str) -> PolicyError:
    known = [*POLICIES, "decoupled"]
    near = get_close_matches(mode, known, n=1)
    return PolicyError(
        f"unknown policy: {mode!r}",
        expected=f"one of {', '.join(known)}",
        fix=f"did you mean {near[0]!r}?" if near else "use one of these, or omit it",
    )


def _num_buckets(plan: Plan, stages: Sequence[StageWork]) -> int:
    """Buckets of about `BUCKET` bytes, at most one per layer: a forward waits layer by layer."""
    size = max(stage.gradient_bytes for stage in stages)
    return max(1, min(max(plan.layers_per_stage), math.ceil(size / BUCKET)))

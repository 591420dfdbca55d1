"""Make a plan in one call from a script: `polyrhythm plan` without the command line."""

from pathlib import Path
from typing import Literal

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.errors import PlanError
from polyrhythm.plan.job import Objective, TrainingJob
from polyrhythm.plan.plan import AUTO, Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.search import make_plan as search
from polyrhythm.schedule.plan_schedules import PlannedSchedules


def make_plan(
    cluster: Cluster | str | Path,
    profile: ModelProfile | str | Path,
    *,
    batch: int,
    sync: Literal["all_reduce", "decoupled", "groups"] = "all_reduce",
    objective: Literal["time", "cost"] = "time",
    num_stages: int | None = None,
    num_pipelines: int | None = None,
    microbatch_size: int | None = None,
    schedule: str = AUTO,
    unequal: bool = True,
    gradient_bytes: float = 1.0,
    optimizer_bytes: float = 2.0,
    memory_reserve: float = 0.1,
    seed: int = 0,
) -> Plan:
    """Return the best plan found, its prediction in `predicted`; raises PlanError if none fits.

    `batch` is the number of samples per step over all pipelines. The same arguments give the same
    plan on every machine.
    """
    if objective not in set(Objective):
        raise PlanError(
            f"objective={objective!r}",
            expected=f"one of {', '.join(Objective)}",
            fix="use time, or cost",
        )
    job = TrainingJob(
        batch=batch,
        sync=sync,
        objective=Objective(objective),
        num_stages=num_stages,
        num_pipelines=num_pipelines,
        microbatch_size=microbatch_size,
        schedule=schedule,
        unequal=unequal,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        memory_reserve=memory_reserve,
    )
    problem = Problem(
        cluster=cluster if isinstance(cluster, Cluster) else Cluster.load(cluster),
        profile=profile if isinstance(profile, ModelProfile) else ModelProfile.load(profile),
        job=job,
        schedules=PlannedSchedules(),
    )
    return search(problem, seed=seed).best.plan

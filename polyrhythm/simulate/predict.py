"""Prediction in one call, for scripts: `polyrhythm simulate` without the command line."""

from collections.abc import Mapping
from pathlib import Path

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.scenario import Scenario
from polyrhythm.plan.plan import Plan
from polyrhythm.simulate.from_plan import planned_job, problem_of
from polyrhythm.simulate.job import EMPTY_SCENARIO
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.simulator import simulate


def predict(
    plan: Plan | str | Path,
    cluster: Cluster | str | Path,
    profile: ModelProfile | str | Path,
    scenario: Scenario | str | Path | None = None,
    *,
    sync: str | None = None,
    options: Mapping[str, object] | None = None,
    schedule: str | None = None,
    overlap: bool = False,
    num_steps: int = 20,
    gradient_bytes: float | None = None,
    seed: int = 0,
    run: Path | str | None = None,
) -> SimulationResult:
    """Predict the performance of a plan by simulating `num_steps` global steps in a scenario.

    `sync` is a policy with its `options`, or "decoupled"; it and `schedule` default to the plan's.
    `gradient_bytes` are per byte of parameters, by default the plan's; `run` is a folder for the
    log, as training writes it. Raises UserError.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    problem = problem_of(
        plan,
        cluster if isinstance(cluster, Cluster) else Cluster.load(cluster),
        profile if isinstance(profile, ModelProfile) else ModelProfile.load(profile),
        gradient_bytes=gradient_bytes,
    )
    if scenario is not None and not isinstance(scenario, Scenario):
        scenario = Scenario.load(scenario)
    job = planned_job(
        plan,
        problem,
        sync=sync,
        options=options,
        schedule=schedule,
        overlap=overlap,
        scenario=scenario or EMPTY_SCENARIO,
        seed=seed,
    )
    return simulate(job, num_steps=num_steps, run=None if run is None else Path(run))

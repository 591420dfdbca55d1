"""Simulation in one call, for scripts: `polyrhythm simulate` without the command line."""

from collections.abc import Mapping
from pathlib import Path

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.scenario import Scenario
from polyrhythm.plan.inputs import planned_inputs, problem_of
from polyrhythm.plan.plan import Plan
from polyrhythm.renamed import renamed_arguments
from polyrhythm.simulate.from_plan import planned_job
from polyrhythm.simulate.job import EMPTY_SCENARIO
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.simulator import simulate


@renamed_arguments(run="run_dir=")
def simulate_plan(
    plan: Plan | str | Path,
    scenario: Scenario | str | Path | None = None,
    *,
    cluster: Cluster | str | Path | None = None,
    profile: ModelProfile | str | Path | None = None,
    sync: str | None = None,
    options: Mapping[str, object] | None = None,
    schedule: str | None = None,
    overlap: bool = False,
    num_steps: int = 20,
    gradient_bytes: float | None = None,
    seed: int = 0,
    run_dir: Path | str | None = None,
    replans: bool = False,
) -> SimulationResult:
    """Predict the performance of a plan by simulating `num_steps` global steps in a scenario.

    `cluster` and `profile` default to the files or names that the plan was made from. `sync` is a
    policy with its `options`, or "decoupled"; it and `schedule` default to the plan's.
    `gradient_bytes` are per byte of parameters, by default the plan's; `run_dir` is a folder for
    the log, as training writes it. With `replans` survivors of a loss in an exact mode divide the
    layers anew where that pays off, which the runtime does not do. Raises UserError.
    """
    file = None if isinstance(plan, Plan) else Path(plan)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    cluster, profile = planned_inputs(plan, file, cluster=cluster, profile=profile)
    problem = problem_of(plan, cluster, profile, gradient_bytes=gradient_bytes)
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
    run = None if run_dir is None else Path(run_dir)
    return simulate(job, num_steps=num_steps, run=run, replans=replans)

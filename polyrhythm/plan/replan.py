"""Re-plan for a changed cluster: keep the running plan, repair it, or migrate to another one.

The options are compared by the time, or price, of the remaining steps and of the migration before
them. Options are the running plan, if all its devices exist; the repaired plan, in which lost
devices are replaced or their pipelines dropped; annealing from the running plan; and new plans.
Equal devices keep their layers as far as possible.

Like `search_plan`, the result depends only on the arguments: all nodes with the same measurements
and the running plan reach the same result.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from polyrhythm.errors import PlanError
from polyrhythm.plan.draft import (
    PlanShape,
    assign_microbatches,
    draft_to_plan,
    draft_with_devices,
    improve_draft,
    regions_of,
)
from polyrhythm.plan.migration import Migration, migration, minimize_moves
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import Prediction, check, predict
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.recompute import recompute_choices
from polyrhythm.plan.search import PlanResult, SearchProgress, predictions, with_predicted_step
from polyrhythm.plan.shapes import infeasible_error, sizes_for
from polyrhythm.plan.step_bound import step_bound
from polyrhythm.types import Seconds

_MOVES = 30_000  # of annealing, from the running plan
_RESTART: Seconds = 5.0  # to stop, reconnect and restart, in addition to transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanResult:
    planned: PlanResult  # the plan to use, possibly the running one
    migration: Seconds  # 0 if nothing changes
    moved: tuple[str, ...]  # devices that receive layers
    from_checkpoint: tuple[int, ...]  # layers that no device has
    why: str

    @property
    def stays(self) -> bool:
        return self.migration == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    prediction: Prediction
    migration: Migration
    changes: bool
    what: str

    @property
    def pause(self) -> Seconds:
        return self.migration.takes + _RESTART if self.changes else 0.0

    def value(self, problem: Problem, steps: int) -> float:
        """Return the time or price of the remaining steps with this option."""
        time = self.prediction.time.total
        if problem.job.objective != "cost":
            return self.pause + steps * time
        assert self.prediction.price is not None, "prices are checked first"
        return self.prediction.price * (steps + self.pause / time)


def replan(
    running: Plan,
    problem: Problem,
    *,
    steps: int,
    seed: int = 0,
    on_progress: Callable[[SearchProgress], None] = lambda _: None,
    one_stage_per_device: bool = False,
) -> ReplanResult:
    """Choose a plan for the present cluster of `problem` and `steps` remaining steps.

    `one_stage_per_device`: for processes that are already started, each on its own device.
    """
    if steps < 0:
        raise PlanError(
            f"{steps} steps", expected="0 or more", fix="pass the number of remaining steps"
        )
    if sum(running.layers_per_stage) != problem.num_layers:
        raise PlanError(
            f"a running plan of {sum(running.layers_per_stage)} layers",
            expected=f"one for the {problem.num_layers} layers of {problem.profile.name!r}",
            fix="pass the running plan and the profile of its model",
        )
    options = [
        option
        for option in _options(running, problem, seed, on_progress)
        if not one_stage_per_device or _has_one_stage_per_device(option.prediction.plan)
    ]
    if not options:
        raise infeasible_error(problem)
    best = min(options, key=lambda option: option.value(problem, steps))
    bound = step_bound(problem, sizes=sizes_for(problem))
    return ReplanResult(
        planned=PlanResult(best=with_predicted_step(best.prediction, bound), bound=bound, front=()),
        migration=best.pause,
        moved=best.migration.moved,
        from_checkpoint=best.migration.lost,
        why=_why(best, options, problem, steps),
    )


def _has_one_stage_per_device(plan: Plan) -> bool:
    devices = [device for pipeline in plan.pipelines for device in pipeline.devices]
    return len(set(devices)) == plan.num_workers


def _options(
    running: Plan, problem: Problem, seed: int, on_progress: Callable[[SearchProgress], None]
) -> Iterator[_Option]:
    near = [
        ("unchanged", [running] if running.batch == problem.job.batch_size else []),
        ("repaired", _repaired(running, problem)),
        ("improved", _annealed(running, problem, seed)),
    ]
    for what, plans in near:
        for plan in plans:
            if not _meets_constraints(plan, problem):
                continue
            for choice in _recompute_choices(reset_schedules(plan, problem), problem):
                with contextlib.suppress(PlanError):  # a device is gone, or is too small now
                    yield _option(what, running, choice, problem)
    try:
        found = predictions(problem, seed=seed, on_progress=on_progress)
    except PlanError:
        return
    for prediction in found:
        yield _option("new", running, minimize_moves(running, prediction.plan, problem), problem)


def _recompute_choices(plan: Plan, problem: Problem) -> list[Plan]:
    """Return the plan as it is, if the job allows that, and with recomputation chosen again."""
    try:
        check(plan, problem)
    except PlanError:  # a device is gone
        return []
    choices = recompute_choices(plan, problem)
    kept = [plan] if problem.job.recompute == "auto" else []
    return kept + [choice for choice in choices if choice not in kept]


def _meets_constraints(plan: Plan, problem: Problem) -> bool:
    job = problem.job
    return (
        job.num_stages in (None, plan.num_stages)
        and job.num_pipelines in (None, plan.num_pipelines)
        and job.microbatch_size in (None, plan.microbatch_size)
    )


def _option(what: str, running: Plan, plan: Plan, problem: Problem) -> _Option:
    prediction = predict(plan, problem)
    return _Option(
        prediction=prediction,
        migration=migration(running, plan, problem),
        changes=_work(plan) != _work(running),
        what=what,
    )


def _work(plan: Plan) -> object:
    """Return the parts of a plan whose change needs a restart; schedules may change at run time."""
    pipelines = {(p.devices, p.num_microbatches) for p in plan.pipelines}
    return plan.layers_per_stage, plan.recompute, plan.microbatch_size, plan.sync, pipelines


def reset_schedules(plan: Plan, problem: Problem) -> Plan:
    """Return the plan with schedules to be chosen again for the present cluster."""
    pipelines = tuple(replace(p, schedule=problem.job.schedule) for p in plan.pipelines)
    used = {device for pipeline in pipelines for device in pipeline.devices}
    return replace(
        plan,
        pipelines=pipelines,
        sync=problem.job.sync,
        left_out=tuple(d.name for d in problem.cluster.devices if d.name not in used),
        regions=regions_of(problem.cluster),
        predicted=None,
    )


def _repaired(running: Plan, problem: Problem) -> Iterator[Plan]:
    """Yield plans with lost devices replaced by idle ones or their pipelines dropped, and with
    the batch reassigned if its size has changed.
    """
    used = {device for pipeline in running.pipelines for device in pipeline.devices}
    lost = sorted(used - set(problem.index))
    if not lost and running.batch == problem.job.batch_size:
        return
    idle = [device.name for device in problem.cluster.devices if device.name not in used]
    for spares in (idle, []) if lost and idle else ([],):
        substitutes = dict(zip(lost, spares, strict=False))
        kept = [
            replace(p, devices=tuple(substitutes.get(device, device) for device in p.devices))
            for p in running.pipelines
            if all(device in problem.index or device in substitutes for device in p.devices)
        ]
        if kept:
            yield from _with_batch(running, kept, problem)


def _with_batch(running: Plan, kept: list[PipelinePlan], problem: Problem) -> Iterator[Plan]:
    """Yield a plan with the batch split over these pipelines in their old proportion."""
    size = running.microbatch_size or sizes_for(problem)[0]
    count, rest = divmod(problem.job.batch_size, size)
    if rest:
        return
    kept = kept[:count]  # each needs at least one micro-batch
    pace = [1 / (pipeline.num_microbatches or 1) for pipeline in kept]
    numbers = assign_microbatches(count, [0.0] * len(kept), pace, even=False)
    yield replace(
        running,
        microbatch_size=size,
        pipelines=tuple(
            replace(pipeline, num_microbatches=number)
            for pipeline, number in zip(kept, numbers, strict=True)
        ),
        left_out=(),
        predicted=None,
    )


def _annealed(running: Plan, problem: Problem, seed: int) -> Iterator[Plan]:
    """Yield plans annealed from the running one, if all its devices exist and run one stage."""
    if running.microbatch_size is None or problem.job.batch_size % running.microbatch_size:
        return
    columns = [[problem.index.get(d, -1) for d in p.devices] for p in running.pipelines]
    flat = [device for column in columns for device in column]
    if not flat or min(flat) < 0 or len(set(flat)) != running.num_workers:
        return
    shape = PlanShape(running.num_stages, running.num_pipelines, running.microbatch_size)
    layout = [list(row) for row in zip(*columns, strict=True)]
    try:
        start = draft_with_devices(problem, shape, layout)
    except PlanError:  # no layers fit
        return
    for draft in (start, improve_draft(problem, start, num_moves=_MOVES, seed=seed)):
        yield minimize_moves(running, draft_to_plan(draft, problem), problem)


def _why(best: _Option, options: list[_Option], problem: Problem, steps: int) -> str:
    stays = next((option for option in options if not option.changes), None)
    step = best.prediction.time.total
    if best is stays:
        others = [option for option in options if option.changes]
        if not others:
            return f"keep the running plan, a step of {step:.3g} s: no other plan was found"
        other = min(others, key=lambda option: option.value(problem, steps))
        return (
            f"keep the running plan: a step of {step:.3g} s, and the best change, to "
            f"{other.prediction.time.total:.3g} s after a pause of {other.pause:.3g} s, "
            f"does not pay off in {steps} steps"
        )
    if stays is None:
        return f"the running plan cannot continue; {best.what}: a step of {step:.3g} s"
    return (
        f"{best.what}: from a step of {stays.prediction.time.total:.3g} s to {step:.3g} s, which "
        f"pays for a pause of {best.pause:.3g} s within {steps} steps"
    )

"""Refine a plan by simulating small changes, which estimates do not distinguish.

Layers move between stages, micro-batches between pipelines, stages swap, and begin or cease to
recompute. A change that improves
the simulated step is kept, until none does or enough were tried. Then the pipeline whose first
device is nearest to all others becomes the first one: rank 0 has the coordinator.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from polyrhythm.cost.sync import Sync
from polyrhythm.errors import UserError
from polyrhythm.plan.draft import assign_microbatches
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import Prediction, paces, predict
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.recompute import recompute_changes, recompute_choices

_MAX_ACTIONS = 120_000  # simulated, over all changes: a second or two
_MAX_CHANGES = 100
_WORTHWHILE = 1e-4  # relative


def refine_plan(
    prediction: Prediction, problem: Problem, value: Callable[[Prediction], float]
) -> Prediction:
    """Return the same plan or a better one by `value`."""
    best = _first_pipeline(prediction, problem)
    batch = problem.job.batch_size // (best.plan.microbatch_size or 1)
    left = min(_MAX_CHANGES, _MAX_ACTIONS // (2 * batch * best.plan.num_stages))
    better = True
    while better:
        better = False
        for plan in _changed(best.plan, problem):
            left -= 1
            if left < 0:
                return best
            try:
                changed = predict(plan, problem)
            except UserError:  # the changed plan does not fit
                continue
            if value(changed) < value(best) * (1 - _WORTHWHILE):
                best, better = changed, True
                break
    return best


def _first_pipeline(prediction: Prediction, problem: Problem) -> Prediction:
    plan, latency = prediction.plan, problem.links.of_averages(Sync(problem.job.sync)).latency
    used = [problem.index[use.device] for use in prediction.uses]

    def farthest(pipeline: PipelinePlan) -> float:
        first = problem.index[pipeline.devices[0]]
        return max(float(latency[first, d] + latency[d, first]) for d in used if d != first)

    if len(plan.pipelines) == 1:
        return prediction
    nearest = min(plan.pipelines, key=lambda pipeline: (farthest(pipeline), pipeline.devices))
    others = tuple(pipeline for pipeline in plan.pipelines if pipeline != nearest)
    return predict(replace(plan, pipelines=(nearest, *others)), problem)


def _changed(plan: Plan, problem: Problem) -> Iterator[Plan]:
    """Yield plans with one small change, with schedules chosen again unless the job fixes them."""
    opened = tuple(replace(p, schedule=problem.job.schedule) for p in plan.pipelines)
    plan = replace(plan, pipelines=opened, predicted=None)
    for moved in (*_stages_swapped(plan), *_layers_moved(plan)):
        for changed in recompute_choices(moved, problem):
            yield changed
            if problem.job.unequal and (reassigned := _reassigned(changed, problem)) != changed:
                yield reassigned
    yield from recompute_changes(plan, problem)
    if problem.job.unequal:
        yield from _microbatches_moved(plan)


def _reassigned(plan: Plan, problem: Problem) -> Plan:
    """Return the plan with micro-batches reassigned by its pipelines' present times."""
    first, pace = zip(*paces(plan, problem), strict=True)
    count = sum(pipeline.num_microbatches or 0 for pipeline in plan.pipelines)
    numbers = assign_microbatches(count, first, pace, even=False)
    return replace(
        plan,
        pipelines=tuple(
            replace(pipeline, num_microbatches=number)
            for pipeline, number in zip(plan.pipelines, numbers, strict=True)
        ),
    )


def _layers_moved(plan: Plan) -> Iterator[Plan]:
    for source, count in enumerate(plan.layers_per_stage):
        for target in range(plan.num_stages):
            if source != target and count > 1:
                counts = list(plan.layers_per_stage)
                counts[source] -= 1
                counts[target] += 1
                yield replace(plan, layers_per_stage=tuple(counts))


def _microbatches_moved(plan: Plan) -> Iterator[Plan]:
    for source, giver in enumerate(plan.pipelines):
        for target in range(plan.num_pipelines):
            has = giver.num_microbatches or 0
            for count in sorted({max(1, has // 16), 1}, reverse=True):
                if source != target and has > count:
                    pipelines = list(plan.pipelines)
                    taker = pipelines[target]
                    pipelines[source] = replace(giver, num_microbatches=has - count)
                    pipelines[target] = replace(
                        taker, num_microbatches=(taker.num_microbatches or 0) + count
                    )
                    yield replace(plan, pipelines=tuple(pipelines))


def _stages_swapped(plan: Plan) -> Iterator[Plan]:
    """Yield plans with two stages swapped or all reversed, if every device runs one stage."""
    num_stages = plan.num_stages
    if any(len(pipeline.parts) != num_stages for pipeline in plan.pipelines):
        return
    forward = list(range(num_stages))
    orders = [forward[::-1]] if num_stages > 2 else []
    for a in range(num_stages):
        for b in range(a):
            order = list(forward)
            order[a], order[b] = b, a
            orders.append(order)
    for order in orders:
        yield replace(
            plan,
            pipelines=tuple(
                replace(pipeline, devices=tuple(pipeline.devices[stage] for stage in order))
                for pipeline in plan.pipelines
            ),
        )

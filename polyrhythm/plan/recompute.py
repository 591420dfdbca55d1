"""Choose which stages of a plan recompute their activations: time for memory.

A stage that recomputes needs less memory for each micro-batch in flight, and its backward takes as
much longer as its forward takes. So it pays off in two cases: the stage does not fit otherwise, or
it would hold fewer micro-batches than 1F1B has in flight there, and the pipeline would wait.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from polyrhythm.plan.plan import DevicePart, Plan
from polyrhythm.plan.problem import Problem


def recompute_if_needed(
    problem: Problem, microbatch_size: int, rooms: NDArray[np.float64], *, num_pipelines: int
) -> NDArray[np.bool_]:
    """Return [..., a, b]: whether a stage of layers a to b recomputes within a memory of `rooms`.

    It does if one micro-batch fits no other way, unless the job says never or always.
    """
    plain = problem.least_memory(microbatch_size, num_pipelines=num_pipelines)
    small = problem.least_memory(microbatch_size, recompute=True, num_pipelines=num_pipelines)
    is_less = small < plain
    needed = (plain > np.asarray(rooms)[..., None, None]) & is_less
    if problem.job.recompute == "auto":
        return needed
    return np.full_like(needed, problem.job.recompute == "always")


def recompute_of_stages(
    problem: Problem,
    layers_per_stage: Sequence[int],
    microbatch_size: int,
    rooms: NDArray[np.float64],
    num_pipelines: int,
) -> tuple[bool, ...]:
    """Return whether each stage recomputes within the memory that it has."""
    recomputes = recompute_if_needed(problem, microbatch_size, rooms, num_pipelines=num_pipelines)
    bounds = pairwise(accumulate(layers_per_stage, initial=0))
    return tuple(bool(recomputes[stage, a, b]) for stage, (a, b) in enumerate(bounds))


def recompute_choices(plan: Plan, problem: Problem) -> list[Plan]:
    """Return the plan with recomputation where it is needed, and where it may pay off as well."""
    if problem.job.recompute != "auto":
        is_always = problem.job.recompute == "always"
        return [replace(plan, recompute=(is_always,) * plan.num_stages)]
    needed = _stages_with_less_than_1f1b(plan, problem, at_most=1)
    short = _stages_with_less_than_1f1b(plan, problem)
    return [
        replace(plan, recompute=tuple(stage in stages for stage in range(plan.num_stages)))
        for stages in ([needed, short] if short > needed else [needed])
    ]


def recompute_changes(plan: Plan, problem: Problem) -> list[Plan]:
    """Return plans in which one stage recomputes that did not, or the other way around."""
    if problem.job.recompute != "auto":
        return []
    changes = []
    for stage in sorted(_stages_with_less_than_1f1b(plan, problem)):
        flags = [plan.recomputes(each) for each in range(plan.num_stages)]
        flags[stage] = not flags[stage]
        changes.append(replace(plan, recompute=tuple(flags)))
    return changes


def recomputed_layers(plan: Plan, part: DevicePart) -> set[int]:
    """Return the layers on a device that are recomputed."""
    stages = filter(plan.recomputes, range(part.first, part.end))
    return {layer for stage in stages for layer in plan.layers(stage)}


def _stages_with_less_than_1f1b(
    plan: Plan, problem: Problem, at_most: int | None = None
) -> set[int]:
    """Return the stages on devices that without recomputation hold fewer micro-batches than 1F1B.

    `at_most`: count no more than this number of micro-batches as those of 1F1B.
    """
    assert plan.microbatch_size is not None, "a draft has it"
    found: set[int] = set()
    for pipeline in plan.pipelines:
        parts, count = pipeline.parts, pipeline.num_microbatches or 1
        for place, part in enumerate(parts):
            wanted = min(len(parts) - place, count, at_most or count)
            layers = range(plan.layers(part.first).start, plan.layers(part.end - 1).stop)
            device = problem.index[part.device]
            fits = problem.max_in_flight(
                device,
                layers,
                plan.microbatch_size,
                count,
                num_pipelines=plan.num_pipelines,
            )
            if fits < wanted:
                found |= set(range(part.first, part.end))
    return found

"""Make a plan in which every device runs one stage: for processes that are already started.

The general planner may leave devices out, or give one several stages in a row. A job whose
processes are already started uses all of them: stages times pipelines equals the number of devices.
Every such pair of degrees is searched separately, the most promising first, until by its lower
bound no other can be better.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from polyrhythm.cost.memory import peak_temporary
from polyrhythm.describe.model import AtSize, Layer, ModelProfile, recompute_bytes
from polyrhythm.errors import UserError
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.search import SearchProgress, search_plan
from polyrhythm.plan.shapes import sizes_for
from polyrhythm.plan.step_bound import least_step
from polyrhythm.types import Seconds


def plan_all_devices(
    problem: Problem,
    *,
    layer_blocks: tuple[int, ...] = (),
    seed: int = 0,
    on_progress: Callable[[SearchProgress], None] = lambda _: None,
) -> Plan:
    """Return the best plan found; raise PlanError if none is feasible.

    `layer_blocks` are numbers of consecutive layers that must stay on one stage. A number of stages
    in the job must divide the number of devices.
    """
    counts = layer_blocks or (1,) * problem.num_layers
    grouped = replace(problem, profile=merge_layers(problem.profile, counts))
    number = problem.num_devices
    best: Plan | None = None
    refusals: dict[int, UserError] = {}
    stages = [each for each in range(1, number + 1) if number % each == 0 and each <= len(counts)]
    if problem.job.num_stages is not None:
        stages = [problem.job.num_stages]
    for bound, num_stages in sorted((_bound(grouped, each), each) for each in stages):
        if best is not None and bound >= _step(best):
            break
        job = replace(grouped.job, num_stages=num_stages, num_pipelines=number // num_stages)
        try:
            found = search_plan(replace(grouped, job=job), seed=seed, on_progress=on_progress)
        except UserError as error:
            refusals[num_stages] = error
            continue
        plan = found.best.plan
        best = plan if best is None else min(best, plan, key=_step)
    if best is None:
        # More stages need less memory each: report the least that is missing.
        raise refusals[max(refusals)]
    ends = list(accumulate(counts, initial=0))
    cuts = [ends[end] for end in accumulate(best.layers_per_stage, initial=0)]
    return replace(best, layers_per_stage=tuple(b - a for a, b in pairwise(cuts)))


def merge_layers(profile: ModelProfile, counts: tuple[int, ...]) -> ModelProfile:
    """Merge `counts[i]` consecutive layers into one, for each i."""
    ends, layers = pairwise(accumulate(counts, initial=0)), _with_recompute_bytes(profile)
    return replace(profile, layers=tuple(_one(layers[a:b]) for a, b in ends))


def _with_recompute_bytes(profile: ModelProfile) -> tuple[Layer, ...]:
    """Return the layers with `recompute_bytes`, which a layer alone may not tell."""
    kept = {size: recompute_bytes(profile.at(size).layers) for size in profile.microbatch_sizes}
    return tuple(
        replace(
            layer,
            recompute_bytes=kept[profile.microbatch_size][number],
            sizes=tuple(
                replace(at, recompute_bytes=kept[at.microbatch_size][number]) for at in layer.sizes
            ),
        )
        for number, layer in enumerate(profile.layers)
    )


def _one(layers: tuple[Layer, ...]) -> Layer:
    if len(layers) == 1:
        return layers[0]
    return Layer(
        name=f"{layers[0].name} to {layers[-1].name}",
        parameter_bytes=sum(layer.parameter_bytes for layer in layers),
        cast_bytes=sum(layer.cast_bytes or 0 for layer in layers) or None,
        sizes=tuple(
            AtSize(microbatch_size=at[0].microbatch_size, **_sums(at))
            for at in zip(*(layer.sizes for layer in layers), strict=True)
        ),
        **_sums(layers),
    )


def _sums(layers: Sequence[Layer | AtSize]) -> dict[str, Any]:
    """Return the times and bytes of consecutive layers; only the last one's output is sent."""
    names = ("forward", "backward", "stored_bytes", "recompute_bytes")
    sums = {name: sum(getattr(layer, name) for layer in layers) for name in names}
    known = [layer.temporary_bytes for layer in layers if layer.temporary_bytes is not None]
    is_known, stored = len(known) == len(layers), [layer.stored_bytes for layer in layers]
    return {
        **sums,
        "activation_bytes": layers[-1].activation_bytes,
        "temporary_bytes": peak_temporary(known, stored) if is_known else None,
    }


def _bound(problem: Problem, num_stages: int) -> Seconds:
    """Return a lower bound of the step time with `num_stages` stages on all devices."""
    number = problem.num_devices // num_stages
    return min(least_step(problem, size, number) for size in sizes_for(problem))


def _step(plan: Plan) -> Seconds:
    assert plan.predicted is not None, "the search fills in the predicted step"
    return plan.predicted.step

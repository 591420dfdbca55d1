"""Search for a plan: degrees, devices, layers, micro-batches and schedules.

1. Every shape (stages x pipelines, micro-batch size) that could beat the best one so far by its
   lower bound gets a draft: devices and layers, by estimates.
2. The best drafts are improved further, also from DT-FM's layout.
3. Pipelines with unequal numbers of devices are tried.
4. The best are predicted: schedules chosen, a step simulated. The best of these is refined.

The result depends only on the problem and the seed, never on a clock: all nodes with the same
measurements make the same plan.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from polyrhythm.cost.dtfm import Traffic, pair_times
from polyrhythm.errors import PlanError, ScheduleError, UserError
from polyrhythm.plan.draft import (
    PlanDraft,
    PlanShape,
    draft_to_plan,
    draft_with_devices,
    improve_draft,
    make_draft,
)
from polyrhythm.plan.local_search import refine_plan
from polyrhythm.plan.plan import PredictedStep
from polyrhythm.plan.predict import Prediction, predict
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.recompute import recompute_choices
from polyrhythm.plan.shapes import infeasible_error, shapes, sizes_for
from polyrhythm.plan.step_bound import least_price, least_step, step_bound
from polyrhythm.plan.unequal_pipelines import unequal_plans
from polyrhythm.types import Seconds

_QUICK_MOVES, _MOVES = 8_000, 150_000
_NUM_IMPROVED, _NUM_PREDICTED = 6, 6
# If there are more sizes, only this many degrees are tried with all of them.
_FEW_SIZES, _NUM_DEGREES = 3, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    doing: str  # such as "8 stages x 8 pipelines, micro-batches of 1"
    done: int
    total: int
    best: str  # so far, such as "8.04 s, 8 stages x 8 pipelines, ..."; empty at first


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    best: Prediction  # by the job's objective; its plan has `predicted` filled in
    bound: Seconds  # no plan takes less
    front: tuple[Prediction, ...]  # Pareto front, fastest first; () without prices
    price_bound: float | None = None  # no plan's step costs less; None without prices


def search_plan(
    problem: Problem,
    *,
    seed: int = 0,
    on_progress: Callable[[SearchProgress], None] = lambda _: None,
) -> PlanResult:
    """Search for the best plan; raise PlanError if none is feasible.

    For time and cost both, `best` is the fastest plan, and `front` has those of two searches.
    """
    if problem.job.objective == "both":
        by_cost = replace(problem, job=replace(problem.job, objective="cost"))
        by_time = replace(problem, job=replace(problem.job, objective="time"))
        # The cheapest first: this search refuses devices without a price.
        cheap = search_plan(by_cost, seed=seed, on_progress=on_progress)
        fast = search_plan(by_time, seed=seed, on_progress=on_progress)
        return replace(fast, front=tuple(pareto_front([*fast.front, *cheap.front])))
    found = predictions(problem, seed=seed, on_progress=on_progress)
    bound = step_bound(problem, sizes=sizes_for(problem))
    best = min(found, key=lambda each: _value(each, problem))
    return PlanResult(
        best=with_predicted_step(best, bound),
        bound=bound,
        front=tuple(with_predicted_step(each, bound) for each in pareto_front(found)),
        price_bound=least_price(problem, sizes_for(problem)),
    )


def predictions(
    problem: Problem, *, seed: int, on_progress: Callable[[SearchProgress], None]
) -> list[Prediction]:
    """Return predictions of the most promising plans; at least one. Raises PlanError."""
    if not 0 <= seed < 2**31:
        raise PlanError(f"seed={seed}", expected="0 or more, below 2**31", fix="use 0")
    _check_prices(problem)
    reporter = _ProgressReporter(on_progress, problem)
    drafts = _improved(problem, list(_drafts(problem, seed, reporter)), seed, reporter)
    plans = [draft_to_plan(draft, problem) for draft in _most_promising(drafts)]
    if problem.job.unequal:
        lowest = min((draft.value for draft in drafts), default=float("inf"))
        plans += unequal_plans(problem, sizes_for(problem), below=lowest)
    found: list[Prediction] = []
    reasons: list[UserError] = []
    plans = [choice for plan in plans for choice in recompute_choices(plan, problem)]
    reporter.total = reporter.done + len(plans) + 1
    for number, plan in enumerate(plans):
        reporter.report(f"simulating plan {number + 1} of {len(plans)}")
        try:
            found.append(predict(plan, problem))
        except UserError as error:  # too large once all memory is counted, or with this schedule
            reasons.append(error)
    if not found:
        refused = [reason for reason in reasons if isinstance(reason, ScheduleError)]
        raise refused[0] if refused else infeasible_error(problem)
    reporter.report("refining the best plan")
    best = min(range(len(found)), key=lambda index: _value(found[index], problem))
    found[best] = refine_plan(found[best], problem, lambda found: _value(found, problem))
    return found


def pareto_front(predictions: list[Prediction]) -> list[Prediction]:
    """Return the Pareto front of time and price, fastest first; empty without prices."""
    front: list[Prediction] = []
    priced = [each for each in predictions if each.price is not None]
    for prediction in sorted(priced, key=lambda each: (each.time.total, each.price)):
        assert prediction.price is not None, "filtered above"
        if not front or prediction.price < (front[-1].price or 0.0):
            front.append(prediction)
    return front


def _value(prediction: Prediction, problem: Problem) -> float:
    if problem.job.objective == "cost":
        assert prediction.price is not None, "prices are checked first"
        return prediction.price
    return prediction.time.total


def with_predicted_step(prediction: Prediction, bound: Seconds) -> Prediction:
    """Return the prediction with its plan's `predicted` filled in."""
    predicted = PredictedStep(
        step=prediction.time.total,
        bound=bound,
        parts=prediction.parts,
        price_per_step=prediction.price,
    )
    return replace(prediction, plan=replace(prediction.plan, predicted=predicted))


class _ProgressReporter:
    """Report the progress of the search and the estimate of the best draft so far."""

    def __init__(self, on_progress: Callable[[SearchProgress], None], problem: Problem) -> None:
        self._on_progress = on_progress
        self._unit = "per step" if problem.job.objective == "cost" else "s"
        self.done, self.total, self._best, self._value = 0, 0, "", float("inf")

    def report(self, doing: str) -> None:
        self._on_progress(
            SearchProgress(doing=doing, done=self.done, total=self.total, best=self._best)
        )
        self.done += 1

    def found(self, value: float, what: str) -> None:
        if value < self._value:
            self._value, self._best = value, f"about {value:.4g} {self._unit}, {what}"


def _drafts(problem: Problem, seed: int, reporter: _ProgressReporter) -> Iterator[PlanDraft]:
    """Return a draft for each promising shape, in the order of their lower bounds.

    If there are many micro-batch sizes, two of them decide which degrees are good; only those are
    tried with the other sizes.
    """
    every = list(shapes(problem))
    sizes = sorted({shape.microbatch_size for shape in every})
    first = set(sizes) if len(sizes) <= _FEW_SIZES else {sizes[0], sizes[len(sizes) // 2]}
    later = [shape for shape in every if shape.microbatch_size not in first]
    reporter.total = len(every) - len(later) + _NUM_IMPROVED + _NUM_PREDICTED
    early = [shape for shape in every if shape.microbatch_size in first]
    found = list(_drafts_of(problem, early, float("inf"), seed, reporter))
    yield from found
    best = sorted(found, key=lambda draft: draft.value)[:_NUM_DEGREES]
    good = {(draft.shape.num_stages, draft.shape.num_pipelines) for draft in best}
    later = [shape for shape in later if (shape.num_stages, shape.num_pipelines) in good]
    reporter.total += len(later)
    lowest = min((draft.value for draft in found), default=float("inf"))
    yield from _drafts_of(problem, later, lowest, seed, reporter)


def _drafts_of(
    problem: Problem,
    plan_shapes: list[PlanShape],
    best: float,
    seed: int,
    reporter: _ProgressReporter,
) -> Iterator[PlanDraft]:
    """Yield drafts of shapes whose lower bound is below the best draft so far, at first `best`."""
    bounds = [
        (least_step(problem, each.microbatch_size, each.num_pipelines, each.num_places), each)
        for each in plan_shapes
    ]
    for bound, shape in sorted(bounds):
        reporter.report(str(shape))
        if problem.job.objective != "cost" and bound >= best:
            continue
        draft = make_draft(problem, shape, num_moves=_QUICK_MOVES, seed=seed)
        best = min(best, draft.value)
        reporter.found(draft.value, str(shape))
        yield draft


def _improved(
    problem: Problem, drafts: list[PlanDraft], seed: int, reporter: _ProgressReporter
) -> list[PlanDraft]:
    """Improve the best drafts, then return all, best first."""
    drafts = sorted(drafts, key=lambda draft: draft.value)
    better = []
    for draft in drafts[:_NUM_IMPROVED]:
        reporter.report(f"improving {draft.shape}")
        candidates = [improve_draft(problem, draft, num_moves=_MOVES, seed=seed + 1)]
        if draft.shape.num_places == problem.num_devices and draft.shape.num_stages > 1:
            with contextlib.suppress(PlanError):  # DT-FM ignores memory
                start = dtfm_start(problem, draft, seed)
                candidates.append(
                    improve_draft(problem, start, num_moves=_MOVES // 2, seed=seed + 2)
                )
        better.append(min(candidates, key=lambda each: each.value))
        reporter.found(better[-1].value, str(draft.shape))
    return sorted([*better, *drafts[_NUM_IMPROVED:]], key=lambda draft: draft.value)


def _most_promising(drafts: list[PlanDraft]) -> list[PlanDraft]:
    """Return the best drafts, and the best of each micro-batch size: others may exceed memory."""
    of_size: dict[int, PlanDraft] = {}
    for draft in drafts:
        of_size.setdefault(draft.shape.microbatch_size, draft)
    others = [each for each in of_size.values() if each not in drafts[:_NUM_PREDICTED]]
    return [*drafts[:_NUM_PREDICTED], *others]


def dtfm_start(problem: Problem, draft: PlanDraft, seed: int) -> PlanDraft:
    """Return a draft of the same shape with devices placed by DT-FM's cost."""
    from polyrhythm.plan.dtfm.placement import SearchEffort, place

    shape = draft.shape
    stages = problem.stages(draft.layers_per_stage, shape.microbatch_size)
    traffic = Traffic(
        gradient_bytes=max(stage.gradient_bytes for stage in stages),
        activation_bytes=max(stage.activation_bytes for stage in stages)
        * problem.job.batch_size
        / shape.microbatch_size
        / shape.num_pipelines,
    )
    times = pair_times(
        problem.links.latency, problem.links.bandwidth, traffic, num_stages=shape.num_stages
    )
    placed = place(times, seed=seed, effort=SearchEffort(num_rounds=2, num_moves=50_000))
    return draft_with_devices(problem, shape, placed.cost.layout)


def _check_prices(problem: Problem) -> None:
    if problem.job.objective != "cost":
        return
    for device in problem.cluster.devices:
        if device.price_per_hour is None:
            raise PlanError(
                f"device {device.name!r} has no price",
                expected="price_per_hour of every device, to plan for cost",
                fix=f"add price_per_hour to {device.name!r}, or plan for time",
            )

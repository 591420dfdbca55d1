"""Decide after a loss whether pipelines with a hole go on, or are dissolved into whole ones.

If they go on, workers of the same stage in other pipelines run the micro-batches that the lost
worker would have run, in their idle time; all other workers keep theirs (`routes.py`). If they are
dissolved, the others take all of their micro-batches, and what is left of them waits as spares
(`survivors.py`). A pipeline without any worker is dissolved in any case. The global batch stays.
The decision compares predicted steps: of the lists of actions, without the average of gradients,
which takes about as long in both cases.

It is for modes in which all gradients of a step are summed. A worker adds those of other pipelines'
micro-batches to its own, and counts in the average by all that it has run (`Routes.loads`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from polyrhythm.cost.pipeline import PipelineTimes, length
from polyrhythm.cost.sync import Sync
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.rerouted_order import Rerouting, order_actions
from polyrhythm.plan.routes import GridTimes, assign_routes, least_length
from polyrhythm.plan.survivors import Assignment, assign_survivors, missing_stages
from polyrhythm.schedule.plan_schedules import choose_schedule
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import AUTO, Op, Seconds, Worker

_WORTHWHILE = 0.01  # of a step: predictions are not more exact, and rerouting takes memory
_MAX_NAMED = 4  # lost workers in a reason; more are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class RerouteDecision:
    """How survivors go on; with neither `rerouting` nor `dissolved` they cannot."""

    rerouting: Rerouting | None  # None to dissolve pipelines with a hole
    # Whose plan the routes are for: without pipelines that have lost all, but with places of others
    # that are lost. Pass it as `before` at the next loss.
    before: Assignment
    workers: Mapping[int, Worker]  # by member: its place in that plan, if rerouting
    dissolved: Assignment | None  # the other choice; None if there is no whole pipeline
    rerouted_step: Seconds | None  # as predicted; None if it is not possible
    dissolved_step: Seconds | None
    bound: Seconds | None  # of the rerouted step, for any order of actions
    why: str


def decide_rerouting(
    before: Assignment,
    members: Collection[int],
    times: GridTimes,
    *,
    num_microbatches: int | None = None,
    max_in_flight: tuple[int, ...] | None = None,
) -> RerouteDecision:
    """Decide for the members that are left; the result depends only on the arguments.

    `before` is the last assignment of whole pipelines, also if its pipelines have holes already,
    and `times` are those of its places. A spare takes the place of a lost member of its stage.
    `num_microbatches` of all pipelines is needed where the plan has no numbers. `max_in_flight` is
    how many of them fit into the memory of a worker of each stage; None if that is not known.
    """
    dissolved = assign_survivors(before, members)
    if dissolved is not None:
        before, times = _without_empty_pipelines(before, members, times)
    workers = _places(before, members)
    every = map(before.plan.worker, range(before.plan.num_workers))
    lost = sorted({*every} - {*workers.values()})
    if why := _obstacle(before, members, lost, times):
        return RerouteDecision(
            rerouting=None,
            before=before,
            workers={},
            dissolved=dissolved,
            rerouted_step=None,
            dissolved_step=None,
            bound=None,
            why=why,
        )
    counts = _counts(before.plan, num_microbatches)
    routes = assign_routes(lost, counts, times)
    rerouting = order_actions(routes, times, max_in_flight=max_in_flight)
    step = None
    if dissolved is not None:
        step = _dissolved_step(dissolved, workers, times, sum(counts), max_in_flight)
    reroutes = step is None or rerouting.length < step * (1 - _WORTHWHILE)
    bound = least_length(routes, times)
    return RerouteDecision(
        rerouting=rerouting if reroutes else None,
        before=before,
        workers=workers if reroutes else {},
        dissolved=dissolved,
        rerouted_step=rerouting.length,
        dissolved_step=step,
        bound=bound,
        why=_reason(rerouting, dissolved, step, bound),
    )


def _without_empty_pipelines(
    before: Assignment, members: Collection[int], times: GridTimes
) -> tuple[Assignment, GridTimes]:
    """Return the assignment without pipelines that have lost all workers, and its times."""
    kept = sorted({worker.pipeline for m, worker in before.workers.items() if m in members})
    of_kept = {m for m, worker in before.workers.items() if worker.pipeline in kept}
    fewer = assign_survivors(before, {*members} | of_kept)
    if fewer is None or fewer.plan.num_pipelines != len(kept):
        return before, times  # what was absent makes a pipeline
    numbers = {old: new for new, old in enumerate(kept)}
    crossings = {
        (Worker(a.stage, numbers[a.pipeline]), Worker(b.stage, numbers[b.pipeline])): link
        for (a, b), link in times.crossings.items()
        if a.pipeline in numbers and b.pipeline in numbers
    }
    pipelines = tuple(times.pipelines[number] for number in kept)
    return fewer, GridTimes(pipelines=pipelines, crossings=crossings)


def _counts(plan: Plan, total: int | None) -> list[int]:
    """Return the micro-batches of each pipeline; a plan without numbers shares them evenly."""
    numbers = [pipeline.num_microbatches for pipeline in plan.pipelines]
    known = [number for number in numbers if number is not None]
    if len(known) == len(numbers):
        return known
    assert total is not None, "the plan has no numbers"
    share, rest = divmod(total, len(numbers))
    return [share + (number < rest) for number in range(len(numbers))]


def _places(before: Assignment, members: Collection[int]) -> dict[int, Worker]:
    """Return the place of each member in the plan before; a spare may fill a hole."""
    places = {m: worker for m, worker in sorted(before.workers.items()) if m in members}
    every = map(before.plan.worker, range(before.plan.num_workers))
    holes = sorted({*every} - {*places.values()})
    for member, stage in sorted(before.spares.items()):
        hole = next((worker for worker in holes if worker.stage == stage), None)
        if member in members and hole is not None:
            places[member] = hole
            holes.remove(hole)
    return places


def _obstacle(
    before: Assignment, members: Collection[int], lost: Sequence[Worker], times: GridTimes
) -> str:
    """Return why nothing can be rerouted, or need not be; empty if it can."""
    if missing := missing_stages(before, members):
        return f"nobody has the layers of stage {', '.join(map(str, missing))}"
    if not lost:
        return "no place is without a process"
    if before.plan.sync == Sync.GROUPS:
        return "dissolve: pipelines that average in groups do not wait for one another"
    stages = {worker.stage for worker in lost}
    if any({*before.plan.replicas(stage)} <= {*lost} for stage in stages):
        return "dissolve: spares have to take the places of a whole stage"
    if any(len(p.parts) < before.plan.num_stages for p in before.plan.pipelines if p.devices):
        return "dissolve: a device runs several stages"
    return ""


def _dissolved_step(
    dissolved: Assignment,
    workers: Mapping[int, Worker],
    times: GridTimes,
    total: int,
    max_in_flight: tuple[int, ...] | None,
) -> Seconds:
    """Return the step of the whole pipelines, of the slowest one.

    A spare that takes no place of a lost member counts as the worker of the first pipeline.
    """
    plan, longest = dissolved.plan, 0.0
    ranked, counts = dissolved.members_by_rank, _counts(dissolved.plan, total)
    for number, pipeline in enumerate(plan.pipelines):
        row = ranked[number * plan.num_stages : (number + 1) * plan.num_stages]
        places = [workers.get(member, Worker(stage, 0)) for stage, member in enumerate(row)]
        of_row = _pipeline_times(places, times)
        count = counts[number]
        if pipeline.schedule == AUTO:
            spec = choose_schedule(of_row, count, max_in_flight or (count,) * plan.num_stages)
        else:
            spec = ScheduleSpec.parse(pipeline.schedule)
        schedule = spec.build(num_stages=plan.num_stages, num_microbatches=count)
        longest = max(longest, length(schedule, of_row))
    return longest


def _pipeline_times(places: Sequence[Worker], times: GridTimes) -> PipelineTimes:
    """Return the times of a pipeline of workers that may be from several."""
    links = list(pairwise(places))
    return PipelineTimes(
        forward=tuple(times.duration(worker, Op.F) for worker in places),
        backward=tuple(times.duration(worker, Op.B) for worker in places),
        activations=tuple(times.link(a, b) for a, b in links),
        gradients=tuple(times.link(b, a) for a, b in links),
    )


def _reason(
    rerouting: Rerouting, dissolved: Assignment | None, step: Seconds | None, bound: Seconds
) -> str:
    lost = [str(worker) for worker in rerouting.routes.lost]
    named = " and ".join(lost) if len(lost) <= _MAX_NAMED else f"{len(lost)} workers"
    rerouted = (
        f"with the micro-batches of {named} rerouted a step takes {rerouting.length:.4g} s "
        f"(at best {bound:.4g} s)"
    )
    if step is None or dissolved is None:
        return f"reroute: {rerouted}, and no pipeline is whole"
    count = dissolved.plan.num_pipelines
    whole = f"with {count} whole pipeline{'s' if count > 1 else ''}"
    if rerouting.length < step * (1 - _WORTHWHILE):
        return f"reroute: {rerouted}, {whole} {step:.4g} s"
    return f"dissolve: {whole} a step takes {step:.4g} s, {rerouted}"

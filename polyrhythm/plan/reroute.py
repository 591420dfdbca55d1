"""Decide after a loss whether pipelines with a hole go on, or are dissolved into whole ones.

If they go on, workers of the same stage in other pipelines run the micro-batches that the lost
worker would have run, in their idle time; all other workers keep theirs (`routes.py`). If they are
dissolved, the others take all of their micro-batches, and what is left of them waits as spares
(`survivors.py`). Both keep the global batch. The decision compares predicted steps: of the lists of
actions, without the average of gradients, which takes about as long in both cases.

It is for modes in which all gradients of a step are summed. A worker adds those of other pipelines'
micro-batches to its own, and counts in the average by all that it has run (`Routes.loads`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from polyrhythm.cost.pipeline import PipelineTimes, length
from polyrhythm.cost.sync import Sync
from polyrhythm.plan.rerouted_order import Rerouting, order_actions
from polyrhythm.plan.routes import GridTimes, assign_routes, least_length
from polyrhythm.plan.survivors import Assignment, assign_survivors, missing_stages
from polyrhythm.schedule.plan_schedules import choose_schedule
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import AUTO, Op, Seconds, Worker

_SAME = 1e-6  # relative: a gain that only rounding makes is none
_MAX_NAMED = 4  # lost workers in a reason; more are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class RerouteDecision:
    """How survivors go on; with neither `rerouting` nor `dissolved` they cannot."""

    rerouting: Rerouting | None  # None to dissolve pipelines with a hole
    workers: Mapping[int, Worker]  # by member: its place in the plan before, if rerouting
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
    num_microbatches: Sequence[int] = (),
    max_in_flight: tuple[int, ...] | None = None,
) -> RerouteDecision:
    """Decide for the members that are left; the result depends only on the arguments.

    `before` is the last assignment of whole pipelines, also if its pipelines have holes already,
    and `times` are those of its places. A spare takes the place of a lost member of its stage.
    `num_microbatches` is needed per pipeline where the plan has no numbers. `max_in_flight` is how
    many micro-batches fit into the memory of a worker of each stage; None if that is not known.
    """
    dissolved = assign_survivors(before, members)
    workers = _places(before, members)
    every = map(before.plan.worker, range(before.plan.num_workers))
    lost = sorted({*every} - {*workers.values()})
    if why := _obstacle(before, members, lost, times):
        return RerouteDecision(
            rerouting=None,
            workers={},
            dissolved=dissolved,
            rerouted_step=None,
            dissolved_step=None,
            bound=None,
            why=why,
        )
    planned = [pipeline.num_microbatches for pipeline in before.plan.pipelines]
    counts = list(num_microbatches) or [number for number in planned if number is not None]
    assert len(counts) == len(planned), "each pipeline has a number of micro-batches"
    routes = assign_routes(lost, counts, times)
    rerouting = order_actions(routes, times, max_in_flight=max_in_flight)
    step = None
    if dissolved is not None:
        step = _dissolved_step(dissolved, workers, times, sum(counts), max_in_flight)
    reroutes = step is None or rerouting.length < step * (1 - _SAME)
    bound = least_length(routes, times)
    return RerouteDecision(
        rerouting=rerouting if reroutes else None,
        workers=workers if reroutes else {},
        dissolved=dissolved,
        rerouted_step=rerouting.length,
        dissolved_step=step,
        bound=bound,
        why=_reason(rerouting, dissolved, step, bound),
    )


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

    A plan without numbers shares the micro-batches evenly. A spare that takes no place of a lost
    member counts as the worker of the first pipeline.
    """
    plan, longest = dissolved.plan, 0.0
    ranked = dissolved.members_by_rank
    for number, pipeline in enumerate(plan.pipelines):
        row = ranked[number * plan.num_stages : (number + 1) * plan.num_stages]
        places = [workers.get(member, Worker(stage, 0)) for stage, member in enumerate(row)]
        of_row = _pipeline_times(places, times)
        share, rest = divmod(total, plan.num_pipelines)
        count = pipeline.num_microbatches or share + (number < rest)
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
    if rerouting.length < step * (1 - _SAME):
        return f"reroute: {rerouted}, {whole} {step:.4g} s"
    return f"dissolve: {whole} a step takes {step:.4g} s, {rerouted}"

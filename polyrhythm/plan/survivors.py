"""Assign the survivors of a loss: whole pipelines go on, and what is left of others recombines.

No layers move: a member keeps the stage whose model part it holds. Workers of broken pipelines, and
members without a place, make further pipelines as long as every stage has one of them. The global
batch stays constant: pipelines share its micro-batches in proportion to the numbers of the first
plan, so that the rounding after each of several losses does not add up.

The result depends only on the arguments: all members compute the same one, each by itself.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.types import AUTO, Worker

_MAX_LISTED = 8  # items of one kind in a reason; the others are counted

_Row = tuple[int, ...]  # the members of one pipeline, one per stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Which member runs what in an epoch.

    A member is a process, by its rank in the plan that the job began with. The first plan is that
    one, until layers are divided anew: then it is the new one, in which members have other places.
    """

    plan: Plan  # of those that go on
    workers: Mapping[int, Worker]  # by member: its place in `plan`
    spares: Mapping[int, int]  # members without a place; the stage whose model part each holds
    why: str
    first: Plan  # which says who has which layers
    places: Mapping[int, Worker]  # by member: its place in `first`, whose model part it holds

    @property
    def members(self) -> tuple[int, ...]:
        """All members, with a place or without one, sorted."""
        return tuple(sorted((*self.workers, *self.spares)))

    @property
    def members_by_rank(self) -> tuple[int, ...]:
        """The members with a place, in the order of their ranks in `plan`."""
        return tuple(sorted(self.workers, key=lambda member: self.plan.rank(self.workers[member])))


def first_assignment(plan: Plan, members: Sequence[int] = ()) -> Assignment:
    """Return the assignment of a plan at its start: `members` by rank; by default their ranks."""
    members = members or range(plan.num_workers)
    assert len(members) == plan.num_workers, "each place has a member"
    workers = {member: plan.worker(rank) for rank, member in enumerate(members)}
    return Assignment(
        plan=plan,
        workers=workers,
        spares={},
        why="each process has the place of its rank",
        first=plan,
        places=workers,
    )


def assign_survivors(current: Assignment, members: Collection[int]) -> Assignment | None:
    """Return the next assignment, with `members` alone; None if they make no whole pipeline.

    Members that were absent have their places again, without state.
    """
    present, first = _checked(current, members), current.first
    whole = _whole_pipelines(current, present)
    formed = tuple(_further_pipelines(current, present, whole.values()))
    rows = (*whole.values(), *formed)
    if not rows:
        return None
    workers = {
        member: Worker(stage, pipeline)
        for pipeline, row in enumerate(rows)
        for stage, member in enumerate(row)
    }
    spares = {m: current.places[m].stage for m in sorted(present - workers.keys())}
    used = {device_of(current, member) for member in workers}
    named = [device for pipeline in first.pipelines for device in pipeline.devices]
    plan = replace(
        current.plan,
        pipelines=tuple(
            _pipeline_plan(current, row, number)
            for row, number in zip(rows, _microbatches(current, rows), strict=True)
        ),
        left_out=tuple(d for d in dict.fromkeys((*first.left_out, *named)) if d not in used),
        predicted=None,
    )
    why = "; ".join(_reasons(current, present, tuple(whole), formed, spares))
    return replace(current, plan=plan, workers=workers, spares=spares, why=why)


def missing_stages(current: Assignment, members: Collection[int]) -> tuple[int, ...]:
    """Return the stages whose model part none of `members` holds.

    If there is none, and no whole pipeline either, devices forbid it: one device runs consecutive
    stages of a single pipeline only.
    """
    held = {current.places[member].stage for member in _checked(current, members)}
    return tuple(stage for stage in range(current.first.num_stages) if stage not in held)


def machines_without_reserve(
    plan: Plan, by_machine: Mapping[int, str], *, buddy: bool | None
) -> tuple[str, ...]:
    """Return the machines whose loss alone would end the job.

    It leaves no whole pipeline, or takes a shard of the optimizer's state along. `by_machine` has
    the machine of every member. Machines come in the order of their members. `buddy`: whether each
    shard has a copy at the next replica (`decoupled`); None if each replica has all of the state.
    """
    start = first_assignment(plan)

    def is_fatal(machine: str) -> bool:
        others = frozenset(m for m in start.members if by_machine[m] != machine)
        if buddy is not None and _loses_shard(plan, others, has_copies=buddy):
            return True
        if _whole_pipelines(start, others):
            return False
        return next(_further_pipelines(start, others, ()), None) is None

    return tuple(filter(is_fatal, dict.fromkeys(by_machine[m] for m in start.members)))


def _loses_shard(plan: Plan, present: frozenset[int], *, has_copies: bool) -> bool:
    """Whether some shard's owner and its copy are both absent. A copy is at the next replica."""
    for stage in range(plan.num_stages):
        replicas = [plan.rank(Worker(stage, pipeline)) for pipeline in range(plan.num_pipelines)]
        holders = replicas[1:] + replicas[:1] if has_copies else replicas
        if any(not present & pair for pair in map(frozenset, zip(replicas, holders, strict=True))):
            return True
    return False


def _checked(current: Assignment, members: Collection[int]) -> frozenset[int]:
    unknown = sorted({*members} - current.places.keys())
    assert not unknown, f"processes {unknown} have no place in the plan"
    return frozenset(members)


def _whole_pipelines(current: Assignment, present: frozenset[int]) -> dict[int, _Row]:
    """Return the members of each pipeline that has lost none, by its number."""
    ranked, num_stages = current.members_by_rank, current.plan.num_stages
    rows = (ranked[i : i + num_stages] for i in range(0, len(ranked), num_stages))
    return {number: row for number, row in enumerate(rows) if present.issuperset(row)}


def _origin(current: Assignment, member: int) -> int:
    """Return the pipeline that a member began in."""
    return current.places[member].pipeline


def device_of(current: Assignment, member: int) -> str:
    """Return the name of a member's device; empty if the plan names none."""
    stage, pipeline = current.places[member]
    devices = current.first.pipelines[pipeline].devices
    return devices[stage] if devices else ""


class _Part(NamedTuple):
    """What a member brings to a further pipeline; a plan may name no devices and no regions."""

    stage: int
    origin: int  # the pipeline that it began in
    device: str
    region: str
    is_spare: bool  # with older weights
    pipeline: int  # that it was in last


_Pool = Mapping[int, _Part]  # by member


def _part(current: Assignment, member: int) -> _Part:
    began, place = current.places[member], current.workers.get(member)
    return _Part(
        stage=began.stage,
        origin=began.pipeline,
        device=device_of(current, member),
        region=current.first.region_of(began),
        is_spare=place is None,
        pipeline=began.pipeline if place is None else place.pipeline,
    )


def _further_pipelines(
    current: Assignment, present: frozenset[int], whole: Collection[_Row]
) -> Iterator[_Row]:
    """Yield pipelines of members that are in no whole one, until they make no other.

    Each begins with the largest group of members that were together, and is completed by others.
    Of groups of equal size, the one is first whose pipeline mixes fewer former ones, then the one
    that crosses fewer borders of regions, then the one with fewer spares. If devices run several
    stages, another order may make more pipelines.
    """
    placed = {member for row in whole for member in row}
    pool: _Pool = {member: _part(current, member) for member in sorted(present - placed)}
    pool = _on_other_devices(pool, {device_of(current, member) for member in placed})

    def key(row: _Row) -> tuple[int, int, int, _Row]:
        parts = [pool[member] for member in row]
        num_crossings = sum(a.region != b.region for a, b in pairwise(parts))
        num_spares = sum(part.is_spare for part in parts)
        return len({part.origin for part in parts}), num_crossings, num_spares, row

    while pool:
        rows = [_completed(pool, group, current.plan.num_stages) for group in _largest_groups(pool)]
        found = [row for row in rows if row is not None]  # all of them, or none
        if not found:
            return
        row = min(found, key=key)
        yield row
        rest = {member: part for member, part in pool.items() if member not in row}
        pool = _on_other_devices(rest, {pool[member].device for member in row})


def _on_other_devices(pool: _Pool, used: Collection[str]) -> _Pool:
    """Return the members on other devices: a device runs stages of one pipeline only."""
    return {m: part for m, part in pool.items() if not part.device or part.device not in used}


def _largest_groups(pool: _Pool) -> list[frozenset[int]]:
    """Return the largest groups of members that left one pipeline together."""
    groups: dict[tuple[bool, int], set[int]] = {}
    for member, part in pool.items():
        groups.setdefault((part.is_spare, part.pipeline), set()).add(member)
    largest = max(map(len, groups.values()))
    return [frozenset(group) for group in groups.values() if len(group) == largest]


def _completed(pool: _Pool, group: Collection[int], num_stages: int) -> _Row | None:
    """Return a pipeline of members of the pool, of the group where it has one.

    The search goes stage by stage and takes back a choice if devices forbid all that follow. None
    if the pool makes no pipeline at all.
    """
    by_stage: list[list[int]] = [[] for _ in range(num_stages)]
    by_device: dict[str, set[int]] = {}  # stages
    for member, part in pool.items():
        by_stage[part.stage].append(member)
        if part.device:
            by_device.setdefault(part.device, set()).add(part.stage)
    if not all(by_stage):
        return None
    failed: set[tuple[int, str, frozenset[str]]] = set()

    def extended(row: _Row) -> _Row | None:
        stage = len(row)
        if stage == num_stages:
            return row
        # Of devices with a stage from here on, the last one may go on with it, the others may not.
        used = {pool[m].device for m in row}
        matter = {device for device in used if max(by_device.get(device, {-1})) >= stage}
        last = pool[row[-1]].device if row and pool[row[-1]].device in matter else ""
        closed = frozenset(matter - {last})
        if (stage, last, closed) in failed:
            return None
        chosen = [pool[m] for m in (*row, *group) if m in row or pool[m].stage > stage]
        for member in sorted(
            (m for m in by_stage[stage] if pool[m].device not in closed),
            key=lambda m: (m not in group, *_preference(pool[m], chosen, by_device), m),
        ):
            found = extended((*row, member))
            if found is not None:
                return found
        failed.add((stage, last, closed))
        return None

    return extended(())


def _preference(
    part: _Part, chosen: Collection[_Part], by_device: Mapping[str, Collection[int]]
) -> tuple[int, int, float, bool]:
    """Return a key by which to choose among members of a stage: the smallest is the best.

    The best one's device has no other stages for which others are chosen: it could run them in no
    other pipeline. Then the best began in the same pipeline as most of those chosen, mostly on one
    machine; then it has the fewest stages to the nearest one in its region; then it is no spare.
    """
    taken = {other.stage for other in chosen if other.device != part.device}
    num_wasted = len(taken.intersection(by_device.get(part.device, ())))
    together = sum(other.origin == part.origin for other in chosen)
    distances = (abs(other.stage - part.stage) for other in chosen if other.region == part.region)
    return num_wasted, -together, min(distances, default=math.inf), part.is_spare


def _microbatches(current: Assignment, rows: Sequence[_Row]) -> list[int | None]:
    """Return each pipeline's number of micro-batches; their total stays constant.

    A recombined pipeline counts as the slowest of those that its workers began in. So the weights
    sum to the total or less, and no pipeline gets fewer micro-batches than its weight. If the first
    plan has no number for some pipeline, the others keep theirs.
    """
    numbers = [pipeline.num_microbatches for pipeline in current.first.pipelines]
    origins = [{_origin(current, member) for member in row} for row in rows]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return [numbers[min(of_row)] if len(of_row) == 1 else None for of_row in origins]
    weights = [min(known[origin] for origin in of_row) for of_row in origins]
    shares = [sum(known) * weight // sum(weights) for weight in weights]
    remainders = [sum(known) * weight % sum(weights) for weight in weights]
    by_remainder = sorted(range(len(rows)), key=lambda i: (-remainders[i], i))
    for i in by_remainder[: sum(known) - sum(shares)]:
        shares[i] += 1
    return [*shares]


def _pipeline_plan(current: Assignment, row: _Row, num_microbatches: int | None) -> PipelinePlan:
    """Return the plan of one pipeline, with the schedule of those that its workers began in.

    If they had different schedules, or ran on another number of devices, it is chosen again.
    """
    devices = tuple(device_of(current, member) for member in row)
    devices = devices if all(devices) else ()
    origins = [current.first.pipelines[i] for i in {_origin(current, member) for member in row}]
    schedules = {(origin.schedule, _num_parts(origin.devices)) for origin in origins}
    schedule = origins[0].schedule
    if schedules != {(schedule, _num_parts(devices))}:
        schedule = AUTO
    return PipelinePlan(devices=devices, num_microbatches=num_microbatches, schedule=schedule)


def _num_parts(devices: Sequence[str]) -> int:
    return sum(1 for _ in groupby(devices))


def _reasons(
    current: Assignment,
    present: frozenset[int],
    whole: Sequence[int],
    formed: Sequence[_Row],
    spares: Mapping[int, int],
) -> Iterator[str]:
    """Yield what is lost, which pipelines go on, and which processes are spare."""
    broken = [i for i in range(current.plan.num_pipelines) if i not in whole]
    absent = sorted(m for m in current.workers if m not in present)
    if broken:
        lost = _listed([f"{member} ({current.workers[member]})" for member in absent])
        verb = "pipelines {} are" if len(broken) > 1 else "pipeline {} is"
        noun = "processes" if len(absent) > 1 else "process"
        yield f"{verb.format(_listed(broken))} broken without {noun} {lost}"
    else:
        yield "no pipeline is broken"
    moved = [(old, now) for now, old in enumerate(whole) if old != now]
    if moved:
        old, now = ([str(pair[i]) for pair in moved] for i in range(2))
        verb = "pipelines {} become {}" if len(moved) > 1 else "pipeline {} becomes {}"
        yield verb.format(_listed(old), _listed(now))
    if formed:
        made = enumerate(formed, len(whole))
        yield _listed([f"processes {_listed(row)} form pipeline {i}" for i, row in made])
    if spares:
        yield f"spare: {_listed([f'process {m} (stage {s})' for m, s in spares.items()])}"


def _listed(items: Sequence[object]) -> str:
    shown = [str(item) for item in items[:_MAX_LISTED]]
    if len(items) > _MAX_LISTED:
        shown.append(f"{len(items) - _MAX_LISTED} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]

"""Plan pipelines with unequal numbers of devices, each partitioned for its own devices.

Each pipeline has a team of near devices: those of an island (`Problem.islands`), or a stretch of a
row in which near ones are neighbours. Every team splits all layers over its devices by speed. The
boundaries of all teams together define the stages, so a device runs several stages where other
teams split more finely. Micro-batches are assigned to teams by speed. Then devices move between
teams, or out, while the estimate improves.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from polyrhythm.cost.dtfm import PairTimes
from polyrhythm.cost.step import Replica, StageRun, StepSpec, groups_of, pipeline_times
from polyrhythm.cost.sync import reduce_scatter_times
from polyrhythm.errors import PlanError
from polyrhythm.plan.construction import construct_layouts
from polyrhythm.plan.draft import assemble_plan, assign_microbatches, layers_for
from polyrhythm.plan.layout import distances
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.recompute import recompute_if_needed
from polyrhythm.types import Seconds

Teams = tuple[tuple[int, ...], ...]  # devices of each pipeline, in the order of its stages

_MAX_TEAMS = 8
_NUM_CLIMBED = 2  # starts that are improved
# Multiples of the best estimate: limits for improving and for returning a plan.
_PROMISING, _NEAR = 1.3, 1.05
_MAX_OUTLINES = 400  # evaluated from one start


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outline:
    teams: Teams
    runs: tuple[tuple[StageRun, ...], ...]  # of layers here, not of stages
    num_microbatches: tuple[int, ...]
    microbatch_size: int
    takes: Seconds  # a step, estimated


def unequal_plans(problem: Problem, sizes: Sequence[int], *, below: Seconds) -> list[Plan]:
    """Return the best few plans; none if the job fixes the number of stages or minimises cost.

    None either if their estimates are far above `below`, that of the best other plan.
    """
    if problem.job.num_stages is not None or problem.job.objective == "cost":
        return []
    found = []
    for size in sizes:
        outliner = _Outliner(problem, size)
        outlines = map(outliner.outline, dict.fromkeys(_starts(problem, outliner.count)))
        found += [(outline, outliner) for outline in outlines if outline is not None]
    found.sort(key=lambda pair: pair[0].takes)
    climbed = [
        _climbed(outline, outliner)
        for outline, outliner in found[:_NUM_CLIMBED]
        if outline.takes <= _PROMISING * below
    ]
    best = sorted(climbed, key=lambda outline: outline.takes)
    return [_plan(problem, outline) for outline in best if outline.takes <= _NEAR * below]


def _starts(problem: Problem, num_microbatches: int) -> Iterator[Teams]:
    near = distances(problem)
    times = PairTimes(sync=near, hop=near, num_stages=1)
    row = next(iter(construct_layouts(times)))[0].tolist()
    most = min(_MAX_TEAMS, problem.num_devices, num_microbatches)
    wanted = problem.job.num_pipelines
    for island in problem.islands:
        numbers = range(island.max() + 1)
        if len(numbers) <= num_microbatches and wanted in (None, len(numbers)):
            yield tuple(tuple(d for d in row if island[d] == number) for number in numbers)
    for number in range(1, most + 1):
        teams = _stretches(problem, row, number)
        if wanted in (None, number) and len(teams) == number:
            yield teams


def _stretches(problem: Problem, row: list[int], number: int) -> Teams:
    """Split the row into stretches of about equal total speed."""
    done = np.cumsum([problem.speeds[device] for device in row])
    ends = [int(np.searchsorted(done, done[-1] * i / number - 1e-9)) + 1 for i in range(number)]
    ends = [0, *ends[1:], len(row)]
    return tuple(tuple(row[a:b]) for a, b in pairwise(ends) if b > a)


class _Outliner:
    """Make outlines with one micro-batch size; layers of a team are assigned once and cached."""

    def __init__(self, problem: Problem, size: int) -> None:
        self.problem, self._size = problem, size
        self.count = problem.job.batch_size // size
        # By team and number of teams, on which the memory depends.
        self._partitioned: dict[tuple[tuple[int, ...], int], tuple[StageRun, ...] | None] = {}

    def outline(self, teams: Teams) -> _Outline | None:
        """Return layers and micro-batches for these teams; None if something does not fit."""
        runs = [self._runs(team, len(teams)) for team in teams]
        if not teams or len(teams) > self.count or any(run is None for run in runs):
            return None
        team_runs = tuple(run for run in runs if run is not None)
        problem, size = self.problem, self._size
        step = _split_at_boundaries(problem, team_runs, size)
        times = [pipeline_times(replica.runs, step) for replica in step.replicas]
        first, period = [each.first for each in times], [each.pace for each in times]
        numbers = assign_microbatches(self.count, first, period, even=False)
        sync = 2 * max(reduce_scatter_times(groups_of(step), problem.links, step.sync))
        columns = max(f + (n - 1) * p for f, n, p in zip(first, numbers, period, strict=True))
        return _Outline(
            teams=teams,
            runs=team_runs,
            num_microbatches=numbers,
            microbatch_size=size,
            takes=columns + sync,
        )

    def _runs(self, team: tuple[int, ...], num_teams: int) -> tuple[StageRun, ...] | None:
        key = team, num_teams
        if key not in self._partitioned:
            try:
                self._partitioned[key] = (
                    _partitioned(self.problem, team, self._size, num_teams) if team else None
                )
            except PlanError:
                self._partitioned[key] = None
        return self._partitioned[key]


def _partitioned(
    problem: Problem, team: Sequence[int], size: int, num_teams: int
) -> tuple[StageRun, ...]:
    """Return the layers of each device of a team; the slowest of more devices than layers idle."""
    fastest = sorted(team, key=lambda device: (-problem.speeds[device], device))
    kept = set(fastest[: problem.num_layers])
    devices = [device for device in team if device in kept]
    counts = layers_for(problem, size, np.array(devices)[:, None], num_pipelines=num_teams)
    ends = pairwise(accumulate(counts, initial=0))
    return tuple(StageRun(d, a, b) for d, (a, b) in zip(devices, ends, strict=True))


def _split_at_boundaries(
    problem: Problem, runs: Sequence[Sequence[StageRun]], size: int
) -> StepSpec:
    """Return a step of the stages defined by all boundaries, with runs of stages, not of layers."""
    ends = sorted({run.end for team in runs for run in team})
    stage_at = {0: 0} | {end: number + 1 for number, end in enumerate(ends)}
    counts = [b - a for a, b in pairwise([0, *ends])]
    step = problem.step(counts, size, problem.job.sync, _recompute(problem, runs, size))
    cut = [
        tuple(StageRun(run.device, stage_at[run.first], stage_at[run.end]) for run in team)
        for team in runs
    ]
    return replace(step, replicas=tuple(Replica(runs=team, schedule=()) for team in cut))


def _recompute(problem: Problem, runs: Sequence[Sequence[StageRun]], size: int) -> tuple[bool, ...]:
    """Return which stages, defined by all boundaries, recompute: those that a team needs to."""
    recomputed: set[int] = set()
    for run in itertools.chain.from_iterable(runs):
        room = problem.memory_limits[run.device]
        needed = recompute_if_needed(problem, size, room, num_pipelines=len(runs))
        if needed[run.first, run.end]:
            recomputed |= set(range(run.first, run.end))
    ends = sorted({run.end for team in runs for run in team})
    return tuple(end - 1 in recomputed for end in ends)


def _climbed(outline: _Outline, outliner: _Outliner) -> _Outline:
    """Repeatedly apply the first change that improves the estimate."""
    looked_at, better = 0, True
    while better:
        better = False
        for teams in _changed(outline.teams, outliner.problem):
            looked_at += 1
            if looked_at > _MAX_OUTLINES:
                return outline
            changed = outliner.outline(teams)
            if changed is not None and changed.takes < outline.takes * (1 - 1e-6):
                outline, better = changed, True
                break
    return outline


def _changed(teams: Teams, problem: Problem) -> Iterator[Teams]:
    """Yield changes: move an end device to another team or out, add an idle one, drop a team."""
    used = {device for team in teams for device in team}
    for i, team in enumerate(teams):
        others = [*teams[:i], *teams[i + 1 :]]
        slowest = min(team, key=lambda device: problem.speeds[device])
        for device in dict.fromkeys((team[0], team[-1], slowest)):
            rest = tuple(d for d in team if d != device)
            if rest:
                yield (*others, rest)
                for j, other in enumerate(others):
                    kept = [*others[:j], *others[j + 1 :], rest]
                    yield (*kept, (*other, device))
                    yield (*kept, (device, *other))
        for device in sorted(set(range(problem.num_devices)) - used):
            yield (*others, (*team, device))
            yield (*others, (device, *team))
        if others and problem.job.num_pipelines is None:
            yield tuple(others)
            for j, other in enumerate(others):
                yield (*others[:j], *others[j + 1 :], (*other, *team))


def _plan(problem: Problem, outline: _Outline) -> Plan:
    ends = sorted({run.end for team in outline.runs for run in team})
    used = {run.device for team in outline.runs for run in team}

    def holder(team: Sequence[StageRun], end: int) -> int:
        return next(run.device for run in team if run.first < end <= run.end)

    devices = [[holder(team, end) for end in ends] for team in outline.runs]
    return assemble_plan(
        problem,
        outline.microbatch_size,
        tuple(b - a for a, b in pairwise([0, *ends])),
        zip(devices, outline.num_microbatches, strict=True),
        left_out=[device for device in range(problem.num_devices) if device not in used],
        recompute=_recompute(problem, outline.runs, outline.microbatch_size),
    )

"""Plan pipelines with unequal numbers of devices, each partitioned for its own devices.

Each pipeline has a team of near devices: those of an island (`Problem.islands`), or a stretch of a
row in which near ones are neighbours. Every team splits all layers over its devices by speed. The
boundaries of all teams together define the stages, so a device runs several stages where other
teams split more finely. Micro-batches are assigned to teams by speed. Then devices move between
teams, or out, while the estimate improves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from polyrhythm.cost.dtfm import PairTimes
from polyrhythm.cost.step import StageRun, StageWork, StepSpec, pipeline_times
from polyrhythm.cost.sync import ReplicaGroup, Sync, reduce_scatter_times
from polyrhythm.errors import PlanError
from polyrhythm.plan.construction import construct_layouts
from polyrhythm.plan.draft import assign_microbatches
from polyrhythm.plan.layout import distances
from polyrhythm.plan.partition import partition_layers
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.types import Seconds

Teams = tuple[tuple[int, ...], ...]  # devices of each pipeline, in the order of its stages

_MAX_TEAMS = 8
_NUM_CLIMBED = 2  # starts that are improved
_PROMISING, _NEAR = (
    1.3,
    1.05,
)  # multiples of the best estimate: limits for improving and for returning a plan
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
    for number, members in _island_teams(problem, row):
        if number <= num_microbatches and wanted in (None, number):
            yield members
    for number in range(1, most + 1):
        teams = _stretches(problem, row, number)
        if wanted in (None, number) and len(teams) == number:
            yield teams


def _island_teams(problem: Problem, row: list[int]) -> Iterator[tuple[int, Teams]]:
    for island in problem.islands:
        teams = [tuple(d for d in row if island[d] == number) for number in range(island.max() + 1)]
        yield len(teams), tuple(teams)


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
        self._partitioned: dict[tuple[int, ...], tuple[StageRun, ...] | None] = {}

    def outline(self, teams: Teams) -> _Outline | None:
        """Return layers and micro-batches for these teams; None if something does not fit."""
        runs = [self._runs(team) for team in teams]
        if not teams or len(teams) > self.count or any(run is None for run in runs):
            return None
        team_runs = tuple(run for run in runs if run is not None)
        problem, size = self.problem, self._size
        stages, cut = _split_at_boundaries(problem, team_runs, size)
        step = StepSpec(
            replicas=(),
            stages=stages,
            speeds=problem.speeds,
            links=problem.links,
            sync=Sync(problem.job.sync),
        )
        times = [pipeline_times(team, step) for team in cut]
        first, period = [each.first for each in times], [each.pace for each in times]
        numbers = assign_microbatches(self.count, first, period, even=False)
        groups = [
            ReplicaGroup(members=members, size=stage.gradient_bytes)
            for members, stage in zip(_members(cut), stages, strict=True)
        ]
        sync = 2 * max(reduce_scatter_times(groups, problem.links, step.sync))
        columns = max(f + (n - 1) * p for f, n, p in zip(first, numbers, period, strict=True))
        return _Outline(
            teams=teams,
            runs=team_runs,
            num_microbatches=numbers,
            microbatch_size=size,
            takes=columns + sync,
        )

    def _runs(self, team: tuple[int, ...]) -> tuple[StageRun, ...] | None:
        if team not in self._partitioned:
            try:
                self._partitioned[team] = (
                    _partitioned(self.problem, team, self._size) if team else None
                )
            except PlanError:
                self._partitioned[team] = None
        return self._partitioned[team]


def _members(cut: Sequence[Sequence[StageRun]]) -> Iterator[tuple[int, ...]]:
    """Return the devices of each stage."""
    holders = [[run.device for run in team for _ in range(run.first, run.end)] for team in cut]
    return zip(*holders, strict=True)


def _partitioned(problem: Problem, team: Sequence[int], size: int) -> tuple[StageRun, ...]:
    """Return the layers of each device of a team; the slowest of more devices than layers idle."""
    fastest = sorted(team, key=lambda device: (-problem.speeds[device], device))
    kept = set(fastest[: problem.num_layers])
    devices = [device for device in team if device in kept]
    layers = problem.layers(size)
    sizes = np.array([0.0, *(float(layer.activation_bytes) for layer in layers)])
    bandwidth = problem.links.bandwidth
    links = [min(bandwidth[a, b], bandwidth[b, a]) for a, b in pairwise(devices)]
    counts = partition_layers(
        [layer.forward + layer.backward for layer in layers],
        [1 / problem.speeds[device] for device in devices],
        transfers=np.array([sizes / link for link in links]),
        fits=problem.least_memory(size)[None, :, :]
        <= problem.memory_limits[devices][:, None, None],
    )
    ends = pairwise(accumulate(counts, initial=0))
    return tuple(StageRun(d, a, b) for d, (a, b) in zip(devices, ends, strict=True))


def _split_at_boundaries(
    problem: Problem, runs: Sequence[Sequence[StageRun]], size: int
) -> tuple[tuple[StageWork, ...], list[list[StageRun]]]:
    """Return the stages defined by all boundaries, and the runs in stages instead of layers."""
    ends = sorted({run.end for team in runs for run in team})
    stage_at = {0: 0} | {end: number + 1 for number, end in enumerate(ends)}
    counts = [b - a for a, b in pairwise([0, *ends])]
    cut = [
        [StageRun(run.device, stage_at[run.first], stage_at[run.end]) for run in team]
        for team in runs
    ]
    return problem.stages(counts, size), cut


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
    names = [device.name for device in problem.cluster.devices]
    ends = sorted({run.end for team in outline.runs for run in team})
    used = {run.device for team in outline.runs for run in team}

    def holder(team: Sequence[StageRun], end: int) -> str:
        return names[next(run.device for run in team if run.first < end <= run.end)]

    return Plan(
        layers_per_stage=tuple(b - a for a, b in pairwise([0, *ends])),
        pipelines=tuple(
            PipelinePlan(
                devices=tuple(holder(team, end) for end in ends),
                num_microbatches=number,
                schedule=problem.job.schedule,
            )
            for team, number in zip(outline.runs, outline.num_microbatches, strict=True)
        ),
        microbatch_size=outline.microbatch_size,
        sync=problem.job.sync,
        cluster=problem.cluster.name,
        model=problem.profile.name,
        left_out=tuple(name for index, name in enumerate(names) if index not in used),
    )

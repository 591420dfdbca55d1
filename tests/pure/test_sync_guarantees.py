"""The guarantees of groups hold in pipelines under a scheduler with failing averages, by the log.

Groups of one stage, in the order they are formed: the last P connect all workers (`adaptive`), and
none misses more than `max_age` updates of a worker (`age`), unless the reason says that this is
waived. A failed group connects no workers, and spreads no updates.
"""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.sync.members import Limits
from polyrhythm.sync.modes import make_policies
from polyrhythm.sync.policies.random_groups import RandomGroups
from polyrhythm.sync.protocol import Abort, Assign, Commit, Leave, Ready, Skip
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Worker
from tests.pure.policy_driver import connected, job_of, random_durations, workers
from tests.pure.scheduler_grid import Grid, random_times, seeds

SHAPE = (3, 4)
LAST_GROUPS, MAX_AGE = 3, 1


def run_of(name: str, seed: int) -> Grid:
    """A run in which a tenth of the members fail."""
    options: dict[str, object] = {"window": 0.5}
    options |= {"last_groups": LAST_GROUPS} if name == "adaptive" else {"max_age": MAX_AGE}
    policies = make_policies(
        name, num_stages=SHAPE[0], num_pipelines=SHAPE[1], lease=20.0, options=options
    )
    scheduler = Scheduler(policies, SHAPE[1], limits=Limits(ceiling=10.0))
    grid = Grid(scheduler, *SHAPE, 20, random_times(seed), seed, failure_probability=0.1)
    return grid.run()


class StageGroup:
    """A group of one stage."""

    def __init__(self, members: tuple[Worker, ...], why: str) -> None:
        self.pipelines = {worker.pipeline for worker in members}
        self.waived = why.startswith("waived")
        self.failed = False


def groups_as_formed(grid: Grid, stage: int) -> Iterator[list[StageGroup]]:
    """Yield all groups so far at each new one, until the first worker leaves."""
    history: list[StageGroup] = []
    by_gid: dict[int, StageGroup] = {}
    for event, commands in grid.log:
        if isinstance(event, Leave):
            return
        for command in commands:
            if isinstance(command, Abort) and command.gid in by_gid:
                by_gid[command.gid].failed = True
            if isinstance(command, Assign) and command.members[0].stage == stage:
                history.append(StageGroup(command.members, command.why))
                by_gid[command.gid] = history[-1]
                yield history
            is_alone = isinstance(command, Skip) and not command.failed
            if is_alone and command.worker.stage == stage:
                history.append(StageGroup((command.worker,), command.why))
                yield history


@pytest.mark.parametrize("stage", range(SHAPE[0]))
@given(seed=seeds)
@settings(max_examples=15)
def test_the_last_groups_of_every_stage_connect_all_unless_waived(stage: int, seed: int) -> None:
    all_pipelines = set(range(SHAPE[1]))
    for history in groups_as_formed(run_of("adaptive", seed), stage):
        window = history[-LAST_GROUPS:]
        cliques = [set() if group.failed else group.pipelines for group in window]
        if len(window) == LAST_GROUPS and not history[-1].waived:
            assert connected(cliques, all_pipelines)


class ModelContents:
    """The number of updates of each worker of a stage that each model contains."""

    def __init__(self, num_pipelines: int) -> None:
        self.clock = [0] * num_pipelines
        self.seen = [[0] * num_pipelines for _ in range(num_pipelines)]
        self.again: set[int] = set()  # their group failed: they offer the same update again

    def form(self, pipelines: set[int], *, waived: bool) -> list[int]:
        """The updates that the average of a group will contain."""
        for pipeline in pipelines & self.again:
            self.offer(pipeline)
        self.again -= pipelines
        for pipeline in pipelines:
            self.seen[pipeline] = [*self.seen[pipeline]]
            self.seen[pipeline][pipeline] = self.clock[pipeline]
        average = [max(known) for known in zip(*(self.seen[p] for p in pipelines), strict=True)]
        ages = [now - known for now, known in zip(self.clock, average, strict=True)]
        assert waived or max(ages) <= MAX_AGE
        return average

    def offer(self, pipeline: int) -> None:
        self.clock[pipeline] += 1

    def fail(self, pipelines: set[int]) -> None:
        for pipeline in pipelines:
            self.clock[pipeline] -= 1
        self.again |= pipelines


@pytest.mark.parametrize("stage", range(SHAPE[0]))
@given(seed=seeds)
@settings(max_examples=15)
def test_age_bound_holds_at_every_stage_unless_waived(stage: int, seed: int) -> None:
    models, open_groups = ModelContents(SHAPE[1]), dict[int, tuple[set[int], list[int]]]()
    for event, commands in run_of("age", seed).log:
        if isinstance(event, Leave):
            return
        if isinstance(event, Ready) and event.worker.stage == stage:
            models.offer(event.worker.pipeline)
        for command in commands:
            if isinstance(command, Assign) and command.members[0].stage == stage:
                group = StageGroup(command.members, command.why)
                average = models.form(group.pipelines, waived=group.waived)
                open_groups[command.gid] = group.pipelines, average
            elif isinstance(command, Commit | Abort) and command.gid in open_groups:
                pipelines, average = open_groups.pop(command.gid)
                if isinstance(command, Abort):
                    models.fail(pipelines)
                else:
                    models.seen = [
                        average if pipeline in pipelines else seen
                        for pipeline, seen in enumerate(models.seen)
                    ]
            elif isinstance(command, Skip) and command.worker.stage == stage:
                pipeline = command.worker.pipeline
                if command.failed:
                    models.again.discard(pipeline)  # its update is part of the next one
                else:
                    alone = StageGroup((command.worker,), command.why)
                    models.seen[pipeline] = models.form(alone.pipelines, waived=alone.waived)
        for pipeline in models.again:
            models.offer(pipeline)
        models.again.clear()


@pytest.mark.parametrize("name", ["adaptive", "age"])
def test_runs_contain_failures_and_enforced_groups(name: str) -> None:
    counters: Counter[str] = Counter()
    for seed in range(5):
        scheduler = run_of(name, seed).scheduler
        counters += scheduler.counters
        for policy in scheduler.policies:
            counters += policy.counters
    assert min(counters[kind] for kind in ("aborted", "committed", "window", "enforced")) > 10


@given(num_workers=st.integers(2, 7), seed=seeds)
@settings(max_examples=20)
def test_random_groups_of_two_are_a_matching_as_in_ad_psgd(num_workers: int, seed: int) -> None:
    """At any time pairs of workers average, no worker is in two of them, and none is left out."""
    job = job_of(
        RandomGroups(2, seed=seed), [0] * num_workers, random_durations(seed), num_steps=12
    )
    job.run()  # checks that no worker is in two groups at once
    groups = [group.members for _, group in job.formed[: 2 * num_workers]]  # before one leaves
    assert {len(members) for members in groups} == {2}
    assert {worker for members in groups for worker in members} == set(workers(num_workers))

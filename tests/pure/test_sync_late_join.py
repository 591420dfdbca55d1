"""A late joiner takes part from its first step on; in lockstep, at all stages after one step."""

from collections.abc import Callable

from polyrhythm.sync.policies.all_reduce import AllReduce
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.protocol import (
    Assign,
    AverageAll,
    Command,
    CopyFrom,
    Dead,
    Done,
    Join,
    Ready,
    Skip,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Group, Seconds, Worker

NEW = 2  # the pipeline that joins late


class AverageWithAllPresent(Policy):
    """A ready worker averages with all present workers, ready or not."""

    def __init__(self) -> None:
        self.present: set[Worker] = set()

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self.present.add(worker)
        return []

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        return [Group(tuple(sorted(self.present)), "all present workers")]


def running_scheduler(
    num_stages: int,
    policy: Callable[[], Policy] = lambda: AllReduce(2),
    *,
    waits_for_all: bool = True,
) -> Scheduler:
    """A scheduler with two pipelines that have finished a step; a third one may join."""
    policies = [policy() for _ in range(num_stages)]
    scheduler = Scheduler(policies, 3, waits_for_all=waits_for_all)
    for stage in range(num_stages):
        for pipeline in (0, 1):
            scheduler.step(Join(Worker(stage, pipeline), "node", 1, 0, now=0.0))
    return scheduler


def join_new_pipeline(scheduler: Scheduler) -> list[CopyFrom]:
    """Let the new pipeline join; return its CopyFrom commands."""
    stages = range(len(scheduler.policies))
    joins = [Join(Worker(stage, NEW), "node", 0, 1, now=2.0) for stage in stages]
    commands = [command for join in joins for command in scheduler.step(join)]
    assert all(isinstance(command, CopyFrom) for command in commands)
    return [command for command in commands if isinstance(command, CopyFrom)]


def report_ready(scheduler: Scheduler, stage: int, pipeline: int, clock: int) -> list[list[int]]:
    """Report a worker as ready; return the pipelines of the assigned groups."""
    event = Ready(Worker(stage, pipeline), clock, int(pipeline == NEW), now=3.0)
    return averaged(scheduler.step(event))


def averaged(commands: list[Command]) -> list[list[int]]:
    return [[w.pipeline for w in c.members] for c in commands if isinstance(c, Assign)]


def done(scheduler: Scheduler, stage: int, pipelines: list[int]) -> None:
    """Send Done for all members of the open group of a stage."""
    workers = [Worker(stage, pipeline) for pipeline in pipelines]
    (gid,) = {scheduler.membership.members[worker].queue[0].gid for worker in workers}
    for worker in workers:
        scheduler.step(Done(worker, gid, True, int(worker.pipeline == NEW), now=3.0))


def step(scheduler: Scheduler, stage: int, clock: int) -> None:
    """Run a step of the first two pipelines without the third."""
    assert report_ready(scheduler, stage, 0, clock) == []
    assert report_ready(scheduler, stage, 1, clock) == [[0, 1]]
    done(scheduler, stage, [0, 1])


def check_waits_for_new(scheduler: Scheduler, stage: int, clock: int) -> None:
    assert (
        report_ready(scheduler, stage, 0, clock) == report_ready(scheduler, stage, 1, clock) == []
    )
    assert report_ready(scheduler, stage, NEW, clock) == [[0, 1, NEW]]


def test_model_averaging_does_not_wait_for_a_copying_worker() -> None:
    scheduler = running_scheduler(2, waits_for_all=False)
    assert {copy_from.clock for copy_from in join_new_pipeline(scheduler)} == {-1}
    for clock in (2, 3):
        step(scheduler, 0, clock)
    assert report_ready(scheduler, 1, NEW, 2) == []  # all its stages have copied
    assert (
        report_ready(scheduler, 0, 0, 4)
        == report_ready(scheduler, 0, 1, 4)
        == report_ready(scheduler, 1, 0, 4)
        == []
    )
    assert report_ready(scheduler, 1, 1, 4) == [[0, 1, NEW]]


def test_copying_worker_is_in_no_group() -> None:
    scheduler = running_scheduler(1, AverageWithAllPresent, waits_for_all=False)
    join_new_pipeline(scheduler)
    assert report_ready(scheduler, 0, 0, 2) == [[0, 1]]
    done(scheduler, 0, [0, 1])
    assert report_ready(scheduler, 0, NEW, 2) == [[0, 1, NEW]]


def test_lockstep_late_join_starts_after_an_unfinished_step() -> None:
    scheduler = running_scheduler(2)
    assert report_ready(scheduler, 1, 0, 2) == []  # the most advanced stage of the source
    assert {
        (copy_from.source.pipeline, copy_from.clock) for copy_from in join_new_pipeline(scheduler)
    } == {(0, 2)}
    assert report_ready(scheduler, 1, 1, 2) == [[0, 1]]
    done(scheduler, 1, [0, 1])
    step(scheduler, 0, 2)
    for stage in (1, 0):
        check_waits_for_new(scheduler, stage, 3)


def test_lockstep_late_join_is_immediate_if_the_step_has_ended() -> None:
    scheduler = running_scheduler(2)
    step(scheduler, 1, 2)
    assert {copy_from.clock for copy_from in join_new_pipeline(scheduler)} == {2}
    check_waits_for_new(scheduler, 1, 3)
    step(scheduler, 0, 2)
    check_waits_for_new(scheduler, 0, 3)


def test_retried_group_does_not_include_the_late_joiner() -> None:
    scheduler = running_scheduler(1)
    report_ready(scheduler, 0, 0, 2)
    report_ready(scheduler, 0, 1, 2)
    join_new_pipeline(scheduler)
    gid = scheduler.membership.members[Worker(0, 0)].queue[0].gid
    assert averaged(scheduler.step(Done(Worker(0, 0), gid, False, 0, now=4.0))) == [[0, 1]]
    done(scheduler, 0, [0, 1])
    check_waits_for_new(scheduler, 0, 3)


def test_late_joiner_copies_from_another_source_if_its_source_dies() -> None:
    scheduler = running_scheduler(2)
    step(scheduler, 1, 2)
    join_new_pipeline(scheduler)  # it has joined at stage 1, and copies from pipeline 0
    assert report_ready(scheduler, 0, 1, 2) == report_ready(scheduler, 1, 1, 3) == []
    commands = scheduler.step(Dead(Worker(0, 0), now=3.0))
    copies = [command for command in commands if isinstance(command, CopyFrom)]
    assert {(copy_from.source.pipeline, copy_from.clock) for copy_from in copies} == {(1, 3)}
    assert len(copies) == 2
    alone = [(c.worker, c.clock) for c in commands if isinstance(c, Skip) and not c.failed]
    assert alone == [(Worker(0, 1), 2), (Worker(1, 1), 3)]  # they do not wait for the new one
    for stage, clock in ((1, 4), (0, 3)):
        assert report_ready(scheduler, stage, 1, clock) == []
    end = scheduler.membership.members[Worker(0, 1)].step_end
    assert isinstance(end, Skip)
    assert end.clock == 3
    assert report_ready(scheduler, 0, 1, 4) == []  # now it waits, at both stages
    assert report_ready(scheduler, 0, NEW, 4) == report_ready(scheduler, 1, NEW, 4) == [[1, NEW]]


def test_death_of_a_late_joiner_delays_nobody() -> None:
    scheduler = running_scheduler(2)
    step(scheduler, 1, 2)
    join_new_pipeline(scheduler)
    scheduler.step(Dead(Worker(0, NEW), 1, now=3.0))
    step(scheduler, 0, 2)
    for stage in (0, 1):
        step(scheduler, stage, 3)
        assert not scheduler.membership.members[Worker(stage, NEW)].has_joined


def test_late_joiner_without_a_source_starts_at_once() -> None:
    scheduler = running_scheduler(1)
    for pipeline in (0, 1):
        scheduler.step(Dead(Worker(0, pipeline), now=1.0))
    assert join_new_pipeline(scheduler) == []
    (skip,) = scheduler.step(Ready(Worker(0, NEW), 1, 1, now=3.0))
    assert isinstance(skip, Skip)


def test_average_all_does_not_wait_for_a_copying_worker() -> None:
    scheduler = running_scheduler(1, waits_for_all=False)
    join_new_pipeline(scheduler)
    assert scheduler.step(AverageAll(Worker(0, 0), 1, 0, now=4.0)) == []
    assert averaged(scheduler.step(AverageAll(Worker(0, 1), 1, 0, now=4.0))) == [[0, 1]]

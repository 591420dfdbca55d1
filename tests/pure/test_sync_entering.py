"""Who comes late counts from its first step on; in lockstep, at all its stages after one step."""

from collections.abc import Callable

from polyrhythm.sync.all_reduce import AllReduce
from polyrhythm.sync.messages import (
    Assign,
    Command,
    Dead,
    Done,
    Gather,
    Heal,
    Join,
    Ready,
    Skip,
)
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Group, Seconds, Worker

NEW = 2  # the pipeline that comes late


class Patient(AllReduce):
    """Waits for all, and averages models."""

    lockstep = False


class Sociable(Policy):
    """Whoever is ready averages with all that are here, ready or not."""

    def __init__(self) -> None:
        self.here: set[Worker] = set()

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self.here.add(worker)
        return []

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        return [Group(tuple(sorted(self.here)), "all that are here")]


def begun(num_stages: int, policy: Callable[[], Policy] = lambda: AllReduce(2)) -> Scheduler:
    """Two pipelines that have made a step; a third one may come."""
    scheduler = Scheduler([policy() for _ in range(num_stages)], 3)
    for stage in range(num_stages):
        for pipeline in (0, 1):
            scheduler.step(Join(Worker(stage, pipeline), "node", 1, 0, now=0.0))
    return scheduler


def come(scheduler: Scheduler) -> list[Heal]:
    """The new pipeline; whom it is to copy from."""
    stages = range(len(scheduler.policies))
    joins = [Join(Worker(stage, NEW), "node", 0, 1, now=2.0) for stage in stages]
    commands = [command for join in joins for command in scheduler.step(join)]
    assert all(isinstance(command, Heal) for command in commands)
    return [command for command in commands if isinstance(command, Heal)]


def say(scheduler: Scheduler, stage: int, pipeline: int, clock: int) -> list[list[int]]:
    """Who is assigned to a group by a worker's being ready."""
    event = Ready(Worker(stage, pipeline), clock, int(pipeline == NEW), now=3.0)
    return averaged(scheduler.step(event))


def averaged(commands: list[Command]) -> list[list[int]]:
    return [[w.pipeline for w in c.members] for c in commands if isinstance(c, Assign)]


def done(scheduler: Scheduler, stage: int, pipelines: list[int]) -> None:
    """All members of the group of a stage that is open."""
    workers = [Worker(stage, pipeline) for pipeline in pipelines]
    (gid,) = {scheduler.membership.members[worker].line[0].gid for worker in workers}
    for worker in workers:
        scheduler.step(Done(worker, gid, True, int(worker.pipeline == NEW), now=3.0))


def step(scheduler: Scheduler, stage: int, clock: int) -> None:
    """The two that were there make a step without the third."""
    assert say(scheduler, stage, 0, clock) == []
    assert say(scheduler, stage, 1, clock) == [[0, 1]]
    done(scheduler, stage, [0, 1])


def waits_for_new(scheduler: Scheduler, stage: int, clock: int) -> None:
    assert say(scheduler, stage, 0, clock) == say(scheduler, stage, 1, clock) == []
    assert say(scheduler, stage, NEW, clock) == [[0, 1, NEW]]


def test_where_models_are_averaged_nobody_waits_for_one_that_copies() -> None:
    scheduler = begun(2, lambda: Patient(2))
    assert {heal.clock for heal in come(scheduler)} == {-1}
    for clock in (2, 3):
        step(scheduler, 0, clock)
    assert say(scheduler, 1, NEW, 2) == []  # all its stages have copied by then
    assert say(scheduler, 0, 0, 4) == say(scheduler, 0, 1, 4) == say(scheduler, 1, 0, 4) == []
    assert say(scheduler, 1, 1, 4) == [[0, 1, NEW]]


def test_nobody_averages_with_one_that_copies() -> None:
    scheduler = begun(1, Sociable)
    come(scheduler)
    assert say(scheduler, 0, 0, 2) == [[0, 1]]
    done(scheduler, 0, [0, 1])
    assert say(scheduler, 0, NEW, 2) == [[0, 1, NEW]]


def test_in_lockstep_it_enters_after_a_step_that_nobody_had_begun_to_end() -> None:
    scheduler = begun(2)
    assert say(scheduler, 1, 0, 2) == []  # of the pipeline that is copied from, the furthest
    assert {(heal.source.pipeline, heal.clock) for heal in come(scheduler)} == {(0, 2)}
    assert say(scheduler, 1, 1, 2) == [[0, 1]]
    done(scheduler, 1, [0, 1])
    step(scheduler, 0, 2)
    for stage in (1, 0):
        waits_for_new(scheduler, stage, 3)


def test_where_that_step_has_ended_it_enters_at_once() -> None:
    scheduler = begun(2)
    step(scheduler, 1, 2)
    assert {heal.clock for heal in come(scheduler)} == {2}
    waits_for_new(scheduler, 1, 3)
    step(scheduler, 0, 2)
    waits_for_new(scheduler, 0, 3)


def test_a_group_that_is_given_up_before_is_made_again_without_it() -> None:
    scheduler = begun(1)
    say(scheduler, 0, 0, 2)
    say(scheduler, 0, 1, 2)
    come(scheduler)
    gid = scheduler.membership.members[Worker(0, 0)].line[0].gid
    assert averaged(scheduler.step(Done(Worker(0, 0), gid, False, 0, now=4.0))) == [[0, 1]]
    done(scheduler, 0, [0, 1])
    waits_for_new(scheduler, 0, 3)


def test_if_its_source_dies_it_enters_anew_after_a_step_of_another_one() -> None:
    scheduler = begun(2)
    step(scheduler, 1, 2)
    come(scheduler)  # it has entered at stage 1, and copies from pipeline 0
    assert say(scheduler, 0, 1, 2) == say(scheduler, 1, 1, 3) == []
    commands = scheduler.step(Dead(Worker(0, 0), now=3.0))
    heals = [command for command in commands if isinstance(command, Heal)]
    assert {(heal.source.pipeline, heal.clock) for heal in heals} == {(1, 3)}
    assert len(heals) == 2
    alone = [(c.worker, c.clock) for c in commands if isinstance(c, Skip) and not c.failed]
    assert alone == [(Worker(0, 1), 2), (Worker(1, 1), 3)]  # nobody waits for the new one there
    for stage, clock in ((1, 4), (0, 3)):
        found = say(scheduler, stage, 1, clock)
        assert found == []
    end = scheduler.membership.members[Worker(0, 1)].step_end
    assert isinstance(end, Skip)
    assert end.clock == 3
    assert say(scheduler, 0, 1, 4) == []  # now it waits, at both stages
    assert say(scheduler, 0, NEW, 4) == say(scheduler, 1, NEW, 4) == [[1, NEW]]


def test_one_that_dies_before_it_has_entered_is_not_missed() -> None:
    scheduler = begun(2)
    step(scheduler, 1, 2)
    come(scheduler)
    scheduler.step(Dead(Worker(0, NEW), 1, now=3.0))
    step(scheduler, 0, 2)
    for stage in (0, 1):
        step(scheduler, stage, 3)
        assert not scheduler.membership.members[Worker(stage, NEW)].has_entered


def test_with_nobody_to_copy_from_it_goes_on_at_once() -> None:
    scheduler = begun(1)
    for pipeline in (0, 1):
        scheduler.step(Dead(Worker(0, pipeline), now=1.0))
    assert come(scheduler) == []
    (skip,) = scheduler.step(Ready(Worker(0, NEW), 1, 1, now=3.0))
    assert isinstance(skip, Skip)


def test_whoever_gathers_does_not_wait_for_one_that_copies() -> None:
    scheduler = begun(1, lambda: Patient(2))
    come(scheduler)
    assert scheduler.step(Gather(Worker(0, 0), 1, 0, now=4.0)) == []
    assert averaged(scheduler.step(Gather(Worker(0, 1), 1, 0, now=4.0))) == [[0, 1]]

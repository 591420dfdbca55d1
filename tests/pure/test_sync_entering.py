"""Who comes late counts from its first step on, and all its stages with the same one."""

from collections.abc import Sequence

import pytest

from polyrhythm.sync.all_reduce import AllReduce
from polyrhythm.sync.messages import Assign, Command, Dead, Done, Heal, Join, Ready, Skip
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.registry import make_policies
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Worker

NEW = 2  # the pipeline that comes late


def begun(num_stages: int, policies: Sequence[Policy] = ()) -> Scheduler:
    """Two pipelines that have made a step, and a third one that is told to copy."""
    scheduler = Scheduler(policies or [AllReduce(2) for _ in range(num_stages)], 3)
    stages = range(num_stages)
    for worker in [Worker(stage, pipeline) for stage in stages for pipeline in (0, 1)]:
        scheduler.step(Join(worker, "node", 1, 0, now=0.0))
    new = [Join(Worker(stage, NEW), "node", 0, 1, now=2.0) for stage in stages]
    heals = [command for join in new for command in scheduler.step(join)]
    assert [type(heal) for heal in heals] == [Heal] * num_stages
    return scheduler


def say(scheduler: Scheduler, stage: int, pipeline: int, clock: int) -> list[Command]:
    return scheduler.step(Ready(Worker(stage, pipeline), clock, int(pipeline == NEW), now=3.0))


def done(scheduler: Scheduler, stage: int, pipelines: list[int]) -> None:
    """All members of the group of a stage that is open."""
    workers = [Worker(stage, pipeline) for pipeline in pipelines]
    (gid,) = {scheduler.membership.members[worker].line[0].gid for worker in workers}
    for worker in workers:
        scheduler.step(Done(worker, gid, True, int(worker.pipeline == NEW), now=3.0))


def averaged(commands: list[Command]) -> list[list[int]]:
    return [[w.pipeline for w in c.members] for c in commands if isinstance(c, Assign)]


def step(scheduler: Scheduler, stage: int, clock: int) -> None:
    """The two that were there make a step without the third."""
    assert say(scheduler, stage, 0, clock) == []
    assert averaged(say(scheduler, stage, 1, clock)) == [[0, 1]]
    done(scheduler, stage, [0, 1])


def test_nobody_waits_for_one_that_copies() -> None:
    scheduler = begun(1)
    step(scheduler, 0, 2)
    step(scheduler, 0, 3)


@pytest.mark.parametrize("policy", ["random", "smart"])
def test_nobody_averages_with_one_that_copies(policy: str) -> None:
    """These draw groups among all who are there, also of those who do not wait."""
    scheduler = begun(1, make_policies(policy, num_stages=1, num_pipelines=3))
    for clock in range(2, 30):
        formed = say(scheduler, 0, 0, clock) + say(scheduler, 0, 1, clock)
        for assign in (c for c in formed if isinstance(c, Assign)):
            pipelines = [worker.pipeline for worker in assign.members]
            assert NEW not in pipelines
            done(scheduler, 0, pipelines)


def test_the_first_stage_that_is_ready_fixes_the_step_for_all() -> None:
    scheduler = begun(2)
    step(scheduler, 1, 2)  # the last stage is a step ahead, as it is in a pipeline
    assert say(scheduler, 1, NEW, 2) == []  # it will go with step 3
    assert say(scheduler, 0, NEW, 2) == []  # where step 2 is not over yet
    step(scheduler, 0, 2)
    assert say(scheduler, 0, 0, 3) == say(scheduler, 1, 0, 3) == []
    assert averaged(say(scheduler, 0, 1, 3)) == [[0, 1, NEW]]
    assert averaged(say(scheduler, 1, 1, 3)) == [[0, 1, NEW]]


def test_the_others_wait_at_each_stage_once_the_step_is_fixed() -> None:
    scheduler = begun(2)
    assert say(scheduler, 1, NEW, 2) == []
    for stage in (0, 1):
        assert say(scheduler, stage, 0, 2) == []
    assert averaged(say(scheduler, 1, 1, 2)) == [[0, 1, NEW]]
    assert say(scheduler, 0, 1, 2) == []
    assert averaged(say(scheduler, 0, NEW, 2)) == [[0, 1, NEW]]


def test_a_group_that_is_on_its_way_has_not_counted_on_it() -> None:
    scheduler = begun(1)
    say(scheduler, 0, 0, 2)
    assert averaged(say(scheduler, 0, 1, 2)) == [[0, 1]]
    assert say(scheduler, 0, NEW, 2) == []
    done(scheduler, 0, [0, 1])
    assert say(scheduler, 0, 0, 3) == []
    assert averaged(say(scheduler, 0, 1, 3)) == [[0, 1, NEW]]


def test_a_group_that_is_given_up_is_made_again_without_it() -> None:
    scheduler = begun(1)
    say(scheduler, 0, 0, 2)
    (assign,) = say(scheduler, 0, 1, 2)
    assert isinstance(assign, Assign)
    assert say(scheduler, 0, NEW, 2) == []
    again = scheduler.step(Done(Worker(0, 0), assign.gid, False, 0, now=4.0))
    assert averaged(again) == [[0, 1]]


def test_a_stage_where_the_others_are_ahead_goes_on_alone_once() -> None:
    """Its first word came from a stage where the others were not as far."""
    scheduler = begun(2)
    step(scheduler, 1, 2)
    assert say(scheduler, 0, NEW, 2) == []  # fixes step 2
    (skip,) = say(scheduler, 1, NEW, 2)
    assert isinstance(skip, Skip)
    assert "the others are ahead" in skip.why
    assert say(scheduler, 0, 0, 2) == []
    assert averaged(say(scheduler, 0, 1, 2)) == [[0, 1, NEW]]
    assert say(scheduler, 1, NEW, 3) == say(scheduler, 1, 0, 3) == []
    assert averaged(say(scheduler, 1, 1, 3)) == [[0, 1, NEW]]


def test_one_that_dies_before_it_has_entered_is_not_missed() -> None:
    scheduler = begun(2)
    step(scheduler, 1, 2)
    say(scheduler, 1, NEW, 2)
    say(scheduler, 0, NEW, 2)
    scheduler.step(Dead(Worker(0, NEW), 1, now=3.0))
    step(scheduler, 0, 2)
    for stage in (0, 1):
        step(scheduler, stage, 3)


def test_with_nobody_left_it_goes_on_at_once() -> None:
    scheduler = begun(2)
    say(scheduler, 1, 0, 2)
    say(scheduler, 1, 1, 2)
    say(scheduler, 1, NEW, 2)  # waits for that group to end
    for pipeline in (0, 1):
        scheduler.step(Dead(Worker(0, pipeline), now=3.0))
    end = scheduler.membership.members[Worker(1, NEW)].step_end
    assert isinstance(end, Skip)
    assert end.clock == 2

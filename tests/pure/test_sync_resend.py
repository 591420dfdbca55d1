"""Lost commands are sent again on request: the end of a step, or the end of a group."""

import pytest

from polyrhythm.sync.members import Limits
from polyrhythm.sync.policies.pairwise import Pairwise
from polyrhythm.sync.protocol import Abort, AverageAll, Commit, Done, Join, Ready, Request, Skip
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Worker

A, B = Worker(0, 0), Worker(0, 1)  # the active worker, and the passive one


@pytest.fixture
def scheduler() -> Scheduler:
    scheduler = Scheduler([Pairwise()], 2, limits=Limits(max_retries=0))
    for worker in (A, B):
        scheduler.step(Join(worker, "node", 0))
    return scheduler


def test_repeated_ready_is_answered_with_its_step_end_after_another_exchange(
    scheduler: Scheduler,
) -> None:
    (skip,) = scheduler.step(Ready(B, 1, now=1.0))  # lost
    assert isinstance(skip, Skip)
    (assign,) = scheduler.step(Ready(A, 1, now=2.0))
    assert assign.members == (A, B)
    assert scheduler.step(Ready(B, 1, now=3.0)) == [skip]
    scheduler.step(Done(B, assign.gid, True, now=4.0))
    (commit,) = scheduler.step(Done(A, assign.gid, True, now=4.0))
    assert commit == Commit(assign.gid, (A, B), (1, -1))
    assert scheduler.step(Ready(B, 1, now=5.0)) == [skip]
    assert scheduler.step(Ready(A, 1, now=5.0)) == [commit]


@pytest.mark.parametrize("ok", [True, False])
def test_repeated_done_is_answered_with_its_group_end_after_another_step(
    scheduler: Scheduler, ok: bool
) -> None:
    (assign,) = scheduler.step(Ready(A, 1, now=1.0))
    scheduler.step(Done(B, assign.gid, True, now=2.0))
    end = scheduler.step(Done(A, assign.gid, ok, now=2.0))[0]  # lost on the way to B
    assert isinstance(end, Commit if ok else Abort)
    assert isinstance(scheduler.step(Ready(B, 1, now=3.0))[0], Skip)
    assert scheduler.step(Done(B, assign.gid, True, now=4.0)) == [end]
    assert scheduler.step(Ready(A, 2, now=5.0))[0].members == (A, B)  # another one is open
    assert scheduler.step(Done(B, assign.gid, True, now=6.0)) == [end]


def test_done_crossing_an_abort_is_answered_only_when_repeated(
    scheduler: Scheduler,
) -> None:
    """Else each failure of a group of n would send n Aborts to all n members."""
    (assign,) = scheduler.step(Ready(A, 1, now=1.0))
    abort, _ = scheduler.step(Done(A, assign.gid, False, now=2.0))
    assert scheduler.step(Done(B, assign.gid, True, now=2.0)) == []
    assert scheduler.step(Done(B, assign.gid, True, now=3.0)) == [abort]
    assert scheduler.step(Done(A, assign.gid, False, now=3.0)) == [abort]


def test_repeated_ready_is_answered_with_the_current_group_only(
    scheduler: Scheduler,
) -> None:
    (assign,) = scheduler.step(Ready(A, 1, now=1.0))
    assert scheduler.step(Ready(A, 1, now=1.0)) == [assign]
    for worker in (A, B):
        scheduler.step(Done(worker, assign.gid, True, now=2.0))
    scheduler.step(Join(B, "node", 1, 1, now=3.0))  # B restarts
    assert scheduler.step(AverageAll(A, 2, now=4.0)) == []
    assert scheduler.step(AverageAll(A, 2, now=5.0)) == []


def test_pending_average_all_is_not_answered_with_the_previous_step(
    scheduler: Scheduler,
) -> None:
    assert isinstance(scheduler.step(Ready(B, 1, now=1.0))[0], Skip)
    (assign,) = scheduler.step(Ready(A, 1, now=2.0))
    assert scheduler.step(AverageAll(B, 1, now=3.0)) == []  # its exchange with A ends first
    assert scheduler.step(AverageAll(B, 1, now=3.0)) == []
    scheduler.step(Done(B, assign.gid, True, now=4.0))
    assert scheduler.step(Done(A, assign.gid, True, now=4.0)) != []


def test_a_request_is_not_answered(scheduler: Scheduler) -> None:
    scheduler.step(Ready(B, 1, now=1.0))
    assert scheduler.step(Request(B, 2, now=1.0)) == scheduler.step(Request(B, 2, now=1.0)) == []

"""The scheduler's protocol: commit or abort for all, in one order, despite duplicate messages."""

import math

import pytest

from polyrhythm.errors import PolicyError
from polyrhythm.sync.members import Limits
from polyrhythm.sync.policies.all_reduce import AllReduce
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.protocol import (
    Abort,
    Assign,
    Commit,
    Dead,
    Done,
    Join,
    Ready,
    Refuse,
    Request,
    Skip,
    Timer,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Group, Seconds, Worker
from tests.pure.scheduler_cases import LIMITS, A, B, C, ScriptedPolicy, ready, scheduler_of


def test_a_cycle_is_ready_assign_done_commit() -> None:
    scheduler = scheduler_of()
    assert ready(scheduler, A) == []
    (assign,) = ready(scheduler, B)
    assert assign == Assign(1, 2, (A, B), (0, 0), 10.0, "all are ready")
    assert scheduler.step(Done(A, 1, True, now=2.0)) == []
    assert scheduler.step(Done(B, 1, True, now=2.5)) == [Commit(1, (A, B), (1, 1))]
    assert ready(scheduler, A, clock=2, now=3.0) == []
    assert ready(scheduler, B, clock=2, now=3.0)[0].gid == 2
    assert scheduler.counters == {"committed": 1}


def test_one_failure_aborts_the_group_and_ready_members_regroup() -> None:
    scheduler = scheduler_of()
    ready(scheduler, A, B)
    scheduler.step(Done(A, 1, True, now=2.0))
    abort, assign = scheduler.step(Done(B, 1, False, now=2.5))
    assert abort == Abort(1, (A, B), "s0p1 failed")
    assert isinstance(assign, Assign)
    assert (assign.gid, assign.members) == (2, (A, B))
    # The second failure exceeds max_retries: they skip the average.
    abort, *skips = scheduler.step(Done(A, 2, False, now=3.0))
    assert abort == Abort(2, (A, B), "s0p0 failed")
    why = "2 groups failed, the last one: s0p0 failed"
    assert skips == [Skip(A, 1, why, True), Skip(B, 1, why, True)]
    # A new step starts a new count.
    assert ready(scheduler, A, B, clock=2, now=4.0)[0].gid == 3


def test_timed_out_group_is_aborted_and_names_missing_members() -> None:
    scheduler = scheduler_of()
    ready(scheduler, A, B, now=1.0)
    assert scheduler.next_timer() == 11.0
    scheduler.step(Done(A, 1, True, now=2.0))
    assert scheduler.step(Timer(10.9)) == []
    abort, assign = scheduler.step(Timer(11.0))
    assert abort == Abort(1, (A, B), "s0p1 not done within 10 s", is_late=True)
    assert assign.gid == 2
    # Due timers come before the event.
    commands = scheduler.step(Done(B, 2, True, now=100.0))
    assert commands[0] == Abort(2, (A, B), "s0p0 s0p1 not done within 89 s", is_late=True)
    assert [type(command) for command in commands] == [Abort, Skip, Skip]
    assert scheduler.counters["late"] == 1
    assert ready(scheduler, B, now=101.0) == [commands[2]]


def test_timeouts_are_learned() -> None:
    scheduler = scheduler_of()
    now = 0.0
    for clock in range(1, 20):
        assign = ready(scheduler, A, B, clock=clock, now=now)[0]
        now += 0.2 + 0.01 * (clock % 3)
        scheduler.step(Done(A, assign.gid, True, now=now))
        scheduler.step(Done(B, assign.gid, True, now=now))
    assert 2.0 < ready(scheduler, A, B, clock=30, now=now)[0].timeout < 2.2


def test_death_aborts_its_group_and_others_regroup() -> None:
    scheduler = scheduler_of(3)
    ready(scheduler, A, B, C)
    abort, assign = scheduler.step(Dead(B, now=2.0))
    assert abort == Abort(1, (A, B, C), "s0p1 died")
    assert (assign.gid, assign.members, assign.epoch) == (2, (A, C), 4)
    assert assign.why == "all are ready; 1 of 3 workers are absent"
    assert scheduler.step(Done(B, 1, True, now=2.1)) == []  # sent before its death
    assert scheduler.step(Dead(B, now=2.2)) == []
    assert scheduler.counters["late"] == 2
    (refuse,) = ready(scheduler, B, clock=2, now=3.0)
    assert refuse == Refuse(B, 2, "s0p1 is dead, and must join again")


def test_losses_do_not_count_as_failures() -> None:
    scheduler = scheduler_of(4)
    ready(scheduler, A, B, C, Worker(0, 3))
    for lost in (B, C):
        assert isinstance(scheduler.step(Dead(lost, now=2.0))[-1], Assign)
    abort, skip = scheduler.step(Dead(Worker(0, 3), now=3.0))
    assert isinstance(abort, Abort)
    assert skip == Skip(A, 1, "all are ready; 3 of 4 workers are absent")


def test_duplicates_are_counted_and_get_the_same_answer() -> None:
    scheduler = scheduler_of()
    assert ready(scheduler, A, A) == []
    (assign,) = ready(scheduler, B)
    assert ready(scheduler, B) == [assign]
    assert ready(scheduler, A) == [assign]
    scheduler.step(Done(A, 1, True, now=2.0))
    assert scheduler.step(Done(A, 1, True, now=2.0)) == []
    assert scheduler.step(Done(A, 1, False, now=2.0)) == []  # it has already sent Done
    (commit,) = scheduler.step(Done(B, 1, True, now=2.0))
    assert scheduler.step(Done(B, 1, True, now=2.0)) == [commit]
    assert ready(scheduler, A, now=2.0) == [commit]
    assert scheduler.step(Join(A, "node", 0, now=3.0)) == []
    assert scheduler.counters == {"duplicate": 7, "committed": 1, "late": 1}


def test_decreasing_clock_is_refused() -> None:
    scheduler = scheduler_of()
    ready(scheduler, A, clock=5)
    (refuse,) = ready(scheduler, A, clock=3)
    why = "s0p0 goes back from clock 5 to 3: it must join again"
    assert refuse == Refuse(A, 3, why)
    assert scheduler.counters == {"clock_backwards": 1}
    assert isinstance(ready(scheduler, B)[0], Assign)  # the refused message had no effect


@pytest.mark.parametrize("worker", [Worker(0, 9), Worker(9, 0), Worker(-1, 0), Worker(0, -1)])
def test_unknown_workers_are_refused(worker: Worker) -> None:
    scheduler = scheduler_of()
    for event in (Join(worker, "node", 0), Ready(worker, 1), Done(worker, 1, True), Dead(worker)):
        (refuse,) = scheduler.step(event)
        assert refuse.why == f"{worker} is not in the plan"
    assert scheduler.counters == {"unknown_worker": 4}


def test_worker_that_has_not_joined_in_this_incarnation_is_refused() -> None:
    scheduler = Scheduler([AllReduce(2)], 2)
    (refuse,) = scheduler.step(Ready(A, 1, 0, now=1.0))
    assert refuse.why == "s0p0 has not joined"
    scheduler.step(Join(A, "node", 0, 1, now=1.0))
    (refuse,) = scheduler.step(Ready(A, 1, 2, now=1.0))
    assert refuse.why == "s0p0 has not joined"


def test_done_for_a_group_of_others_or_not_assigned_yet_changes_nothing() -> None:
    groups = [Group((A, B), "first"), Group((B, C), "second")]
    scheduler = Scheduler([ScriptedPolicy({A: groups})], 3)
    for worker in (A, B, C):
        scheduler.step(Join(worker, "node", 0))
    (assign,) = ready(scheduler, A, B, C)
    assert assign.gid == 1
    assert scheduler.step(Done(C, 1, True, now=2.0)) == []
    assert scheduler.step(Done(C, 2, True, now=2.0)) == []
    assert scheduler.step(Done(C, 77, True, now=2.0)) == []
    assert scheduler.counters == {"out_of_order": 2, "late": 1}


def test_groups_sharing_a_worker_run_in_id_order() -> None:
    groups = [Group((A, B), "1st"), Group((B, C), "2nd"), Group((A, C), "3rd")]
    scheduler = Scheduler([ScriptedPolicy({A: groups})], 3)
    for worker in (A, B, C):
        scheduler.step(Join(worker, "node", 0))
    assert [c.why for c in ready(scheduler, A, B, C)] == ["1st"]
    scheduler.step(Done(A, 1, True, now=2.0))
    commit, second = scheduler.step(Done(B, 1, True, now=2.0))
    assert (commit.gid, second.why) == (1, "2nd")
    assert ready(scheduler, A, clock=2, now=3.0) == []
    scheduler.step(Done(B, 2, True, now=4.0))
    commit, third = scheduler.step(Done(C, 2, True, now=4.0))
    assert (commit.gid, third.why) == (2, "3rd")


def test_death_removes_queued_groups() -> None:
    groups = [Group((A, B), "1st"), Group((A, C), "2nd"), Group((B, C), "3rd")]
    policy = ScriptedPolicy({A: groups})
    scheduler = Scheduler([policy], 3)
    for worker in (A, B, C):
        scheduler.step(Join(worker, "node", 0))
    ready(scheduler, A, B, C)
    abort, third = scheduler.step(Dead(A, now=2.0))
    assert (abort.gid, third.gid, third.why) == (1, 3, "3rd")
    assert policy.calls[-3:] == ["done s0p0 s0p2 False", "done s0p0 s0p1 False", "leave s0p0"]


def test_timeout_of_a_requested_group_starts_at_the_last_ready() -> None:
    scheduler = Scheduler([ScriptedPolicy({B: [Group((A, B), "asked")]})], 2, limits=LIMITS)
    for worker in (A, B):
        scheduler.step(Join(worker, "node", 0))
    assert scheduler.step(Request(A, 1, now=1.0)) == []
    (assign,) = scheduler.step(Request(B, 1, now=1.0))  # both still compute
    assert scheduler.next_timer() == 301.0
    assert ready(scheduler, A, now=5.0) == []
    assert ready(scheduler, B, now=50.0) == []
    assert scheduler.next_timer() == 60.0
    scheduler.step(Done(A, assign.gid, True, now=51.0))
    assert scheduler.step(Done(B, assign.gid, True, now=51.0)) == [Commit(1, (A, B), (1, 1))]
    policy = scheduler.policies[0]
    assert policy.calls == [
        "request s0p0",
        "request s0p1",
        "ready s0p0",
        "ready s0p1",
        "done s0p0 s0p1 True",
    ]


def test_assigned_group_times_out_if_a_member_is_not_ready() -> None:
    scheduler = Scheduler([ScriptedPolicy({B: [Group((A, B), "asked")]})], 2, limits=LIMITS)
    for worker in (A, B):
        scheduler.step(Join(worker, "node", 0))
    scheduler.step(Request(A, 1, now=1.0))
    scheduler.step(Request(B, 1, now=1.0))
    ready(scheduler, A, now=5.0)
    (abort,) = scheduler.step(Timer(301.0))
    assert abort.reason == "s0p1 not ready within 300 s"
    # The ready worker is reported again at once; the other one when it becomes ready.
    calls = ["done s0p0 s0p1 False", "request s0p0", "ready s0p0"]
    assert scheduler.policies[0].calls[-3:] == calls
    ready(scheduler, B, now=400.0)
    assert scheduler.policies[0].calls[-2:] == ["request s0p1", "ready s0p1"]


def test_ready_worker_without_a_group_is_skipped_after_the_timeout() -> None:
    policy = ScriptedPolicy()
    scheduler = Scheduler([policy], 2, limits=Limits(group_timeout=20.0))
    for worker in (A, B):
        scheduler.step(Join(worker, "node", 0))
    ready(scheduler, A, now=1.0)
    assert scheduler.next_timer() == 21.0
    assert scheduler.step(Timer(21.0)) == [Skip(A, 1, "no group within 20 s", True)]
    assert policy.calls[-1] == "leave s0p0"
    assert scheduler.next_timer() == math.inf


def test_early_ready_waits_for_the_previous_step() -> None:
    """With overlap, a worker may finish its next step before the average ends."""
    scheduler = scheduler_of()
    ready(scheduler, A, B)
    assert scheduler.step(Request(A, 2, now=1.5)) == []
    assert ready(scheduler, A, clock=2, now=1.6) == []
    assert ready(scheduler, B, clock=2, now=1.7) == []
    assert scheduler.counters == {"early": 2}
    scheduler.step(Done(A, 1, True, now=2.0))
    commit, assign = scheduler.step(Done(B, 1, True, now=2.0))
    assert (commit.gid, assign.gid) == (1, 2)


class Exchange(Policy):
    """A averages with B, ready or not; the policy takes no requests."""

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        return [Group((A, B), "exchange")] if worker == A else []


@pytest.mark.parametrize("requests", [False, True])
def test_a_passive_member_answers_while_it_computes(requests: bool) -> None:
    """It has not requested the group, so Commit does not end its step."""
    scheduler = Scheduler([Exchange()], 2, limits=LIMITS)
    for worker in (A, B):
        scheduler.step(Join(worker, "node", 0))
        if requests:  # which the policy ignores
            scheduler.step(Request(worker, 1))
    (assign,) = ready(scheduler, A)
    assert scheduler.next_timer() == 11.0  # no member has to become ready
    scheduler.step(Done(B, assign.gid, True, now=2.0))
    assert scheduler.step(Done(A, assign.gid, True, now=2.0)) == [Commit(1, (A, B), (1, -1))]
    ready(scheduler, B, now=3.0)
    assert ready(scheduler, B, clock=2, now=3.0) == []
    assert scheduler.counters["early"] == 1  # it still waits


def test_a_passive_member_that_is_ready_meanwhile_waits_for_the_group() -> None:
    scheduler = Scheduler([ScriptedPolicy({A: [Group((A, B), "exchange")]})], 2, limits=LIMITS)
    for worker in (A, B):
        scheduler.step(Join(worker, "node", 0))
    ready(scheduler, A, B)
    scheduler.step(Done(A, 1, True, now=2.0))
    scheduler.step(Done(B, 1, True, now=2.0))
    assert ready(scheduler, B, clock=2, now=3.0) == []  # its step had ended: not early
    assert scheduler.counters == {"committed": 1}


def test_time_going_backwards_is_counted_and_harmless() -> None:
    scheduler = scheduler_of()
    ready(scheduler, A, now=10.0)
    (assign,) = ready(scheduler, B, now=5.0)
    assert scheduler.counters == {"time_backwards": 1}
    assert scheduler.next_timer() == 10.0 + assign.timeout


def test_first_gid_continues_the_ids_of_an_earlier_scheduler() -> None:
    scheduler = scheduler_of(first_gid=1000)
    assert ready(scheduler, A, B)[0].gid == 1000


def test_single_worker_is_always_skipped() -> None:
    scheduler = scheduler_of(1)
    assert ready(scheduler, A) == [Skip(A, 1, "all are ready")]


def test_a_scheduler_needs_policies_and_pipelines() -> None:
    for policies, num_pipelines in [([], 1), ([AllReduce(1)], 0)]:
        with pytest.raises(PolicyError, match=f"{len(policies)} policies for {num_pipelines}"):
            Scheduler(policies, num_pipelines)

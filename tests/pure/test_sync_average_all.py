"""The global average: each ends with all active workers or with a reason, and training goes on."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.sync.members import Limits
from polyrhythm.sync.modes import POLICIES
from polyrhythm.sync.policies.age import Age
from polyrhythm.sync.policies.all_reduce import AllReduce
from polyrhythm.sync.policies.pairwise import Pairwise
from polyrhythm.sync.protocol import (
    Abort,
    Assign,
    AverageAll,
    Command,
    Commit,
    CopyFrom,
    Dead,
    Done,
    Join,
    Leave,
    Ready,
    Refuse,
    Request,
    Skip,
    Timer,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Group, Worker
from tests.pure.scheduler_cases import LIMITS, A, B, C, ScriptedPolicy, ready, scheduler_of
from tests.pure.scheduler_grid import HEARTBEAT, Grid, grid_of, seeds


def request_average_all(
    scheduler: Scheduler, *workers: Worker, clock: int = 1, now: float = 5.0
) -> list[Command]:
    return [c for worker in workers for c in scheduler.step(AverageAll(worker, clock, now=now))]


def finish(scheduler: Scheduler, assign: Command, now: float = 6.0) -> list[Command]:
    assert isinstance(assign, Assign)
    return [c for w in assign.members for c in scheduler.step(Done(w, assign.gid, True, now=now))]


def test_average_all_forms_one_group_then_returns_to_the_policy() -> None:
    scheduler = scheduler_of(3)
    finish(scheduler, ready(scheduler, A, B, C)[-1], now=2.0)
    assert request_average_all(scheduler, A, B) == []
    (assign,) = request_average_all(scheduler, C)
    assert assign == Assign(2, 3, (A, B, C), (0, 0, 0), 10.0, "average_all")
    assert finish(scheduler, assign) == [Commit(2, (A, B, C), (1, 1, 1))]
    (assign,) = ready(scheduler, A, B, C, clock=2, now=7.0)
    assert assign.why == "all are ready"


def test_policy_does_not_wait_for_a_worker_in_average_all() -> None:
    scheduler = scheduler_of(3)
    assert request_average_all(scheduler, A, clock=0) == []
    (assign,) = ready(scheduler, B, C)
    assert assign.members == (B, C)
    finish(scheduler, assign)
    assert request_average_all(scheduler, B, now=7.0) == []
    (assign,) = request_average_all(scheduler, C, now=7.0)
    assert assign.members == (A, B, C)


def test_average_all_waits_for_joined_workers_only() -> None:
    scheduler = Scheduler([AllReduce(4)], 4, limits=LIMITS)
    for worker in (A, B, C):  # the fourth never joins
        scheduler.step(Join(worker, "node", 0))
    scheduler.step(Dead(C, now=1.0))
    assert request_average_all(scheduler, A) == []
    assert scheduler.step(Join(C, "node", 3, 1, now=5.0)) == []
    assert request_average_all(scheduler, B) == []
    (assign,) = scheduler.step(AverageAll(C, 3, 1, now=6.0))
    assert (assign.members, assign.incarnations) == ((A, B, C), (0, 0, 1))


@pytest.mark.parametrize("lost", [Dead, Leave])
def test_average_all_does_not_wait_for_lost_workers(lost: type[Dead] | type[Leave]) -> None:
    scheduler = scheduler_of(3)
    assert request_average_all(scheduler, A, B) == []
    (assign,) = scheduler.step(lost(C, now=6.0))
    assert (assign.members, assign.why) == ((A, B), "average_all")
    abort, skip = scheduler.step(lost(B, now=7.0))
    assert abort == Abort(1, (A, B), f"s0p1 {'died' if lost is Dead else 'left'}")
    assert skip == Skip(A, 1, "average_all")  # alone


def test_average_all_of_one_worker_is_skipped() -> None:
    scheduler = scheduler_of(1)
    assert request_average_all(scheduler, A) == [Skip(A, 1, "average_all")]
    assert ready(scheduler, A, clock=2, now=6.0) == [Skip(A, 2, "all are ready")]


def test_failed_average_all_is_retried_then_skipped() -> None:
    scheduler = scheduler_of(2)  # one retry
    request_average_all(scheduler, A, B)
    abort, assign = scheduler.step(Done(A, 1, False, now=6.0))
    assert (abort.gid, assign.gid, assign.why) == (1, 2, "average_all")
    assert scheduler.next_timer() == 16.0
    abort, *skips = scheduler.step(Timer(16.0))
    why = "2 groups failed, the last one: s0p0 s0p1 not done within 10 s"
    assert skips == [Skip(A, 1, why, True), Skip(B, 1, why, True)]
    assert ready(scheduler, A, B, clock=2, now=17.0)[-1].why == "all are ready"


def test_worker_joining_after_a_failed_average_all_is_skipped_too() -> None:
    scheduler = scheduler_of(3)
    scheduler.step(Dead(C, now=1.0))
    request_average_all(scheduler, A, B)
    scheduler.step(Join(C, "node", 1, 1, now=5.5))
    assert [type(c) for c in scheduler.step(Done(A, 1, False, now=6.0))] == [Abort]
    (assign,) = scheduler.step(AverageAll(C, 1, 1, now=7.0))
    _, *skips = scheduler.step(Done(C, assign.gid, False, 1, now=8.0))
    assert [type(skip) for skip in skips] == [Skip, Skip, Skip]


def test_average_all_timeout_is_learned_separately() -> None:
    scheduler, now = scheduler_of(2), 0.0
    for clock in range(1, 20):
        now += 2.0
        finish(scheduler, ready(scheduler, A, B, clock=clock, now=now)[-1], now=now + 0.1)
    assert ready(scheduler, A, B, clock=20, now=50.0)[-1].timeout == pytest.approx(1.0)
    finish(scheduler, Assign(20, 0, (A, B), (), 0, ""), now=50.0)
    assert request_average_all(scheduler, A, B, clock=20, now=51.0)[-1].timeout == 10.0


def test_average_all_in_a_broken_pipeline_gets_a_reason() -> None:
    scheduler = scheduler_of(2, num_stages=2)
    assert request_average_all(scheduler, Worker(0, 1)) == []
    assert scheduler.step(Dead(Worker(1, 1), now=6.0)) == [Skip(Worker(0, 1), 1, "s1p1 died", True)]
    (skip,) = request_average_all(scheduler, Worker(0, 1), clock=2, now=7.0)
    assert skip == Skip(Worker(0, 1), 2, "its pipeline is incomplete: s1p1 is dead", True)
    (skip,) = request_average_all(scheduler, Worker(0, 0), now=8.0)
    assert skip.why == "average_all"


def test_pending_average_all_ends_when_its_pipeline_breaks() -> None:
    scheduler = Scheduler([Pairwise(), Pairwise()], 2, limits=LIMITS)
    for worker in scheduler.membership.members:
        scheduler.step(Join(worker, "node", 0))
    (exchange,) = ready(scheduler, A)
    assert request_average_all(scheduler, B, clock=7, now=2.0) == []  # its exchange ends first
    abort, *skips = scheduler.step(Dead(Worker(1, 1), now=3.0))
    assert (abort.gid, abort.members) == (exchange.gid, (A, B))
    assert Skip(B, 7, "its pipeline is incomplete: s1p1 is dead", True) in skips


def test_stages_average_all_separately() -> None:
    scheduler = scheduler_of(2, num_stages=2)
    first, second = ([Worker(stage, p) for p in range(2)] for stage in range(2))
    assert request_average_all(scheduler, first[0], second[0]) == []
    assert request_average_all(scheduler, first[1])[0].members == tuple(first)
    assert request_average_all(scheduler, second[1])[0].members == tuple(second)


def test_average_all_may_repeat_the_clock_of_ready_only() -> None:
    scheduler = scheduler_of(2)
    (commit,) = finish(scheduler, ready(scheduler, A, B, clock=3)[-1], now=2.0)
    assert ready(scheduler, A, clock=3, now=2.0) == [commit]
    assert request_average_all(scheduler, A, clock=3) == []
    assert request_average_all(scheduler, A, clock=3) == []  # repeated: it still waits
    assert scheduler.counters["duplicate"] == 2
    (assign,) = request_average_all(scheduler, B, clock=3)
    assert (
        request_average_all(scheduler, A, clock=3)
        == ready(scheduler, A, clock=3, now=5.0)
        == [assign]
    )
    (commit,) = finish(scheduler, assign)
    assert request_average_all(scheduler, B, clock=3, now=7.0) == [commit]  # answered as before
    assert scheduler.counters["duplicate"] == 5
    (refuse,) = request_average_all(scheduler, A, clock=2, now=7.0)
    assert refuse == Refuse(A, 2, "s0p0 goes back from clock 3 to 2: it must join again")
    # After local steps that were not reported.
    assert request_average_all(scheduler, A, clock=4, now=8.0) == []
    (refuse,) = ready(scheduler, A, clock=3, now=8.0)
    assert refuse.clock == 3


def test_average_all_of_unknown_workers_is_refused() -> None:
    scheduler = scheduler_of(2)
    assert request_average_all(scheduler, Worker(0, 7))[0].why == "s0p7 is not in the plan"
    assert scheduler.step(AverageAll(A, 1, 5, now=6.0))[0].why == "s0p0 has not joined"
    scheduler.step(Dead(A, now=6.0))
    assert request_average_all(scheduler, A, now=7.0)[0].why == "s0p0 is dead, and must join again"


def test_passive_worker_finishes_its_exchange_before_average_all() -> None:
    scheduler = Scheduler([Pairwise()], 3, limits=LIMITS)
    for worker in (A, B, C):
        scheduler.step(Join(worker, "node", 0))
    (first,) = ready(scheduler, A)  # A and C are active
    assert ready(scheduler, C) == []  # waits for the passive B
    assert request_average_all(scheduler, B, clock=0, now=2.0) == []  # still in the exchange with A
    commit, skip = finish(scheduler, first, now=3.0)
    assert commit == Commit(1, (A, B), (1, -1))
    # The policy has queued the next exchange for B; but it does not open for a stopping worker.
    assert skip == Skip(C, 1, "passive: continues, and answers meanwhile")
    assert request_average_all(scheduler, A) == []
    (assign,) = request_average_all(scheduler, C)
    assert assign.members == (A, B, C)


def test_average_all_aborts_queued_groups() -> None:
    groups = [Group((A, B), "1st"), Group((B, C), "2nd")]
    policy = ScriptedPolicy({A: groups})
    scheduler = Scheduler([policy], 3, limits=LIMITS)
    for worker in (A, B, C):
        scheduler.step(Join(worker, "node", 0))
    assert [c.why for c in ready(scheduler, A)] == ["1st"]  # B is passive
    ready(scheduler, C)
    request_average_all(scheduler, B, clock=0, now=2.0)
    assert policy.calls[-3:] == ["done s0p1 s0p2 False", "request s0p2", "ready s0p2"]
    finish(scheduler, Assign(1, 0, (A, B), (), 0, ""), now=3.0)
    assert policy.calls[-2:] == ["done s0p0 s0p1 True", "leave s0p1"]


def test_average_all_aborts_a_group_waiting_for_its_worker() -> None:
    policy = ScriptedPolicy({B: [Group((A, B), "asked ahead")]})
    scheduler = Scheduler([policy], 2, limits=LIMITS)
    for worker in (A, B):
        scheduler.step(Join(worker, "node", 0))
        scheduler.step(Request(worker, 1, now=1.0))
    assert ready(scheduler, A) == []
    assert request_average_all(scheduler, B, clock=0) == [
        Abort(1, (A, B), "s0p1 waits for the global average")
    ]
    assert policy.calls[-4:] == ["done s0p0 s0p1 False", "leave s0p1", "request s0p0", "ready s0p0"]


def test_early_average_all_waits_for_the_step_end() -> None:
    scheduler = scheduler_of(2)
    assert ready(scheduler, A) == []
    assert request_average_all(scheduler, A, now=1.5) == []
    (assign,) = ready(scheduler, B, now=1.5)
    assert request_average_all(scheduler, B, now=1.5) == []
    commit, average_all = finish(scheduler, assign, now=2.0)
    assert commit == Commit(1, (A, B), (1, 1))
    assert average_all.why == "average_all"
    finish(scheduler, average_all, now=3.0)
    ready(scheduler, A, clock=2, now=4.0)
    assert request_average_all(scheduler, A, clock=2) == []
    step, average_all = scheduler.step(Leave(B, now=5.0))  # ends the step of A
    assert step.why == "all are ready; 1 of 2 workers are absent"
    assert average_all == Skip(A, 2, "average_all")


def test_events_during_average_all_are_handled_after_it() -> None:
    scheduler = scheduler_of(2)
    (assign,) = request_average_all(scheduler, A, B)
    assert scheduler.step(Request(A, 2, now=5.5)) == []
    assert ready(scheduler, A, B, clock=2, now=5.5) == []
    commit, after = finish(scheduler, assign)
    assert (commit.gid, after.why) == (1, "all are ready")


def test_average_all_ends_the_copy() -> None:
    scheduler = scheduler_of(2)
    ready(scheduler, A, clock=4)
    scheduler.step(Dead(B, now=2.0))
    assert isinstance(scheduler.step(Join(B, "node", 0, 1, now=3.0))[-1], CopyFrom)
    scheduler.step(AverageAll(B, 4, 1, now=4.0))
    assert scheduler.step(Join(B, "node", 0, 1, now=5.0)) == []


def test_group_timeout_does_not_apply_to_average_all() -> None:
    scheduler = Scheduler([AllReduce(2)], 2, limits=Limits(group_timeout=20.0))
    for worker in (A, B):
        scheduler.step(Join(worker, "node", 0))
    finish(scheduler, ready(scheduler, A, B)[-1], now=2.0)  # a group of the policy, at clock 1
    assert request_average_all(scheduler, A, now=5.0) == []  # at the same clock
    assert scheduler.next_timer() == 545.0


def test_average_all_times_out() -> None:
    scheduler = scheduler_of(8)
    late = [Worker(0, pipeline) for pipeline in range(2, 8)]
    request_average_all(scheduler, A, now=5.0)
    request_average_all(scheduler, B, now=100.0)
    assert scheduler.step(Timer(544.0)) == []
    skips = scheduler.step(Timer(545.0))
    named = "s0p2 s0p3 s0p4 s0p5 and 2 more"
    why = f"{named} did not call average_all() within 540 s"
    assert skips == [Skip(A, 1, why, True), Skip(B, 1, why, True)]
    assert scheduler.next_timer() == math.inf
    assert ready(scheduler, A, B, clock=2, now=600.0) == []
    assert ready(scheduler, *late, clock=2, now=600.0)[-1].why == "all are ready"


@pytest.mark.parametrize("averages_all", [False, True])
def test_average_all_resets_causal_age(averages_all: bool) -> None:
    policy = Age(3, max_age=1, window=1.0)
    scheduler = Scheduler([policy], 3, limits=LIMITS)
    for worker in (A, B, C):
        scheduler.step(Join(worker, "node", 0))
    for clock in range(1, 6):
        assert ready(scheduler, A, clock=clock, now=10.0 * clock) == []
        assert isinstance(scheduler.step(Timer(10.0 * clock + 1))[-1], Skip)
    if averages_all:
        (assign,) = request_average_all(scheduler, A, B, C, clock=5, now=60.0)
        finish(scheduler, assign, now=61.0)
    ready(scheduler, B, clock=6, now=70.0)
    # Without the global average it waits for A, which is ahead.
    assert bool(scheduler.step(Timer(71.0))) == averages_all
    assert policy.counters["window"] == 5 + averages_all


@pytest.mark.parametrize("name", POLICIES)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    seed=seeds,
    average_all_at=st.frozensets(st.integers(0, 6), min_size=1),
    takes_requests=st.booleans(),
)
@settings(max_examples=12)
def test_every_average_all_includes_all_workers(
    name: str,
    shape: tuple[int, int],
    seed: int,
    average_all_at: frozenset[int],
    takes_requests: bool,
) -> None:
    grid = grid_of(
        name, shape, seed, average_all_at=average_all_at, takes_requests=takes_requests
    ).run()
    assert grid.unfinished() == []
    assert all(state.clock == 6 for state in grid.workers.values())
    assert all(state.average_all_clock == max(average_all_at) for state in grid.workers.values())
    num_stages, num_pipelines = shape
    stages = [tuple(Worker(s, p) for p in range(num_pipelines)) for s in range(num_stages)]
    expected = sorted(stages * len(average_all_at)) if num_pipelines > 1 else []
    assert sorted(grid.global_averages) == expected
    assert grid.scheduler.next_timer() == math.inf


@pytest.mark.parametrize("name", POLICIES)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(2, 5)),
    seed=seeds,
    average_all_at=st.frozensets(st.integers(0, 6), min_size=1),
    data=st.data(),
)
@settings(max_examples=12)
def test_average_all_ends_despite_crashes_and_failures(
    name: str,
    shape: tuple[int, int],
    seed: int,
    average_all_at: frozenset[int],
    data: st.DataObject,
) -> None:
    """Fewer than all pipelines crash; some of them rejoin."""
    num_lost = data.draw(st.integers(0, shape[1] - 1))
    lost = set(range(num_lost))
    at_event: dict[int, Callable[[Grid], None]] = {}
    for pipeline in sorted(lost):
        worker = Worker(data.draw(st.integers(0, shape[0] - 1)), pipeline)

        def crash(grid: Grid, worker: Worker = worker) -> None:
            if grid.workers[worker].program and grid.workers[worker].is_alive:
                grid.kill(worker)
                if worker.pipeline % 2:
                    grid._schedule(HEARTBEAT + 5, lambda: grid.revive(worker))

        at_event[data.draw(st.integers(1, 80).filter(lambda e: e not in at_event))] = crash
    fails = data.draw(st.sampled_from([0.0, 0.0, 0.3]))
    more = {"average_all_at": average_all_at, "at_event": at_event, "failure_probability": fails}
    grid = grid_of(name, shape, seed, **more).run()
    assert grid.unfinished({p for p in range(shape[1]) if p not in lost or p % 2}) == []
    waiting = [w for w, s in grid.workers.items() if s.is_alive and s.averages_all and s.program]
    assert [w for w in waiting if w.pipeline not in lost] == []


@pytest.mark.parametrize(
    ("kinds", "num_averages"),
    [
        ((Ready, AverageAll), 2),
        ((Ready, Ready), 1),
        ((AverageAll, AverageAll), 1),
        ((AverageAll, Ready), 1),
    ],
)
def test_one_step_and_one_average_all_per_clock(
    kinds: tuple[type[Ready | AverageAll], ...], num_averages: int
) -> None:
    scheduler = scheduler_of(2)
    for kind in kinds:
        answers = [scheduler.step(kind(worker, 1, now=1.0)) for worker in (A, B)]
        assert answers[1]
        for command in answers[1]:
            if isinstance(command, Assign):
                finish(scheduler, command, now=1.0)
    assert scheduler.counters["committed"] == num_averages
    assert scheduler.counters["duplicate"] == 2 * (2 - num_averages)

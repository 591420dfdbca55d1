"""Broken links: both ends report them, groups send nothing over them, and others go on."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.sync.members import FIRST_APART, MAX_APART, REPORT_WINDOW, BrokenLinks, Limits
from polyrhythm.sync.policies.all_reduce import AllReduce
from polyrhythm.sync.policies.partial_reduce import PartialReduce
from polyrhythm.sync.protocol import (
    Abort,
    Assign,
    AverageAll,
    Command,
    Commit,
    Dead,
    Done,
    Join,
    Ready,
    Skip,
    Timer,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Worker
from tests.pure.scheduler_cases import A, B, C, ready, scheduler_of

WORKERS = [Worker(0, pipeline) for pipeline in range(6)]
BROKEN = "link s0p0-s0p1 failed 1 time: no direct messages"


def report(scheduler: Scheduler, gid: int, now: float, *pairs: tuple[Worker, Worker]) -> list:
    """Send that the first worker of each pair has lost the second."""
    return [c for w, lost in pairs for c in scheduler.step(Done(w, gid, False, 0, now, (lost,)))]


def test_a_link_that_both_ends_report_is_named_and_not_used() -> None:
    scheduler = scheduler_of(3)
    (first,) = ready(scheduler, A, B, C)
    assert isinstance(first, Assign)
    assert first.apart == ()
    abort, second = report(scheduler, first.gid, 2.0, (A, B))
    assert abort == Abort(first.gid, (A, B, C), "s0p0 lost s0p1")
    assert isinstance(second, Assign)
    assert second.apart == (), "one end alone proves nothing: s0p1 may have died"
    abort, third = report(scheduler, first.gid, 2.5, (B, A))
    assert abort == Abort(second.gid, (A, B, C), BROKEN)
    assert isinstance(third, Assign)
    assert (third.members, third.apart) == ((A, B, C), ((A, B),))
    assert third.why == f"all are ready; {BROKEN}"
    for worker in third.members:
        commands = scheduler.step(Done(worker, third.gid, True, now=3.0))
    assert isinstance(commands[0], Commit)


def broken_scheduler(num: int = 3) -> Scheduler:
    """A scheduler whose first group has found the link A-B to be broken, at t = 2."""
    scheduler = scheduler_of(num)
    first = ready(scheduler, *WORKERS[:num])[-1]
    assert isinstance(first, Assign)
    report(scheduler, first.gid, 2.0, (A, B), (B, A))
    return scheduler


def commit(scheduler: Scheduler, gid: int, members: tuple[Worker, ...], now: float) -> None:
    for worker in members:
        commands = scheduler.step(Done(worker, gid, True, now=now))
    assert isinstance(commands[0], Commit)


def test_a_broken_link_is_tried_again_and_used_once_it_works() -> None:
    scheduler = broken_scheduler()
    commit(scheduler, 3, (A, B, C), 3.0)  # without the link: that proves nothing
    (assign,) = ready(scheduler, A, B, C, clock=2, now=2.0 + FIRST_APART - 0.1)
    assert isinstance(assign, Assign)
    assert assign.apart == ((A, B),)
    commit(scheduler, assign.gid, (A, B, C), 12.0)
    (assign,) = ready(scheduler, A, B, C, clock=3, now=2.0 + FIRST_APART)
    assert isinstance(assign, Assign)
    assert assign.apart == ()
    commit(scheduler, assign.gid, (A, B, C), 13.0)
    (assign,) = ready(scheduler, A, B, C, clock=4, now=14.0)
    report(scheduler, assign.gid, 14.0, (A, B), (B, A))
    assert scheduler._links.reason([(A, B)]) == BROKEN, "it starts anew"


@given(
    broken=st.sampled_from(list(itertools.combinations(range(4), 2))),
    named_once=st.sets(st.sampled_from(list(itertools.combinations(range(4), 2))), max_size=6),
)
def test_all_workers_average_though_working_links_were_reported_as_broken(
    broken: tuple[int, int], named_once: set[tuple[int, int]]
) -> None:
    """A slow machine may report links that work: then no worker may be left to send around them."""
    scheduler = Scheduler([AllReduce(4)], 4, waits_for_all=True, limits=Limits(connect_timeout=1.0))
    members = WORKERS[:4]
    for worker in members:
        scheduler.step(Join(worker, "node", 0))
    assign = ready(scheduler, *members)[-1]
    failing, now = {broken, *named_once}, 1.0
    for _ in range(6):
        assert isinstance(assign, Assign)
        lost = [(WORKERS[i], WORKERS[j]) for i, j in failing]
        lost = [pair for pair in lost if pair not in assign.apart]
        if not lost:
            break
        now, failing = now + REPORT_WINDOW + 0.1, {broken}
        assign = report(
            scheduler, assign.gid, now, *(p for a, b in lost for p in ((a, b), (b, a)))
        )[-1]
    else:
        pytest.fail(f"the average uses a broken link again and again: {assign}")
    commit(scheduler, assign.gid, tuple(members), now + 0.1)


def test_a_dead_worker_breaks_no_link() -> None:
    scheduler = scheduler_of(3)
    (first,) = ready(scheduler, A, B, C)
    report(scheduler, first.gid, 2.0, (A, B), (C, B))
    abort, assign = scheduler.step(Dead(B, now=2.1))
    assert isinstance(abort, Abort)
    assert isinstance(assign, Assign)
    assert (assign.members, assign.apart) == ((A, C), ())


def test_a_new_incarnation_has_new_links() -> None:
    scheduler = broken_scheduler()
    scheduler.step(Join(B, "node", 1, 1, 3.0))
    assert scheduler._links.among([A, B, C], 3.0) == ()


def test_workers_that_only_one_another_could_average_with_skip() -> None:
    policy = PartialReduce(3, group_size=2)
    scheduler = Scheduler([policy], 3, limits=Limits(ceiling=10.0))
    for worker in (A, B, C):
        scheduler.step(Join(worker, "node", 0))
    (first,) = ready(scheduler, A, B)
    commands = report(scheduler, first.gid, 2.0, (A, B), (B, A))
    assert [Skip(w, 1, BROKEN, True) for w in (A, B)] == commands[-2:]
    assert not ready(scheduler, A, clock=2, now=3.0)
    (assign,) = ready(scheduler, C, clock=2, now=3.0)  # others are not affected
    assert isinstance(assign, Assign)
    assert (assign.members, assign.apart) == ((A, C), ())


def test_a_global_average_of_two_tries_the_link_again() -> None:
    scheduler = broken_scheduler(2)
    skips = scheduler.step(Done(A, 3, False, now=2.5))[1:]
    assert [type(command) for command in skips] == [Skip, Skip]
    commands = [c for w in (A, B) for c in scheduler.step(AverageAll(w, 1, now=3.0))]
    (assign,) = commands
    assert isinstance(assign, Assign)
    assert (assign.members, assign.apart) == ((A, B), ())


def test_the_first_average_of_members_gets_more_time() -> None:
    limits = Limits(ceiling=100.0, connect_timeout=7.0)
    scheduler = Scheduler([AllReduce(2)], 2, waits_for_all=True, limits=limits)
    for worker in (A, B):
        scheduler.step(Join(worker, "node", 0))
    now = 0.0
    for clock in range(1, 20):  # until a timeout is learned
        (assign,) = ready(scheduler, A, B, clock=clock, now=now)
        commit(scheduler, assign.gid, (A, B), now := now + 0.5)
    ready(scheduler, A, B, clock=20, now=now)
    assert scheduler.next_timer() == pytest.approx(now + 5.0)
    scheduler.step(Join(B, "node", 19, 1, now))  # a new incarnation has no connection
    scheduler.step(Ready(B, 20, 1, now=now))
    ready(scheduler, A, clock=21, now=now)
    assert scheduler.next_timer() == pytest.approx(now + 5.0 + 7.0)


@given(st.lists(st.floats(0.0, 2000.0), min_size=1, max_size=12))
def test_a_link_stays_unused_for_twice_as_long_after_each_failure(pauses: list[float]) -> None:
    links, now, expected = BrokenLinks(), 0.0, FIRST_APART
    for gid, pause in enumerate(pauses):
        assert links.report(A, gid, [B], now) == []
        assert links.report(B, gid, [A, C], now + 0.5) == [(A, B)]
        now += 0.5
        assert links.among([A, B, C], now + expected - 0.01) == ((A, B),)
        assert links.among([A, B, C], now + expected) == ()
        assert links.among([B, C], now) == ()
        now, expected = now + pause, min(2 * expected, MAX_APART)


@pytest.mark.parametrize(
    ("of_a", "of_b", "is_broken"),
    [
        ("lost", "lost", True),
        ("lost", "slow", True),
        ("slow", "lost", True),
        ("slow", "slow", False),
    ],
)
def test_a_link_is_broken_if_one_end_has_lost_the_other(
    of_a: str, of_b: str, is_broken: bool
) -> None:
    """In an average of large models both may only be slow when the group is aborted early."""
    links = BrokenLinks()

    def report(worker: Worker, other: Worker, how: str, now: float) -> list[tuple[Worker, Worker]]:
        lost, slow = ([other], []) if how == "lost" else ([], [other])
        return links.report(worker, 1, lost, now, slow=slow)

    assert report(A, B, of_a, 0.0) == []
    assert report(B, A, of_b, 0.5) == [(A, B)] * is_broken
    assert report(B, A, "lost", 0.6) == [(A, B)], "what it says later counts"


@given(
    st.lists(
        st.tuples(st.sampled_from(WORKERS), st.sets(st.sampled_from(WORKERS)), st.floats(0, 4)),
        max_size=12,
    )
)
def test_only_links_that_both_ends_report_in_time_are_broken(
    reports: list[tuple[Worker, set[Worker], float]],
) -> None:
    links, now = BrokenLinks(), 0.0
    times = dict[tuple[Worker, Worker], float]()
    last = dict[Worker, float]()
    for worker, lost, pause in reports:
        now += pause
        others = lost - {worker}
        broken = links.report(worker, 1, others, now)
        in_time = {
            (min(worker, other), max(worker, other))
            for other in others
            if (other, worker) in times and now - last[other] <= REPORT_WINDOW
        }
        assert set(broken) == in_time
        times.update({(worker, other): now for other in others})
        last[worker] = now


@given(st.sets(st.sampled_from(list(itertools.combinations(range(5), 2))), max_size=3), st.data())
def test_steps_end_with_an_average_or_a_reason_whatever_links_are_broken(
    broken: set[tuple[int, int]], data: st.DataObject
) -> None:
    """Members of a group that use a broken link report it; all others have exchanged."""
    num = 5
    policy = PartialReduce(num, group_size=3, timeout=1.0)
    scheduler = Scheduler([policy], num, limits=Limits(ceiling=10.0))
    pairs = {(WORKERS[one], WORKERS[other]) for one, other in broken}
    ended, clocks, now = set[Worker](), dict.fromkeys(WORKERS[:num], 0), 0.0
    for worker in clocks:
        scheduler.step(Join(worker, "node", 0))
    for step in range(1, 5):
        ended, commands = set(), list[Command]()
        for worker in data.draw(st.permutations(WORKERS[:num])):
            now += 0.01
            commands += scheduler.step(Ready(worker, step, now=now))
        for _ in range(200):
            if not commands:
                if len(ended) == num:
                    break
                now = max(now, scheduler.next_timer())
                assert now < 1e9, "someone waits for ever"
                commands = scheduler.step(Timer(now))
                continue
            command = commands.pop(0)
            now += 0.01
            if isinstance(command, Commit):
                ended |= set(command.members)
            elif isinstance(command, Skip):
                ended.add(command.worker)
            elif isinstance(command, Assign):
                members = set(command.members)
                bad = {p for p in pairs if members >= set(p)} - set(command.apart)
                for worker in command.members:
                    lost = tuple({*p} - {worker} for p in bad if worker in p)
                    names = tuple(sorted(other for one in lost for other in one))
                    done = Done(worker, command.gid, not bad, 0, now, names)
                    commands += scheduler.step(done)
        assert len(ended) == num, "each step ends for each worker"

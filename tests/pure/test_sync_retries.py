"""A failed group is retried by all of its members together, and no step counts twice."""

import pytest

from polyrhythm.sync.members import Limits
from polyrhythm.sync.modes import POLICIES, SYNC_MODES, SyncMode, make_policies
from polyrhythm.sync.policies.adaptive import Adaptive
from polyrhythm.sync.policies.smart import SmartGroups
from polyrhythm.sync.policies.windowed import WindowRule
from polyrhythm.sync.protocol import Abort, Assign, Command, Done, Join, Ready, Request, Skip
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Seconds, Worker

W = [Worker(0, pipeline) for pipeline in range(6)]


def all_ready(scheduler: Scheduler, num_workers: int, clock: int, now: Seconds) -> list[Command]:
    """All workers request a group, and then are ready; the first worker is last."""
    for worker in W[:num_workers]:
        scheduler.step(Request(worker, clock, now=now))
    out = [scheduler.step(Ready(worker, clock, now=now)) for worker in W[num_workers - 1 :: -1]]
    return [command for commands in out for command in commands]


def smart_of(num_workers: int, **options: int) -> tuple[SmartGroups, Scheduler]:
    policy = SmartGroups(**options)
    scheduler = Scheduler([policy], num_workers, limits=Limits(max_retries=10))
    for worker in W[:num_workers]:
        scheduler.step(Join(worker, "node", 0))
    return policy, scheduler


@pytest.mark.parametrize("num_workers", [2, 4])
def test_smart_regroups_the_members_of_a_failed_group(num_workers: int) -> None:
    _, scheduler = smart_of(num_workers, group_size=num_workers)
    (assign,) = all_ready(scheduler, num_workers, 1, 1.0)
    abort, again = scheduler.step(Done(W[0], assign.gid, False, now=2.0))
    assert isinstance(abort, Abort)
    assert isinstance(again, Assign)
    assert again.members == assign.members == tuple(W[:num_workers])


def test_failed_attempts_do_not_count_as_requests() -> None:
    """A worker counts as slow when it is three requests behind; retries do not count."""
    _, scheduler = smart_of(3, group_size=2, slow_after=3)
    for worker in W[:2]:
        scheduler.step(Request(worker, 1, now=1.0))
    (assign,) = scheduler.step(Ready(W[0], 1, now=1.0))
    scheduler.step(Ready(W[1], 1, now=1.0))
    for _ in range(6):
        _, assign = scheduler.step(Done(W[0], assign.gid, False, now=2.0))
    for worker in assign.members:
        scheduler.step(Done(worker, assign.gid, True, now=3.0))
    scheduler.step(Request(W[2], 1, now=3.0))
    scheduler.step(Request(W[0], 2, now=3.0))
    (assign,) = scheduler.step(Ready(W[0], 2, now=4.0))
    assert (assign.members, assign.why) == ((W[0], W[2]), "division by s0p0")


@pytest.mark.parametrize("rule", ["rate", "paper"])
def test_failed_groups_do_not_change_the_window(rule: WindowRule) -> None:
    def length(num_failures: int) -> Seconds:
        policy = Adaptive(2, window=rule, last_groups=1000)
        scheduler = Scheduler([policy], 2, limits=Limits(max_retries=10))
        for worker in W[:2]:
            scheduler.step(Join(worker, "node", 0))
        for clock in range(1, 10):
            now = 10.0 * clock
            out = [scheduler.step(Ready(w, clock, now=now + w.pipeline)) for w in W[:2]]
            assign = out[-1][-1]
            for _ in range(num_failures):
                _, assign = scheduler.step(Done(W[0], assign.gid, False, now=now + 4))
            for worker in W[:2]:
                scheduler.step(Done(worker, assign.gid, True, now=now + 5))
        return policy.window.open(2)

    assert length(2) == length(0) > 0


def test_step_after_an_abandoned_one_is_an_arrival() -> None:
    policy = Adaptive(2, last_groups=1000)
    scheduler = Scheduler([policy], 2, limits=Limits(max_retries=0))
    for worker in W[:2]:
        scheduler.step(Join(worker, "node", 0))
    for clock in range(1, 10):
        out = [scheduler.step(Ready(w, clock, now=10.0 * clock + w.pipeline)) for w in W[:2]]
        assign = out[-1][-1]
        _, *skips = scheduler.step(Done(W[0], assign.gid, False, now=10.0 * clock + 2))
        assert [type(skip) for skip in skips] == [Skip, Skip]
    assert policy.window.open(2) == pytest.approx(5.0, rel=0.5)  # gaps of 1 s and 9 s


@pytest.mark.parametrize("name", [n for n in POLICIES if SYNC_MODES[n].waits_for_all])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_exact_policy_never_skips_after_failures(name: str, num_stages: int) -> None:
    policies = make_policies(name, num_stages=num_stages, num_pipelines=2)
    limits = SyncMode.named(name).limits(num_stages)
    scheduler = Scheduler(policies, 2, waits_for_all=True, limits=limits)
    for worker in scheduler.membership.members:
        scheduler.step(Join(worker, "node", 0))
    scheduler.step(Ready(W[0], 1, now=1.0))
    (assign,) = scheduler.step(Ready(W[1], 1, now=1.0))
    for _ in range(100):
        abort, assign = scheduler.step(Done(W[0], assign.gid, False, now=2.0))
        assert isinstance(abort, Abort)
        assert assign.members == (W[0], W[1])

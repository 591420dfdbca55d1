"""At the start no worker waits longer than `startup_timeout` for workers that have not joined."""

import math

import pytest

from polyrhythm.sync.policies.ssp import BoundedStaleness
from polyrhythm.sync.policies.static import StaticGroups
from polyrhythm.sync.policy import Policy
from polyrhythm.types import Worker

A, B, C = (Worker(0, pipeline) for pipeline in range(3))


def test_static_groups_start_without_an_absent_worker() -> None:
    policy = StaticGroups(4, startup_timeout=60.0)
    for worker, node in [(A, "n0"), (B, "n0"), (C, "n1")]:
        policy.on_join(worker, node, 0.0)
    assert policy.on_ready(B, 1.0) == []  # takes a local step in the first phase
    assert policy.next_timer() == 60.0
    assert [group.members for group in policy.on_timer(60.0)] == [(B,)]
    assert policy.next_timer() == math.inf


def test_ssp_continues_without_an_absent_worker() -> None:
    policy = BoundedStaleness(3, staleness=1, startup_timeout=60.0)
    for worker in (A, B):
        policy.on_join(worker, "node", 0.0)
    for worker in (A, B):
        assert [group.members for group in policy.on_ready(worker, 1.0)] == [(worker,)]
    assert policy.on_ready(A, 2.0) == []  # two steps ahead of the absent worker
    assert policy.next_timer() == 60.0
    assert [group.members for group in policy.on_timer(60.0)] == [(A,)]
    assert policy.next_timer() == math.inf


@pytest.mark.parametrize("policy", [StaticGroups(2), BoundedStaleness(2, 0)])
def test_no_startup_timer_without_ready_workers_or_once_complete(policy: Policy) -> None:
    policy.on_join(A, "node", 0.0)
    assert policy.next_timer() == math.inf
    policy.on_join(B, "another node", 0.0)
    assert policy.on_ready(A, 1.0) == []
    assert policy.next_timer() == math.inf


def test_timed_out_static_worker_rejoins_at_its_next_step() -> None:
    policy = StaticGroups(3)
    for worker in (A, B, C):
        policy.on_join(worker, "node", 0.0)
    for worker in (A, B, C):  # phase 0: groups of one, or a pair
        for group in policy.on_ready(worker, 1.0):
            policy.on_done(group, True, 1.0)
    assert policy.on_ready(A, 2.0) == []  # phase 1: all of the node
    assert policy.on_leave(A, 32.0) == policy.on_return(A, "node", 32.0) == []  # timed out
    assert policy.on_ready(B, 33.0) == []
    assert [group.members for group in policy.on_ready(C, 34.0)] == [(B, C)]  # without A
    assert policy.on_ready(A, 35.0) == []  # phase 2: waits for C
    assert [group.members for group in policy.on_ready(C, 36.0)] == [(A, C)]

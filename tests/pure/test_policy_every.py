"""Every n-th step: the policy sees those steps only, and a failed average is tried again."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.all_reduce import AllReduce
from polyrhythm.sync.every import Every
from polyrhythm.sync.pairwise import Pairwise
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.random_groups import RandomGroups
from polyrhythm.sync.smart import SmartGroups
from polyrhythm.types import Group, Worker
from tests.pure.test_policy_contract import MAKE, job_of, node_lists, random_durations

A, B = Worker(0, 0), Worker(0, 1)


@pytest.mark.parametrize("name", ["static", "random", "smart", "pairwise", "ssp"])
@given(nodes=node_lists, seed=st.integers(0, 99))
def test_every_1_changes_nothing(name: str, nodes: list[int], seed: int) -> None:
    formed = [
        job_of(policy, nodes, random_durations(seed), 5).run().formed
        for policy in (MAKE[name](len(nodes)), Every(MAKE[name](len(nodes)), 1))
    ]
    assert formed[0] == formed[1]


@pytest.mark.parametrize("make", [RandomGroups, SmartGroups])
@given(num_workers=st.integers(2, 6), steps=st.integers(2, 4), seed=st.integers(0, 99))
def test_a_worker_averages_at_its_nth_steps_only(
    make: Callable[[], Policy], num_workers: int, steps: int, seed: int
) -> None:
    policy = Every(make(), steps)
    job = job_of(policy, [0] * num_workers, random_durations(seed), 4 * steps).run()
    for pipeline in range(num_workers):
        mine = [group for _, group in job.formed if Worker(0, pipeline) in group.members]
        local = [group.why.startswith("local step") for group in mine]
        assert local == [step % steps != 0 for step in range(1, 4 * steps + 1)]


def test_a_local_step_is_answered_where_the_policy_would_have_been_asked() -> None:
    alone = Group((A,), "local step 1 of 1")
    ahead, after = Every(RandomGroups(), 2), Every(AllReduce(1), 2)
    for policy in (ahead, after):
        policy.on_join(A, "n0", 0.0)
    assert (ahead.on_request(A, 0.0), ahead.on_ready(A, 1.0)) == ([alone], [])
    assert (after.on_request(A, 0.0), after.on_ready(A, 1.0)) == ([], [alone])
    for policy in (ahead, after):
        assert policy.on_done(alone, True, 1.0) == []
    assert [group.why for group in ahead.on_request(A, 1.0)] == ["drawn for s0p0"]
    assert after.on_request(A, 1.0) == []
    assert [group.why for group in after.on_ready(A, 2.0)] == ["all are ready"]


class Diary(Policy):
    """Asked ahead, it sends everybody on when it is ready, and writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_request(self, worker: Worker, now: float) -> list[Group]:
        self.heard.append(f"request at {now:g}")
        return []

    def on_ready(self, worker: Worker, now: float) -> list[Group]:
        self.heard.append(f"ready at {now:g}")
        return [Group((worker,), "go")]

    def on_done(self, group: Group, ok: bool, now: float) -> list[Group]:
        self.heard.append(f"done at {now:g}")
        return []


def test_the_policy_hears_nothing_of_local_steps() -> None:
    diary = Diary()
    policy = Every(diary, 3)
    policy.on_join(A, "n0", 0.0)
    for step in range(6):
        [group] = policy.on_request(A, step) + policy.on_ready(A, step + 0.5)
        assert policy.on_done(group, True, step + 0.75) == []
    assert diary.heard == [
        *("request at 2", "ready at 2.5", "done at 2.75"),
        *("request at 5", "ready at 5.5", "done at 5.75"),
    ]


def test_a_failed_average_is_tried_again_and_not_a_section_later() -> None:
    policy = Every(AllReduce(2), 3)
    for worker in (A, B):
        policy.on_join(worker, "n0", 0.0)
    for _ in range(2):
        for worker in (A, B):
            [alone] = policy.on_ready(worker, 0.0)
            policy.on_done(alone, True, 0.0)
    for _ in range(3):
        assert policy.on_ready(A, 1.0) == []
        [group] = policy.on_ready(B, 1.0)
        assert group.members == (A, B)
        policy.on_done(group, False, 2.0)
    assert policy.on_ready(A, 1.0) == []
    [group] = policy.on_ready(B, 1.0)
    policy.on_done(group, True, 2.0)
    assert [g.members for g in policy.on_ready(A, 3.0)] == [(A,)]


def test_who_joins_averages_with_the_others_the_next_time() -> None:
    policy = Every(AllReduce(1), 4)
    policy.on_join(A, "n0", 0.0)
    for step in range(3):
        assert len(policy.on_ready(A, step)) == 1
    policy.on_join(B, "n0", 3.0)
    assert policy.on_ready(B, 3.0) == []
    assert [group.members for group in policy.on_ready(A, 4.0)] == [(A, B)]


def test_a_passive_worker_in_an_exchange_is_sent_on_by_its_end() -> None:
    policy = Every(Pairwise(), 2)
    for worker in (A, B):
        policy.on_join(worker, "n0", 0.0)
    policy.on_done(policy.on_ready(A, 1.0)[0], True, 1.0)
    [exchange] = policy.on_ready(A, 2.0)
    assert exchange.members == (A, B)
    assert policy.on_ready(B, 2.5) == []
    assert policy.on_done(exchange, True, 3.0) == []
    assert [group.members for group in policy.on_ready(B, 3.5)] == [(B,)]


def test_timers_and_leaving_reach_the_policy() -> None:
    policy = Every(AllReduce(3, startup=10.0), 1)
    for worker in (A, B):
        policy.on_join(worker, "n0", 0.0)
    assert policy.on_ready(A, 1.0) == policy.on_ready(B, 1.0) == []
    assert policy.next_timer() == 10.0
    assert [group.members for group in policy.on_timer(10.0)] == [(A, B)]
    assert policy.on_ready(A, 11.0) == []
    assert [group.members for group in policy.on_leave(B, 12.0)] == [(A,)]


def test_fewer_than_one_step_and_two_of_them_are_refused() -> None:
    with pytest.raises(PolicyError, match="every=0"):
        Every(AllReduce(1), 0)
    with pytest.raises(PolicyError, match="every=3 of a policy that has every=2 already"):
        Every(Every(AllReduce(1), 2), 3)

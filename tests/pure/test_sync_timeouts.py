"""Timeouts follow the durations of groups; queues keep one order, and always drain."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.members import GroupQueue, LearnedTimeout, Limits, MemberState, StagePolicy
from polyrhythm.sync.policy import Policy
from polyrhythm.types import Group, Seconds, Worker

TIMEOUT = LearnedTimeout(timeout_factor=10.0, floor=1.0, ceiling=60.0, current=60.0)
STAGE_POLICY = StagePolicy(Policy(), TIMEOUT, TIMEOUT, None, False, False, 0)


def timeout_of(floor: Seconds, ceiling: Seconds) -> LearnedTimeout:
    return LearnedTimeout(10.0, floor, ceiling, ceiling)


def test_timeout_starts_at_the_ceiling_then_is_ten_medians() -> None:
    timeout, rng = timeout_of(0.01, 60.0), random.Random(0)
    for _ in range(7):
        timeout.record(rng.uniform(0.9, 1.1))
        assert timeout.current == 60.0
    for _ in range(100):
        timeout.record(rng.uniform(0.9, 1.1))
    assert timeout.current == pytest.approx(10.0, rel=0.05)


def test_timeout_ignores_outliers_and_follows_lasting_changes() -> None:
    timeout = timeout_of(0.01, 60.0)
    for n in range(64):
        timeout.record(50.0 if n % 10 == 0 else 1.0)
    assert timeout.current == 10.0
    for _ in range(64):
        timeout.record(3.0)
    assert timeout.current == 30.0


@given(st.floats(0.001, 5.0))
def test_timeout_of_constant_durations_has_slack(duration: float) -> None:
    timeout = timeout_of(0.001, 60.0)
    for _ in range(20):
        timeout.record(duration)
        assert timeout.current >= 10 * duration


def test_wait_timeout_follows_the_fastest_step() -> None:
    """Other steps contain waits for each other, which must not raise the timeout."""
    wait_timeout = LearnedTimeout(3.0, 30.0, 300.0, 30.0, usual=min)
    assert wait_timeout.current == 30.0
    for _ in range(8):
        wait_timeout.record(5.0)
    assert wait_timeout.current == 30.0  # the floor
    for n in range(64):
        wait_timeout.record(40.0 if n % 10 == 0 else 200.0)
    assert wait_timeout.current == 120.0
    for _ in range(64):
        wait_timeout.record(200.0)
    assert wait_timeout.current == 300.0  # the ceiling


def test_missed_timeouts_double_and_successes_halve() -> None:
    timeout = timeout_of(1.0, 10.0)
    for _ in range(8):
        timeout.record(0.05)
    assert timeout.current == 1.0  # the floor
    found = []
    for _ in range(5):
        timeout.record_timeout()
        found.append(timeout.current)
    assert found == [2.0, 4.0, 8.0, 10.0, 10.0]
    for _ in range(5):
        timeout.record(0.05)
    assert timeout.current == 1.0


@given(st.lists(st.one_of(st.floats(0, 100), st.none()), max_size=100))
def test_timeouts_stay_within_their_bounds(story: list[float | None]) -> None:
    timeout = timeout_of(0.5, 20.0)
    for duration in story:
        if duration is None:
            timeout.record_timeout()
        else:
            timeout.record(duration)
        assert 0.5 <= timeout.current <= 20.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Limits(floor=0.0),
        lambda: Limits(floor=2.0, ceiling=1.0),
        lambda: Limits(timeout_factor=0.0),
        lambda: Limits(group_timeout_steps=0.0),
        lambda: Limits(ready_timeout=0.0),
        lambda: Limits(group_timeout=0.0),
        lambda: Limits(average_all_timeout=0.0),
        lambda: Limits(max_retries=-1),
    ],
)
def test_invalid_limits_are_refused(make: object) -> None:
    with pytest.raises(PolicyError, match=r"floor=|ready_timeout="):
        make()  # type: ignore[operator]


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=12), st.randoms())
def test_oldest_group_is_first_so_the_queue_always_drains(
    groups: list[set[int]], rng: random.Random
) -> None:
    members = [MemberState(Worker(0, pipeline)) for pipeline in range(5)]
    queue = GroupQueue(first_gid=5)
    added = []
    for group in groups:
        states = [members[pipeline] for pipeline in sorted(group)]
        workers = tuple(member.worker for member in states)
        added.append(queue.add(Group(workers, ""), states, STAGE_POLICY))
    assert [group_round.gid for group_round in added] == list(range(5, 5 + len(groups)))
    while queue.groups:
        first = [group for group in queue.groups.values() if queue.is_first(group)]
        assert min(queue.groups) in [group.gid for group in first]
        busy = [member.worker for group in first for member in group.members]
        assert len(busy) == len(set(busy))  # groups that can be open at once share no worker
        queue.remove(rng.choice(first))
    assert all(member.queue == [] for member in members)


def test_group_expires_at_its_latest_deadline_only() -> None:
    queue, member = GroupQueue(1), MemberState(Worker(0, 0))
    first, second = (
        queue.add(Group((member.worker,), ""), [member], STAGE_POLICY) for _ in range(2)
    )
    queue.set_deadline(first, 5.0)
    queue.set_deadline(second, 7.0)
    queue.set_deadline(first, 9.0)
    assert queue.next_deadline() == 7.0
    assert list(queue.expired(8.0)) == [second]
    queue.remove(second)
    assert list(queue.expired(8.9)) == []
    assert list(queue.expired(9.0)) == [first]
    queue.remove(first)
    assert queue.next_deadline() == float("inf")


@pytest.mark.parametrize(("step", "longest"), [(0.2, 2.0), (9.0, 30.0), (60.0, 180.0)])
def test_wait_for_slow_members_is_bounded(step: Seconds, longest: Seconds) -> None:
    """By ten typical steps, and by the wait of a ready worker if that is limited."""
    ready_timeout = LearnedTimeout(10.0, 1.0, 300.0, 300.0)
    wait_timeout = LearnedTimeout(3.0, 30.0, 300.0, 30.0, usual=min)
    stage_policy = StagePolicy(Policy(), TIMEOUT, ready_timeout, wait_timeout, True, False, 0)
    assert stage_policy.max_ready_wait() == 30.0
    for _ in range(8):
        stage_policy.record_step(step)
    assert stage_policy.max_ready_wait() == longest
    assert stage_policy._replace(wait_timeout=None).max_ready_wait() == min(10 * step, 300.0)

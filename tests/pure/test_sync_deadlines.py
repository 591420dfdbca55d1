"""Deadlines follow what groups take; lines keep one order, and always empty."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.deadlines import Deadlines, Limits
from polyrhythm.sync.lines import Lines
from polyrhythm.sync.member import Decider, Member
from polyrhythm.sync.policy import Policy
from polyrhythm.types import Group, Seconds, Worker

DEADLINES = Deadlines(slower=10.0, floor=1.0, ceiling=60.0, current=60.0)
DECIDER = Decider(Policy(), DEADLINES, DEADLINES, None, False, False, 0)


def deadlines_of(floor: Seconds, ceiling: Seconds) -> Deadlines:
    return Deadlines(10.0, floor, ceiling, ceiling)


def test_the_first_deadlines_are_generous_and_then_ten_times_the_median() -> None:
    deadlines, chance = deadlines_of(0.01, 60.0), random.Random(0)
    for _ in range(7):
        deadlines.made(chance.uniform(0.9, 1.1))
        assert deadlines.current == 60.0
    for _ in range(100):
        deadlines.made(chance.uniform(0.9, 1.1))
    assert deadlines.current == pytest.approx(10.0, rel=0.05)


def test_a_few_outliers_move_nothing_and_a_change_for_good_does() -> None:
    deadlines = deadlines_of(0.01, 60.0)
    for n in range(64):
        deadlines.made(50.0 if n % 10 == 0 else 1.0)
    assert deadlines.current == 10.0
    for _ in range(64):
        deadlines.made(3.0)
    assert deadlines.current == 30.0


@given(st.floats(0.001, 5.0))
def test_what_always_takes_the_same_time_has_time_to_spare(duration: float) -> None:
    deadlines = deadlines_of(0.001, 60.0)
    for _ in range(20):
        deadlines.made(duration)
        assert deadlines.current >= 10 * duration


def test_patience_in_a_pipeline_follows_the_quickest_step_from_what_it_is_at_first() -> None:
    """The others contain waits for one another, which must not feed the patience they take."""
    patience = Deadlines(3.0, 30.0, 300.0, 30.0, usual=min)
    assert patience.current == 30.0
    for _ in range(8):
        patience.made(5.0)
    assert patience.current == 30.0  # the floor
    for n in range(64):
        patience.made(40.0 if n % 10 == 0 else 200.0)
    assert patience.current == 120.0
    for _ in range(64):
        patience.made(200.0)
    assert patience.current == 300.0  # the ceiling


def test_missed_deadlines_double_up_to_the_ceiling_and_successes_undo_it() -> None:
    deadlines = deadlines_of(1.0, 10.0)
    for _ in range(8):
        deadlines.made(0.05)
    assert deadlines.current == 1.0  # the floor
    found = []
    for _ in range(5):
        deadlines.missed()
        found.append(deadlines.current)
    assert found == [2.0, 4.0, 8.0, 10.0, 10.0]
    for _ in range(5):
        deadlines.made(0.05)
    assert deadlines.current == 1.0


@given(st.lists(st.one_of(st.floats(0, 100), st.none()), max_size=100))
def test_deadlines_stay_within_their_bounds(story: list[float | None]) -> None:
    deadlines = deadlines_of(0.5, 20.0)
    for duration in story:
        if duration is None:
            deadlines.missed()
        else:
            deadlines.made(duration)
        assert 0.5 <= deadlines.current <= 20.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Limits(floor=0.0),
        lambda: Limits(floor=2.0, ceiling=1.0),
        lambda: Limits(slower=0.0),
        lambda: Limits(steps=0.0),
        lambda: Limits(readiness=0.0),
        lambda: Limits(waiting=0.0),
        lambda: Limits(gathering=0.0),
        lambda: Limits(retries=-1),
    ],
)
def test_senseless_limits_are_refused(make: object) -> None:
    with pytest.raises(PolicyError, match="leave them out"):
        make()  # type: ignore[operator]


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=12), st.randoms())
def test_the_oldest_group_is_first_so_lines_always_empty(
    groups: list[set[int]], chance: random.Random
) -> None:
    members = [Member(Worker(0, pipeline)) for pipeline in range(5)]
    lines = Lines(first_gid=5)
    added = []
    for group in groups:
        of = [members[pipeline] for pipeline in sorted(group)]
        added.append(lines.add(Group(tuple(member.worker for member in of), ""), of, DECIDER))
    assert [one.gid for one in added] == list(range(5, 5 + len(groups)))
    while lines.groups:
        first = [one for one in lines.groups.values() if lines.is_first(one)]
        assert min(lines.groups) in [one.gid for one in first]
        taken = [member.worker for one in first for member in one.members]
        assert len(taken) == len(set(taken))  # those that can be open at once share nobody
        lines.remove(chance.choice(first))
    assert all(member.line == [] for member in members)


def test_a_group_is_overdue_at_its_last_due_time_only() -> None:
    lines, member = Lines(1), Member(Worker(0, 0))
    first, second = (lines.add(Group((member.worker,), ""), [member], DECIDER) for _ in range(2))
    lines.set_due(first, 5.0)
    lines.set_due(second, 7.0)
    lines.set_due(first, 9.0)
    assert lines.next_due() == 7.0
    assert list(lines.overdue(8.0)) == [second]
    lines.remove(second)
    assert list(lines.overdue(8.9)) == []
    assert list(lines.overdue(9.0)) == [first]
    lines.remove(first)
    assert lines.next_due() == float("inf")


@pytest.mark.parametrize(("step", "longest"), [(0.2, 2.0), (9.0, 30.0), (60.0, 180.0)])
def test_an_assigned_group_waits_for_slow_members_but_not_without_end(
    step: Seconds, longest: Seconds
) -> None:
    """For ten usual steps; where it might be in vain, for no longer than a ready worker waits."""
    readiness = Deadlines(10.0, 1.0, 300.0, 300.0)
    patience = Deadlines(3.0, 30.0, 300.0, 30.0, usual=min)
    decider = Decider(Policy(), DEADLINES, readiness, patience, True, False, 0)
    assert decider.longest_wait() == 30.0
    for _ in range(8):
        decider.stepped(step)
    assert decider.longest_wait() == longest
    assert decider._replace(patience=None).longest_wait() == min(10 * step, 300.0)

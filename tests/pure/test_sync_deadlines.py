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
from polyrhythm.types import Group, Worker

LIMITS = Limits()
DEADLINES, READINESS = Deadlines(LIMITS, LIMITS.ceiling), Deadlines(LIMITS, LIMITS.readiness)
DECIDER = Decider(Policy(), DEADLINES, READINESS, False, False, 0)


def test_the_first_deadlines_are_generous_and_then_close_to_the_median() -> None:
    deadlines, chance = (
        Deadlines(Limits(floor=0.01, ceiling=60.0, spreads=5.0), 60.0),
        random.Random(0),
    )
    for _ in range(7):
        deadlines.made(chance.uniform(0.9, 1.1))
        assert deadlines.current == 60.0
    for _ in range(100):
        deadlines.made(chance.uniform(0.9, 1.1))
    assert 1.0 + 5 * 0.03 < deadlines.current < 1.0 + 5 * 0.07


def test_a_few_outliers_move_nothing_and_a_change_for_good_does() -> None:
    deadlines = Deadlines(Limits(floor=0.01, ceiling=60.0), 60.0)
    for n in range(64):
        deadlines.made(50.0 if n % 10 == 0 else 1.0)
    assert deadlines.current == 1.0
    for _ in range(64):
        deadlines.made(3.0)
    assert deadlines.current == 3.0


def test_missed_deadlines_double_up_to_the_ceiling_and_successes_undo_it() -> None:
    deadlines = Deadlines(Limits(floor=1.0, ceiling=10.0), 10.0)
    for _ in range(8):
        deadlines.made(0.5)
    assert deadlines.current == 1.0  # the floor
    found = []
    for _ in range(5):
        deadlines.missed()
        found.append(deadlines.current)
    assert found == [2.0, 4.0, 8.0, 10.0, 10.0]
    for _ in range(5):
        deadlines.made(0.5)
    assert deadlines.current == 1.0


@given(st.lists(st.one_of(st.floats(0, 100), st.none()), max_size=100))
def test_deadlines_stay_within_their_bounds(story: list[float | None]) -> None:
    deadlines = Deadlines(Limits(floor=0.5, ceiling=20.0), 20.0)
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
        lambda: Limits(spreads=0.0),
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


def test_a_member_ten_times_slower_than_the_usual_is_waited_for_and_no_longer() -> None:
    """In a pipeline two stages can wait for each other: that has to end soon, and not too soon."""
    limits = Limits(floor=0.1, readiness=300.0, slower=10.0)
    readiness = Deadlines(limits, limits.readiness, limits.slower)
    assert readiness.current == 300.0
    for _ in range(64):
        readiness.made(0.5)
    assert readiness.current == 5.0

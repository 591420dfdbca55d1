"""A cache keeps the groups that each worker used last; a hit needs all members."""

import math

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.average.group_cache import GroupCache, groups_of_age, hit_rate
from polyrhythm.describe.scenario import EVERY_DEVICE, Scenario, Slow
from polyrhythm.types import Worker

STALLS = Scenario(
    name="stalls", seed=1, slow=(Slow(device=EVERY_DEVICE, probability=0.1, sleep_factor=3.0),)
)
groups = st.lists(
    st.sets(st.integers(0, 5), min_size=2).map(lambda some: members(*sorted(some))), min_size=1
)


def members(*pipelines: int) -> tuple[Worker, ...]:
    return tuple(Worker(0, pipeline) for pipeline in pipelines)


def test_the_group_used_longest_ago_is_dropped() -> None:
    cache = GroupCache(2)
    used = [members(0, 1), members(0, 2), members(0, 1), members(0, 3), members(0, 1)]
    assert [cache.use(group) for group in used] == [False, False, True, False, True]
    assert not cache.use(members(0, 2))


def test_a_group_that_one_member_has_dropped_is_a_miss() -> None:
    cache = GroupCache(1)
    assert not cache.use(members(0, 1))
    assert not cache.use(members(1, 2))  # so worker 1 has dropped it, and worker 0 has not
    assert not cache.use(members(0, 1))
    assert cache.use(members(0, 1))


@given(groups, st.integers(1, 8))
def test_an_unbounded_cache_misses_each_group_once_and_a_larger_one_never_misses_more(
    used: list[tuple[Worker, ...]], size: int
) -> None:
    assert hit_rate(used, math.inf) == (len(used) - len(set(used))) / len(used)
    assert hit_rate(used, size) <= hit_rate(used, size + 1) <= hit_rate(used, math.inf)


def test_age_forms_groups_of_two_or_more_and_the_same_ones_for_a_seed() -> None:
    formed = list(groups_of_age(STALLS, 6, duration=40.0))
    assert formed == list(groups_of_age(STALLS, 6, duration=40.0))
    assert {worker for group in formed for worker in group} == set(members(*range(6)))
    assert all(len(group) >= 2 and list(group) == sorted(group) for group in formed)

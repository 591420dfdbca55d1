"""Random groups: drawn from all workers, in sequence where they overlap, without starvation."""

import re
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.random_groups import RandomGroups
from polyrhythm.types import Group, Worker
from tests.pure.policy_driver import job_of, random_durations

W = [Worker(0, pipeline) for pipeline in range(9)]


class ScriptedRandom:
    """Returns scripted draws."""

    def __init__(self, *draws: list[Worker]) -> None:
        self.draws = list(draws)

    def sample(self, among: list[Worker], size: int) -> list[Worker]:
        drawn = self.draws.pop(0)
        assert size == len(drawn)
        assert set(drawn) <= set(among)
        return drawn


def with_workers(policy: RandomGroups, num_workers: int) -> RandomGroups:
    for worker in W[:num_workers]:
        policy.on_join(worker, "n0", 0.0)
    return policy


def members(groups: list[Group]) -> list[tuple[int, ...]]:
    return [tuple(member.pipeline for member in group.members) for group in groups]


def test_an_overlapping_group_waits_for_the_locks_as_in_figure_8_of_the_paper() -> None:
    policy = with_workers(RandomGroups(), 9)
    policy._random = ScriptedRandom([W[4], W[5]], [W[4], W[5]], [W[1], W[2]], [W[2], W[3]])  # type: ignore[assignment]
    assert policy.on_request(W[0], 0.0) == policy.on_request(W[7], 0.0) == []
    assert policy.on_request(W[4], 0.0) == []  # draws 1, 2, and waits for group 0, 4, 5
    [first] = policy.on_request(W[5], 0.0)
    assert members([first]) == [(0, 4, 5)]
    assert policy.on_done(first, True, 1.0) == []
    assert policy.on_request(W[5], 1.0) == []
    assert members(policy.on_request(W[4], 1.0)) == [(4, 5, 7)]


def test_younger_group_passes_a_waiting_one_at_most_max_passes_times() -> None:
    policy = with_workers(RandomGroups(group_size=2, max_passes=1), 5)
    policy._random = ScriptedRandom([W[1]], [W[1]], [W[2]], [W[2]], [W[0]], [W[0]])  # type: ignore[assignment]
    assert policy.on_request(W[0], 0.0) == policy.on_request(W[2], 0.0) == []  # 0, 1 then 1, 2
    [passing] = policy.on_request(W[3], 0.0)
    assert members([passing]) == [(2, 3)]
    assert policy.on_done(passing, True, 1.0) == []
    assert policy.on_request(W[4], 1.0) == policy.on_request(W[2], 1.0) == []  # 2, 4 may not pass
    [first] = policy.on_request(W[1], 1.0)
    assert members([first]) == [(0, 1)]
    assert policy.on_done(first, True, 2.0) == []
    assert policy.on_request(W[1], 2.0) == [Group((W[1], W[2]), "drawn for s0p2, passed 1 times")]


@given(st.integers(0, 3), st.integers(0, 99), st.integers(4, 9))
def test_no_group_is_passed_more_often_than_max_passes(
    max_passes: int, seed: int, num_workers: int
) -> None:
    policy = RandomGroups(seed=seed, max_passes=max_passes)
    job = job_of(policy, [0] * num_workers, random_durations(seed), num_steps=8).run()
    passes = [int(n) for _, g in job.formed for n in re.findall(r"passed (\d+)", g.why)]
    assert all(1 <= n <= max_passes for n in passes)


def test_with_few_passes_allowed_the_limit_is_reached() -> None:
    job = job_of(RandomGroups(max_passes=2), [0] * 9, random_durations(1), num_steps=20).run()
    assert any("passed 2 times" in group.why for _, group in job.formed)


@given(st.integers(2, 5), st.integers(1, 9), st.integers(0, 99))
def test_groups_have_the_requested_size_while_all_workers_are_present(
    group_size: int, num_workers: int, seed: int
) -> None:
    policy = RandomGroups(group_size, seed=seed)
    job = job_of(policy, [0] * num_workers, random_durations(seed), num_steps=6)
    sizes = set()

    def check() -> None:
        if len(job.steps) == num_workers:
            sizes.update(len(group.members) for _, group in job.formed)

    job.check = check
    job.run()
    assert sizes <= {min(group_size, num_workers)}


def test_random_pairs_are_uniform() -> None:
    job = job_of(RandomGroups(seed=5), [0] * 6, lambda worker, step: 1.0, num_steps=400).run()
    groups = [group for _, group in job.formed if len(group.members) == 3]
    met = Counter(pair for group in groups for pair in combinations(group.members, 2))
    assert len(met) == 15
    assert min(met.values()) > 0.7 * max(met.values())


def test_a_seed_fixes_the_groups_and_another_one_changes_them() -> None:
    formed = [
        job_of(RandomGroups(seed=seed), [0] * 7, random_durations(3), 9).run().formed
        for seed in (1, 1, 2)
    ]
    assert formed[0] == formed[1] != formed[2]


def test_second_request_and_second_end_of_a_group_are_refused() -> None:
    policy = with_workers(RandomGroups(group_size=2), 2)
    policy.on_request(W[0], 0.0)
    with pytest.raises(PolicyError, match="s0p0 asks for a group before its last one is done"):
        policy.on_request(W[0], 0.0)
    [group] = policy.on_request(W[1], 0.0)
    with pytest.raises(PolicyError, match=r"s0p0 leaves during group {s0p0, s0p1}"):
        policy.on_leave(W[0], 0.0)
    policy.on_done(group, True, 1.0)
    with pytest.raises(PolicyError, match=r"{s0p0, s0p1} is done, but is not open"):
        policy.on_done(group, True, 1.0)


@pytest.mark.parametrize(("group_size", "max_passes"), [(1, 0), (0, 0), (3, -1)])
def test_invalid_random_group_sizes_are_refused(group_size: int, max_passes: int) -> None:
    with pytest.raises(PolicyError, match="fix:"):
        RandomGroups(group_size, max_passes=max_passes)

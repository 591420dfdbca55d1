"""Many workers: the default window of groups, and the default age, grow with their number."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.sync.policies.adaptive import Adaptive, UnionConnectivity, default_last_groups
from polyrhythm.sync.policies.age import Age, CausalAge, default_max_age
from tests.pure.policy_driver import train


@given(st.integers(1, 2000), st.integers(2, 20))
def test_default_last_groups_can_connect_all_workers(num_workers: int, group_size: int) -> None:
    num_groups = default_last_groups(num_workers, group_size)
    assert num_groups >= 10
    assert 1 + num_groups * (group_size - 1) >= num_workers
    assert num_groups <= default_last_groups(num_workers + 1, group_size)
    assert num_groups >= default_last_groups(num_workers, group_size + 1)
    if num_groups > 10:
        connected = 1 + (num_groups - 1) * (group_size - 1)
        assert connected < num_workers * max(1, math.log2(num_workers) / 3)


@given(st.integers(1, 2000))
def test_default_max_age_scales_with_rumour_spreading(num_workers: int) -> None:
    assert default_max_age(num_workers) <= default_max_age(num_workers + 1)
    rumour = math.log2(num_workers) + math.log(num_workers)
    assert 1.4 * rumour <= default_max_age(num_workers) <= max(10, 1.5 * rumour + 1)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8, 16])
def test_defaults_are_10_up_to_16_workers(num_workers: int) -> None:
    union, age = Adaptive(num_workers).validator, Age(num_workers).validator
    assert isinstance(union, UnionConnectivity)
    assert isinstance(age, CausalAge)
    assert (union.last_groups, age.max_age) == (10, 10)


def test_defaults_grow_with_workers_and_options_override_them() -> None:
    for num_workers, groups, updates in [(17, 11, 11), (64, 63, 15), (125, 144, 18)]:
        assert Adaptive(num_workers).validator.last_groups == groups
        assert Age(num_workers).validator.max_age == updates
        assert Adaptive(num_workers, last_groups=10).validator.last_groups == 10
        assert Age(num_workers, max_age=10).validator.max_age == 10
    assert Adaptive(64, group_size=8).validator.last_groups == 18


def share_of_enforced_groups(policy: Adaptive | Age, num_workers: int, noise: float) -> float:
    """Fraction of groups of equal workers that were enforced or waived."""
    rng = random.Random(0)
    step = lambda worker: rng.lognormvariate(0, noise)  # noqa: E731
    num_groups = 15 * num_workers
    train(policy, num_workers, step, num_groups=num_groups, averaging=0.05)
    counters = policy.counters
    assert sum(counters.values()) == num_groups
    return 1 - (counters["window"] + counters["all_ready"]) / num_groups


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("num_workers", [64, 125])
def test_equal_workers_are_rarely_enforced(num_workers: int, noise: float) -> None:
    assert share_of_enforced_groups(Adaptive(num_workers), num_workers, noise) < 0.03
    assert share_of_enforced_groups(Age(num_workers), num_workers, noise) < 0.03
    if noise > 0.02:  # else they arrive in bursts, which are large groups
        # With the bound for few workers, many groups are enforced.
        assert (
            share_of_enforced_groups(Adaptive(num_workers, last_groups=10), num_workers, noise)
            > 0.2
        )


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_equal_workers_are_rarely_enforced_with_16_workers(noise: float) -> None:
    assert share_of_enforced_groups(Adaptive(16), 16, noise) < 0.15
    assert share_of_enforced_groups(Age(16), 16, noise) < 0.03

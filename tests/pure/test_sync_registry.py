"""Policies by name: all exist, options are checked, and errors name the valid ones."""

import math

import pytest

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.adaptive import Adaptive
from polyrhythm.sync.policies.age import Age
from polyrhythm.sync.policies.all_reduce import AllReduce
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.registry import (
    POLICIES,
    default_every,
    limits_for,
    make_policies,
    make_policy,
)
from polyrhythm.sync.timeouts import Limits
from polyrhythm.sync.token import EnforcementToken
from polyrhythm.sync.validators import CausalAge, UnionConnectivity
from polyrhythm.types import Worker

NAMES = "all_reduce static random smart partial_reduce adaptive age pairwise ssp balanced local"


def test_registry_has_all_policy_names() -> None:
    assert list(POLICIES) == NAMES.split()


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_created_by_name(name: str) -> None:
    policy = make_policy(name, num_workers=4)
    assert isinstance(policy, Policy)
    assert policy.on_join(Worker(0, 0), "node", 0.0) == []


def test_options_reach_the_policy() -> None:
    policy = make_policy("adaptive", num_workers=8, options={"last_groups": 3, "window": "paper"})
    assert isinstance(policy, Adaptive)
    assert isinstance(policy.validator, UnionConnectivity)
    assert policy.validator.last_groups == 3
    policy = make_policy("age", num_workers=8, stage=2, options={"max_age": 7, "window": 1})
    assert isinstance(policy, Age)
    assert isinstance(policy.validator, CausalAge)
    assert (policy.validator.max_age, policy.stage) == (7, 2)
    assert policy.window.open(8) == 1.0


def test_stages_share_one_token_and_nothing_else() -> None:
    first, second = make_policies("age", num_stages=2, num_pipelines=4, lease=5.0)
    assert first.token is second.token
    assert first.token.lease == 5.0
    assert (first.stage, second.stage) == (0, 1)
    assert first.validator is not second.validator


def test_stages_draw_differently_and_a_seed_fixes_it() -> None:
    def seeds(seed: int) -> list[int]:
        return [p.seed for p in make_policies("random", num_stages=3, num_pipelines=4, seed=seed)]

    assert len(set(seeds(1))) == 3
    assert seeds(1) == seeds(1) != seeds(2)


def test_ssp_has_one_policy_for_all_stages() -> None:
    policies = make_policies("ssp", num_stages=3, num_pipelines=4)
    assert len(policies) == 3
    assert len({id(policy) for policy in policies}) == 1
    assert policies[0].num_workers == 12


@pytest.mark.parametrize(("staleness", "max_ahead"), [(None, 3), (0, 0), (2, 2)])
def test_default_staleness_is_the_number_of_stages(staleness: int | None, max_ahead: int) -> None:
    options = {} if staleness is None else {"staleness": staleness}
    policy, *_ = make_policies("ssp", num_stages=3, num_pipelines=2, options=options)
    for pipeline in range(2):
        for stage in range(3):
            policy.on_join(Worker(stage, pipeline), "node", 0.0)
    fast = Worker(0, 0)
    for _ in range(max_ahead):
        assert [group.members for group in policy.on_ready(fast, 1.0)] == [(fast,)]
    assert policy.on_ready(fast, 1.0) == []


def test_local_is_all_reduce_once_in_500_steps_and_the_others_average_at_each() -> None:
    assert {name: default_every(name) for name in POLICIES if default_every(name) != 1} == {
        "local": 500
    }
    assert isinstance(make_policy("local", num_workers=2), AllReduce)
    with pytest.raises(PolicyError, match="did you mean 'local'"):
        default_every("locl")


def test_unbounded_policies_get_a_group_timeout_in_pipelines() -> None:
    for name in POLICIES:
        unbounded = name in ("random", "smart", "partial_reduce", "static")
        assert limits_for(name, 1).group_timeout == math.inf
        assert limits_for(name, 2).group_timeout == (30.0 if unbounded else math.inf)
        assert limits_for(name, 2, Limits(group_timeout=7.0)).group_timeout == 7.0
        assert limits_for(name, 2).ready_timeout == Limits().ready_timeout
    with pytest.raises(PolicyError, match="did you mean 'random'"):
        limits_for("rndom", 2)


def test_exact_policies_retry_forever() -> None:
    for name in POLICIES:
        exact = name in ("all_reduce", "balanced", "local")
        for num_stages in (1, 2):
            found = limits_for(name, num_stages, Limits(max_retries=9, ceiling=7.0))
            assert found.max_retries == (math.inf if exact else 9)
            assert found.ceiling == 7.0


def test_lease_is_longer_than_any_group_timeout() -> None:
    first, *_ = make_policies("age", num_stages=2, num_pipelines=2)
    assert first.token.lease == EnforcementToken().lease > Limits().ceiling


@pytest.mark.parametrize(
    ("name", "options", "wrong", "right"),
    [
        ("adaptve", {}, "unknown policy: 'adaptve'", "did you mean 'adaptive'"),
        ("gossip", {}, "unknown policy: 'gossip'", NAMES.replace(" ", ", ")),
        ("age", {"max_agee": 1}, "unknown option of age: 'max_agee'", "did you mean 'max_age'"),
        ("age", {"num_workers": 1}, "unknown option of age", "window"),
        ("adaptive", {"last_groups": 0}, "last_groups=0", "P >= 1"),
        ("adaptive", {"last_groups": "ten"}, "last_groups='ten'", "Expected `int | null`"),
        ("adaptive", {"last_groups": 2.5}, "last_groups=2.5", "Expected `int | null`"),
        ("adaptive", {"window": "wide"}, "window='wide'", "'rate', 'paper' or a number"),
        ("adaptive", {"group_size": 9}, "group_size=9", "2 to 8"),
        ("partial_reduce", {"group_size": 9}, "group_size=9", "2 to 8"),
        ("random", {"group_size": 9}, "group_size=9", "2 to 8"),
        ("smart", {"group_size": 0}, "group_size=0", "2 to 8"),
        ("partial_reduce", {"group_size": 1}, "group_size=1", "2 to 8"),
        ("age", {"max_age": -1}, "max_age=-1", "A >= 0"),
    ],
)
def test_unknown_policies_and_options_are_refused(
    name: str, options: dict[str, object], wrong: str, right: str
) -> None:
    with pytest.raises(PolicyError) as refused:
        make_policy(name, num_workers=8, options=options)
    assert wrong in refused.value.wrong
    assert right in str(refused.value)


def test_zero_stages_or_workers_are_refused() -> None:
    with pytest.raises(PolicyError, match="num_stages=0"):
        make_policies("age", num_stages=0, num_pipelines=1)
    with pytest.raises(PolicyError, match="num_workers=0"):
        make_policies("age", num_stages=1, num_pipelines=0)

"""Sync modes: each has a record that agrees with its policy, and no other module matches names."""

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyrhythm
from polyrhythm.errors import PolicyError
from polyrhythm.sync.members import Limits
from polyrhythm.sync.modes import (
    AUTO_MODES,
    POLICIES,
    SYNC_MODES,
    SyncMode,
    make_policies,
    make_policy,
)
from polyrhythm.sync.policies.adaptive import Adaptive, UnionConnectivity
from polyrhythm.sync.policies.age import Age, CausalAge
from polyrhythm.sync.policies.all_reduce import AllReduce
from polyrhythm.sync.policies.windowed import EnforcementToken
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Group, Worker

NAMES = "all_reduce static random smart partial_reduce adaptive age pairwise ssp balanced local"
PACKAGE = Path(polyrhythm.__file__).parent
WORKERS = [Worker(0, pipeline) for pipeline in range(4)]


def test_every_mode_has_a_record() -> None:
    assert list(POLICIES) == NAMES.split()
    assert list(SYNC_MODES) == [*POLICIES, "decoupled"]
    assert all(SyncMode.named(name).name == name for name in SYNC_MODES)
    assert [SyncMode.named(name).lockstep for name in AUTO_MODES] == [True, True, False, False]


def groups_without_the_last_worker(policy: Policy, num_steps: int = 12) -> list[Group]:
    """Groups of some steps in which the last of four workers computes and never becomes ready."""
    now, groups = 0.0, list[Group]()
    for worker in WORKERS:
        policy.on_join(worker, f"node{worker.pipeline // 2}", now)
    ready = set[Worker]()
    policy.on_request(WORKERS[-1], now)
    for _ in range(num_steps):
        now += 1.0
        for worker in [worker for worker in WORKERS[:-1] if worker not in ready]:
            ready.add(worker)
            formed = policy.on_request(worker, now)
            if not any(worker in group.members for group in formed):
                formed += policy.on_ready(worker, now)
            if policy.next_timer() < math.inf:
                now = max(now, policy.next_timer())
                formed += policy.on_timer(now)
            groups += formed
            for group in formed:
                ready.difference_update(group.members)
                policy.on_done(group, True, now)
    return groups


@pytest.mark.parametrize("name", POLICIES)
def test_records_agree_with_what_policies_do(name: str) -> None:
    mode, policy = SyncMode.named(name), make_policy(name, num_workers=4)
    assert mode.asks_ahead == (type(policy).on_request is not Policy.on_request)
    stages = make_policies(name, num_stages=2, num_pipelines=4)
    assert mode.across_stages == (stages[0] is stages[1])
    groups = groups_without_the_last_worker(policy)
    assert mode.waits_for_all == (not groups), groups
    assert mode.has_server == (bool(groups) and all(len(group.members) == 1 for group in groups))
    includes_last = any(WORKERS[-1] in group.members for group in groups)
    assert mode.answers_while_computing == (includes_last and not mode.asks_ahead)


def test_each_meaning_of_lockstep_has_its_field() -> None:
    """`static` has small groups, yet all run the same number of steps; `local` is the opposite."""
    static, local = SyncMode.named("static"), SyncMode.named("local")
    assert (static.lockstep, static.waits_for_all) == (True, False)
    assert (local.lockstep, local.waits_for_all) == (False, True)
    exact = [name for name, mode in SYNC_MODES.items() if mode.exact]
    assert exact == ["all_reduce", "balanced", "decoupled"]
    for mode in SYNC_MODES.values():
        assert not (mode.exact and mode.can_overlap)
        assert mode.policy is not None or mode.decoupled


def test_after_local_steps_only_models_are_averaged() -> None:
    every_two = Setup(policy="all_reduce", num_stages=1, num_pipelines=2, every=2)
    assert (every_two.mode.averages, every_two.mode.can_overlap) == ("model", True)
    assert not every_two.mode.exact
    assert every_two.mode.waits_for_all
    assert Setup(policy="all_reduce", num_stages=1, num_pipelines=2).mode.exact
    for name, mode in SYNC_MODES.items():
        if mode.averages != "gradients":
            assert mode.after_local_steps() is mode, name
    with pytest.raises(PolicyError, match="every=2 under balanced"):
        Setup(policy="balanced", num_stages=1, num_pipelines=2, every=2)


# Words that are names of modes and mean something else there.
OTHER_MEANINGS = {("run/averaging/buffers.py", "local")}  # optimizer state that is not averaged


def names_matched(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines on which the name of a mode is compared, looked up, or kept to be compared.

    Names may be passed on (`sync="decoupled"`), and be members of an Enum, which is another
    vocabulary: that of the cost model, or of the bucket tuner.
    """
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        match node:
            case ast.Compare():
                found = [node.left, *node.comparators]
            case ast.Dict():
                found = [*node.keys]
            case ast.Set():
                found = [*node.elts]
            case ast.Subscript(value=ast.Name(id="Literal")):
                pass  # a type
            case ast.Subscript():
                found = [node.slice]
            case ast.MatchValue():
                found = [node.value]
            case ast.Call(func=ast.Attribute(attr="get" | "startswith" | "index" | "__contains__")):
                found = [*node.args]
            case ast.Call(func=ast.Name(id="frozenset" | "set")):
                found = [*node.args]
            case ast.Module():
                found = [each.value for each in node.body if isinstance(each, ast.Assign)]
        for expression in found:
            is_collection = isinstance(expression, ast.Tuple | ast.List | ast.Set)
            for each in expression.elts if is_collection else [expression]:
                if isinstance(each, ast.Constant) and each.value in SYNC_MODES:
                    yield each.lineno, str(each.value)


def test_no_module_matches_names_of_modes() -> None:
    found = [
        f"{relative}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if (relative := path.relative_to(PACKAGE).as_posix()) != "sync/modes.py"
        for line, name in names_matched(ast.parse(path.read_text()))
        if (relative, name) not in OTHER_MEANINGS
    ]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        'if mode == "adaptive": pass',
        'if mode in ("all_reduce", "balanced"): pass',
        'if mode not in {"ssp"}: pass',
        'LOCKSTEP = frozenset({"all_reduce", "static"})',
        'DECOUPLED = "decoupled"',
        'GROUPS = ("adaptive", "age")',
        'why = {"static": "no scheduler"}',
        'mode = MODES["pairwise"]',
        'mode = MODES.get("local")',
        'match mode:\n  case "ssp": pass',
    ],
)
def test_matched_names_are_found(line: str) -> None:
    assert list(names_matched(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        'def fit(sync="decoupled"): pass',
        'setup = Setup(policy="ssp")',
        'sync: Literal["all_reduce", "decoupled"] = "all_reduce"',
        'class Sync(StrEnum):\n  DECOUPLED = "decoupled"',
        'policy = "all_reduce" if mode.decoupled else mode.name',
    ],
)
def test_names_may_be_passed_on(line: str) -> None:
    assert not list(names_matched(ast.parse(line)))


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
    assert {name: mode.every for name, mode in SYNC_MODES.items() if mode.every != 1} == {
        "local": 500
    }
    assert isinstance(make_policy("local", num_workers=2), AllReduce)
    with pytest.raises(PolicyError, match="did you mean 'local'"):
        SyncMode.named("locl")


def test_unbounded_policies_get_a_group_timeout_in_pipelines() -> None:
    for name in POLICIES:
        unbounded = name in ("random", "smart", "partial_reduce", "static")
        assert SyncMode.named(name).limits(1).group_timeout == math.inf
        assert SyncMode.named(name).limits(2).group_timeout == (30.0 if unbounded else math.inf)
        assert SyncMode.named(name).limits(2, Limits(group_timeout=7.0)).group_timeout == 7.0
        assert SyncMode.named(name).limits(2).ready_timeout == Limits().ready_timeout
    with pytest.raises(PolicyError, match="did you mean 'random'"):
        SyncMode.named("rndom")


def test_exact_policies_retry_forever() -> None:
    for name in POLICIES:
        exact = name in ("all_reduce", "balanced", "local")
        for num_stages in (1, 2):
            found = SyncMode.named(name).limits(num_stages, Limits(max_retries=9, ceiling=7.0))
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

"""Groups of ready workers: no worker is left out, waits are bounded, limit cases are known."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.adaptive import Adaptive
from polyrhythm.sync.policies.age import Age
from polyrhythm.sync.policies.all_reduce import AllReduce
from polyrhythm.sync.policies.partial_reduce import PartialReduce
from polyrhythm.sync.policies.windowed import EnforcementToken
from polyrhythm.sync.policy import Policy
from polyrhythm.types import Group, Seconds, Worker
from tests.grids import num_examples
from tests.pure.policy_driver import connected, join_all, replay, train, workers

LEASE, MAX_WINDOW = 5.0, 2.0
ready_times = st.lists(st.floats(0, 100), min_size=1, max_size=8)  # index = worker
seeds = st.integers(0, 10**6)

Make = Callable[[int], Policy]
EVERY_POLICY: dict[str, Make] = {
    "all_reduce": lambda n: AllReduce(n),
    "partial_reduce": lambda n: PartialReduce(n, min(3, n), timeout=MAX_WINDOW),
    "adaptive": lambda n: Adaptive(
        n, last_groups=3, max_window=MAX_WINDOW, token=EnforcementToken(LEASE)
    ),
    "adaptive paper": lambda n: Adaptive(
        n, window="paper", max_window=MAX_WINDOW, token=EnforcementToken(LEASE)
    ),
    "age": lambda n: Age(n, max_age=2, max_window=MAX_WINDOW, token=EnforcementToken(LEASE)),
}
# Before its first measurement, the paper's window closes with the second worker.
WAITING = {name: make for name, make in EVERY_POLICY.items() if name != "adaptive paper"}
all_that_wait_for_more_than_two = pytest.mark.parametrize(
    "make", WAITING.values(), ids=WAITING.keys()
)
every_policy = pytest.mark.parametrize("make", EVERY_POLICY.values(), ids=EVERY_POLICY.keys())


def noisy(seed: int, slow: float = 1.0) -> Callable[[Worker], Seconds]:
    rng = random.Random(seed)

    def step(worker: Worker) -> Seconds:
        stall = 3 if rng.random() < 0.1 else 0
        return (slow if worker.pipeline == 0 else 1) * (rng.uniform(0.97, 1.03) + stall)

    return step


@every_policy
@given(ready_at=ready_times)
def test_a_ready_worker_is_in_one_group_with_sorted_members(
    make: Make, ready_at: list[float]
) -> None:
    formed = replay(make(len(ready_at)), ready_at)
    assert sorted(w for entry in formed for w in entry.group.members) == workers(len(ready_at))
    for entry in formed:
        assert list(entry.group.members) == sorted(entry.group.members)
        assert entry.group.why
        assert all(ready_at[pipeline] <= entry.at for pipeline in entry.pipelines)


@every_policy
@given(seed=seeds, num_workers=st.integers(1, 7))
@settings(max_examples=20)
def test_every_worker_keeps_training(make: Make, seed: int, num_workers: int) -> None:
    formed = train(make(num_workers), num_workers, noisy(seed), num_steps=15, averaging=0.05)
    steps = [pipeline for entry in formed for pipeline in entry.pipelines]
    assert sorted(steps) == sorted(list(range(num_workers)) * 15)


@pytest.mark.parametrize("name", ["adaptive", "adaptive paper", "age"])
@given(seed=seeds, num_workers=st.integers(2, 8))
@settings(max_examples=20)
def test_no_worker_waits_longer_than_a_window_and_a_lease(
    name: str, seed: int, num_workers: int
) -> None:
    step = noisy(seed, slow=50.0)  # the first worker arrives after any lease
    formed = train(EVERY_POLICY[name](num_workers), num_workers, step, num_groups=80)
    assert max(entry.waited for entry in formed) <= MAX_WINDOW + LEASE + 1e-9


@given(ready_times, st.integers(2, 5), st.floats(0.1, 10))
def test_partial_reduce_waits_at_most_its_timeout(
    ready_at: list[float], size: int, timeout: float
) -> None:
    size = min(size, len(ready_at))
    for entry in replay(PartialReduce(len(ready_at), size, timeout), ready_at):
        assert len(entry.group.members) <= size
        if len(entry.group.members) == size:
            assert entry.group.why == "full"
        assert entry.waited <= timeout + 1e-9


@given(seed=seeds, num_workers=st.integers(1, 6))
@settings(max_examples=20)
def test_an_endless_window_and_p_of_one_are_all_reduce(seed: int, num_workers: int) -> None:
    same: list[Policy] = [
        AllReduce(num_workers),
        PartialReduce(num_workers, num_workers),
        Adaptive(num_workers, window=math.inf),
        Age(num_workers, window=math.inf),
        Adaptive(num_workers, last_groups=1, window=0.0, token=EnforcementToken(1e9)),
    ]
    runs = [train(p, num_workers, noisy(seed), num_steps=8, averaging=0.1) for p in same]
    groups = [[(entry.at, entry.group.members) for entry in run] for run in runs]
    assert all(found == groups[0] for found in groups)
    assert all(members == tuple(workers(num_workers)) for _, members in groups[0])


@pytest.mark.parametrize("policy", [Adaptive, Age])
def test_no_window_and_no_validation_is_local_sgd(policy: type[Adaptive] | type[Age]) -> None:
    loose = {"last_groups": 10**9} if policy is Adaptive else {"max_age": 10**9}
    formed = train(policy(5, window=0.0, **loose), 5, noisy(1), num_steps=30)
    assert len(formed) == 150
    assert all(len(entry.group.members) == 1 and entry.waited == 0 for entry in formed)


@given(seed=seeds, num_workers=st.integers(2, 7), last_groups=st.integers(1, 6))
@settings(max_examples=num_examples(40))
def test_every_window_of_p_groups_connects_all_unless_waived(
    seed: int, num_workers: int, last_groups: int
) -> None:
    token = EnforcementToken(4.0)  # shorter than two stalls of a worker
    policy = Adaptive(num_workers, last_groups=last_groups, window=0.1, token=token)
    formed = train(policy, num_workers, noisy(seed), num_groups=120, averaging=0.05)
    waived = 0
    for last in range(last_groups - 1, len(formed)):
        window = [set(entry.pipelines) for entry in formed[last - last_groups + 1 : last + 1]]
        if not connected(window, set(range(num_workers))):
            waived += 1
            assert formed[last].group.why.startswith("waived: lacks")
    assert waived == policy.counters["waived_lease"]
    assert not policy.counters["waived_token"]


@given(seed=seeds, num_workers=st.integers(2, 7), max_age=st.integers(0, 4))
@settings(max_examples=num_examples(40))
def test_age_bound_holds_unless_waived(seed: int, num_workers: int, max_age: int) -> None:
    token = EnforcementToken(4.0)
    policy = Age(num_workers, max_age=max_age, window=0.1, token=token)
    formed = train(policy, num_workers, noisy(seed, 6.0), num_groups=120, averaging=0.0)
    clock = [0] * num_workers
    seen = [[0] * num_workers for _ in range(num_workers)]  # averaging takes no time: in order
    for entry in formed:
        for pipeline in entry.pipelines:
            clock[pipeline] += 1
            seen[pipeline] = [*seen[pipeline]]
            seen[pipeline][pipeline] = clock[pipeline]
        merged = [max(known) for known in zip(*(seen[p] for p in entry.pipelines), strict=True)]
        for pipeline in entry.pipelines:
            seen[pipeline] = merged
        oldest = max(c - known for c, known in zip(clock, merged, strict=True))
        # Averages take no time, so the clocks here are those when the group was formed.
        assert oldest <= max_age or entry.group.why.startswith("waived: lacks")


def test_enforced_group_names_the_awaited_workers() -> None:
    policy = Adaptive(4, last_groups=2, window=1.0)
    join_all(policy, 4)
    a, b, c, d = workers(4)
    assert policy.on_ready(a, 0.0) == []
    assert policy.on_ready(b, 0.5) == []
    assert policy.next_timer() == 1.0
    assert policy.on_timer(1.0) == [Group((a, b), "window of 1 s")]
    assert policy.on_ready(c, 1.5) == []
    assert policy.on_timer(2.5) == []  # {a,b} and {c} do not connect
    assert policy.token.holder == 0
    assert policy.next_timer() == 302.5  # the lease
    assert policy.on_ready(d, 3.0) == []
    (group,) = policy.on_ready(a, 4.0)
    assert group == Group((a, c, d), "waited 1.5 s for s0p0 s0p1 s0p3")
    assert policy.token.holder == -1
    assert policy.counters == {"window": 1, "enforced": 1}


def test_absent_worker_costs_one_lease_and_is_named() -> None:
    policy = Adaptive(3, last_groups=2, window=1.0, token=EnforcementToken(5.0))
    join_all(policy, 3)
    a, b, _ = workers(3)
    policy.on_ready(a, 0.0)
    policy.on_ready(b, 0.0)
    assert len(policy.on_timer(1.0)) == 1
    policy.on_ready(a, 2.0)
    policy.on_ready(b, 2.0)
    assert policy.on_timer(3.0) == []
    assert policy.next_timer() == 8.0
    assert policy.on_timer(8.0) == [Group((a, b), "waived: lacks s0p2 after 5 s")]
    assert policy.counters["waived_lease"] == 1
    assert policy.next_timer() == math.inf


@pytest.mark.parametrize(
    ("policy", "before"),
    [(Adaptive(3, last_groups=2, window=1.0), (0, 2)), (Age(3, max_age=0, window=1.0), (1,))],
    ids=["adaptive", "age"],
)
def test_death_of_the_awaited_worker_ends_enforcement(
    policy: Adaptive | Age, before: tuple[int, ...]
) -> None:
    join_all(policy, 3)
    a, b, _ = workers(3)
    for pipeline in before:  # a group without b, or an update of b alone
        policy.on_ready(Worker(0, pipeline), 0.0)
    policy.on_done(*policy.on_timer(1.0), True, 1.5)
    policy.on_ready(a, 2.0)
    assert policy.on_timer(3.0) == []
    assert policy.validator.missing_workers() == (b,)
    assert policy.token.holder == 0
    (group,) = policy.on_leave(b, 4.0)
    assert group == Group((a,), "waited 1 s for s0p1")
    assert policy.token.holder == -1


def test_token_is_released_when_the_last_ready_worker_leaves() -> None:
    policy = Adaptive(2, last_groups=1, window=1.0)
    join_all(policy, 2)
    a, b = workers(2)
    policy.on_ready(a, 0.0)
    policy.on_timer(1.0)
    assert policy.token.holder == 0
    assert policy.on_leave(a, 2.0) == []
    assert policy.token.holder == -1
    assert policy.next_timer() == math.inf
    assert [group.members for group in policy.on_ready(b, 3.0)] == [(b,)]


def test_stage_without_the_token_forms_a_waived_group() -> None:
    token = EnforcementToken(5.0)
    policy = Adaptive(2, last_groups=1, window=1.0, stage=1, token=token)
    for worker in (Worker(1, 0), Worker(1, 1)):
        policy.on_join(worker, "node", 0.0)
    assert token.acquire(0, 0.5)
    policy.on_ready(Worker(1, 0), 0.0)
    (group,) = policy.on_timer(1.0)
    assert group == Group((Worker(1, 0),), "waived: lacks s1p1, but stage 0 has the token")
    assert policy.counters["waived_token"] == 1


def test_stage_that_became_valid_withdraws_from_the_token() -> None:
    token = EnforcementToken(1000.0)
    stages = [
        Adaptive(2, last_groups=1 + stage, window=1.0, stage=stage, token=token)
        for stage in range(2)
    ]
    for stage, policy in enumerate(stages):
        for pipeline in range(2):
            policy.on_join(Worker(stage, pipeline), "node", 0.0)
    first, second = stages
    first.on_ready(Worker(0, 0), 0.0)
    first.on_timer(1.0)
    for now in (1.0, 3.0):  # the second consecutive group without the other worker is invalid
        second.on_ready(Worker(1, 0), now)
        second.on_done(*second.on_timer(now + 1), True, now + 1)
    assert second.counters["waived_token"] == 1
    assert first.on_ready(Worker(0, 1), 5.0)
    for pipeline in range(2):
        second.on_ready(Worker(1, pipeline), 6.0)
    first.on_ready(Worker(0, 0), 7.0)
    assert first.on_timer(8.0) == []  # it acquires the token again
    assert token.holder == 0


def test_no_enforcement_before_all_workers_joined() -> None:
    policy = Adaptive(3, last_groups=1, window=1.0)
    a, b, _ = workers(3)
    policy.on_join(a, "node", 0.0)
    policy.on_join(b, "node", 0.0)
    policy.on_ready(a, 0.0)
    assert policy.on_timer(1.0) == [Group((a,), "waived: 1 have yet to join")]
    assert policy.counters == {"waived_start": 1}
    assert policy.token.holder == -1


@all_that_wait_for_more_than_two
def test_startup_wait_is_bounded(make: Make) -> None:
    policy = make(3)
    if isinstance(policy, PartialReduce):
        policy = PartialReduce(3, 3, timeout=math.inf)
    a, b, c = workers(3)
    for worker in (a, b):
        policy.on_join(worker, "node", 0.0)
        assert policy.on_ready(worker, 1.0) == []
    while (timer := policy.next_timer()) < 60 and not (groups := policy.on_timer(timer)):
        pass
    if timer >= 60:
        assert timer == 60.0
        groups = policy.on_timer(60.0)
    (group,) = groups
    assert group.members == (a, b)
    policy.on_done(group, True, 60.0)
    policy.on_timer(60.0)
    # The third worker joins late and counts from now on.
    policy.on_join(c, "node", 70.0)
    assert policy.on_ready(a, 71.0) == []
    assert policy.on_ready(b, 71.0) == []
    (group,) = policy.on_ready(c, 71.0)
    assert group.members == (a, b, c)


@all_that_wait_for_more_than_two
def test_a_worker_that_leaves_is_not_waited_for(make: Make) -> None:
    policy = make(3)
    join_all(policy, 3)
    a, b, c = workers(3)
    assert policy.on_ready(a, 1.0) == []
    assert policy.on_ready(c, 2.0) == []
    assert policy.on_leave(a, 2.0) == []
    (group,) = policy.on_leave(b, 2.0)
    assert group.members == (c,)
    policy.on_done(group, True, 2.0)
    assert policy.next_timer() == math.inf
    policy.on_join(b, "node", 2.0)
    (group,) = policy.on_ready(c, 3.0) + policy.on_ready(b, 3.0)
    assert group.members == (b, c)


@every_policy
def test_invalid_calls_are_refused(make: Make) -> None:
    policy = make(2)
    join_all(policy, 2)
    unknown, known = Worker(0, 7), Worker(0, 0)
    policy.on_ready(known, 1.0)
    for misuse in (
        lambda: policy.on_ready(known, 1.0),
        lambda: policy.on_ready(unknown, 1.0),
        lambda: policy.on_leave(unknown, 1.0),
        lambda: policy.on_join(known, "node", 1.0),
    ):
        with pytest.raises(PolicyError, match="expected:"):
            misuse()


def test_failed_groups_do_not_count_as_connecting() -> None:
    policy = Adaptive(3, last_groups=2, window=1.0)
    join_all(policy, 3)
    a, b, c = workers(3)
    for worker in (a, b, c):
        groups = policy.on_ready(worker, 0.0)
    policy.on_done(groups[0], False, 1.0)
    policy.on_ready(a, 2.0)
    assert policy.on_timer(3.0) == []  # valid only if the failed group had averaged
    assert policy.token.holder == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Adaptive(4, last_groups=0),
        lambda: Adaptive(4, group_size=5),
        lambda: Adaptive(4, window=-1.0),
        lambda: Adaptive(4, window="fast"),
        lambda: Adaptive(4, max_window=0.0),
        lambda: Adaptive(0),
        lambda: Age(4, max_age=-1),
        lambda: Age(4, startup_timeout=-1.0),
        lambda: PartialReduce(4, 5),
        lambda: PartialReduce(4, 1),
        lambda: PartialReduce(4, 2, timeout=-1.0),
        lambda: AllReduce(0),
    ],
)
def test_invalid_options_are_refused(make: Callable[[], Policy]) -> None:
    with pytest.raises(PolicyError, match="fix:"):
        make()


def test_groups_never_overlap_while_they_average() -> None:
    formed = train(Adaptive(6), 6, noisy(3), num_groups=200, averaging=0.4)
    for before, after in pairwise(formed):
        assert after.at >= before.at
    for entry in formed:
        busy = [o for o in formed if entry.at < o.at < entry.at + 0.4]
        assert not any(set(o.pipelines) & set(entry.pipelines) for o in busy)

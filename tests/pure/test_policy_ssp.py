"""Bounded staleness: a worker continues if it is at most `staleness` steps ahead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.all_reduce import AllReduce
from polyrhythm.sync.policies.ssp import BoundedStaleness
from polyrhythm.types import Group, Worker

pushes = st.lists(st.integers(0, 5), max_size=60)


def joined(policy: BoundedStaleness, workers: list[Worker]) -> BoundedStaleness:
    for worker in workers:
        assert policy.on_join(worker, "n0", 0.0) == []
    return policy


def released(groups: list[Group]) -> set[Worker]:
    assert all(len(group.members) == 1 for group in groups)
    return {group.members[0] for group in groups}


@given(st.integers(1, 6), st.integers(0, 3), pushes)
def test_a_push_releases_exactly_the_workers_within_the_bound(
    num_workers: int, staleness: int, order: list[int]
) -> None:
    workers = [Worker(0, pipeline) for pipeline in range(num_workers)]
    policy = joined(BoundedStaleness(num_workers, staleness), workers)
    pushed = dict.fromkeys(workers, 0)
    held: set[Worker] = set()
    for pipeline in order:
        worker = workers[pipeline % num_workers]
        if worker in held:
            continue
        pushed[worker] += 1
        held.add(worker)
        free = {w for w in held if pushed[w] - min(pushed.values()) <= staleness}
        assert released(policy.on_ready(worker, 0.0)) == free
        held -= free
        assert max(pushed.values()) - min(pushed.values()) <= staleness + 1
        assert held != set(workers), "at least one worker can always continue"


@given(st.integers(1, 6), pushes)
def test_staleness_0_is_synchronous(num_workers: int, order: list[int]) -> None:
    workers = [Worker(0, pipeline) for pipeline in range(num_workers)]
    server = joined(BoundedStaleness(num_workers, staleness=0), workers)
    barrier = AllReduce(num_workers)
    for worker in workers:
        barrier.on_join(worker, "n0", 0.0)
    held: set[Worker] = set()
    for pipeline in order:
        worker = workers[pipeline % num_workers]
        if worker not in held:
            members = {m for group in barrier.on_ready(worker, 0.0) for m in group.members}
            assert released(server.on_ready(worker, 0.0)) == members
            held = (held | {worker}) - members


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 4), pushes)
def test_a_pipeline_is_one_virtual_worker_with_the_clock_of_its_slowest_stage(
    num_stages: int, num_pipelines: int, staleness: int, order: list[int]
) -> None:
    workers = [Worker(s, p) for p in range(num_pipelines) for s in range(num_stages)]
    policy = joined(BoundedStaleness(len(workers), staleness), workers)
    pushed = dict.fromkeys(workers, 0)
    held: set[Worker] = set()
    for index in order:
        worker = workers[index % len(workers)]
        if worker not in held:
            pushed[worker] += 1
            held = (held | {worker}) - released(policy.on_ready(worker, 0.0))
        clocks = [
            min(n for w, n in pushed.items() if w.pipeline == p) for p in range(num_pipelines)
        ]
        assert max(clocks) - min(clocks) <= staleness + 1
        assert held == {w for w in workers if pushed[w] - min(clocks) > staleness}


def test_loss_of_the_slowest_releases_others_and_a_joining_worker_starts_level() -> None:
    slow, fast, new = Worker(0, 0), Worker(0, 1), Worker(0, 2)
    policy = joined(BoundedStaleness(2, staleness=1), [slow, fast])
    assert released(policy.on_ready(fast, 0.0)) == {fast}
    assert policy.on_ready(fast, 1.0) == []
    [group] = policy.on_leave(slow, 2.0)
    assert group == Group((fast,), "0 of 1 steps ahead")
    policy.on_join(new, "n0", 3.0)
    assert released(policy.on_ready(fast, 3.0)) == {fast}
    assert released(policy.on_ready(new, 3.0)) == {new}


def test_absent_worker_counts_as_slowest_until_startup_ends() -> None:
    first = Worker(0, 0)
    policy = joined(BoundedStaleness(2, staleness=0, startup_timeout=10.0), [first])
    assert policy.on_ready(first, 1.0) == []
    assert policy.next_timer() == 10.0
    assert released(policy.on_timer(10.0)) == {first}


def test_second_push_and_negative_staleness_are_refused() -> None:
    policy = joined(BoundedStaleness(2, staleness=0), [Worker(0, 0), Worker(0, 1)])
    policy.on_ready(Worker(0, 0), 0.0)
    with pytest.raises(PolicyError, match="already ready"):
        policy.on_ready(Worker(0, 0), 0.0)
    with pytest.raises(PolicyError, match="staleness=-1"):
        BoundedStaleness(2, staleness=-1)

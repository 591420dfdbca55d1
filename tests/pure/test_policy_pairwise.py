"""Pairwise: each exchange has one active and one passive worker; no worker waits for compute."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.pairwise import Pairwise
from polyrhythm.types import Seconds, Worker
from tests.pure.policy_driver import PolicyJob, job_of, random_durations


def exchanges(job: PolicyJob) -> list[tuple[Worker, ...]]:
    return [group.members for _, group in job.formed if len(group.members) > 1]


def is_active(policy: Pairwise, worker: Worker) -> bool:
    """Whether a worker starts exchanges; a passive one answers them."""
    return worker in policy._active


@given(st.integers(1, 9), st.integers(0, 99))
def test_each_exchange_has_one_active_and_one_passive_worker(num_workers: int, seed: int) -> None:
    policy = Pairwise(seed)
    job = job_of(policy, [0] * num_workers, random_durations(seed), num_steps=8)
    seen = 0

    def check() -> None:
        nonlocal seen
        for _, group in job.formed[seen:]:
            if len(group.members) > 1 and job.steps.keys() >= set(group.members):
                assert sorted(is_active(policy, m) for m in group.members) == [False, True]
        seen = len(job.formed)

    job.check = check
    job.run()
    assert bool(exchanges(job)) == (num_workers > 1)


@given(st.integers(2, 9), st.integers(0, 99))
def test_pairwise_never_waits_for_computation(num_workers: int, seed: int) -> None:
    policy = Pairwise(seed)
    job = job_of(policy, [0] * num_workers, random_durations(seed), num_steps=8)
    job.exchange = 0.01
    job.run()
    # An active worker may wait for an exchange of each other one; compute takes 50 times that.
    longest = max(wait for waits in job.waits.values() for wait in waits)
    assert longest <= job.exchange * num_workers + 1e-9


def test_a_passive_worker_waits_for_no_more_than_the_exchange_it_is_in() -> None:
    policy = Pairwise()
    job = job_of(policy, [0] * 8, random_durations(1), num_steps=50)
    passive: dict[Worker, bool] = {}
    job.check = lambda: passive.update({w: not is_active(policy, w) for w in job.steps})
    for pipeline in range(8):
        job.at(60.0, lambda p=pipeline: job.leave(Worker(0, p)))
    job.run()
    waits = [wait for worker, ws in job.waits.items() if passive[worker] for wait in ws]
    assert sum(passive.values()) == 4
    assert 0 < max(waits) <= job.exchange
    assert sum(wait == 0 for wait in waits) > 0.4 * len(waits)


def test_slow_passive_worker_delays_nobody_and_still_averages() -> None:
    slow = Worker(0, 1)  # the second to join: passive

    def duration(worker: Worker, step: int) -> Seconds:
        return 1000.0 if worker == slow else 1.0 + 0.1 * worker.pipeline

    job = job_of(Pairwise(), [0] * 4, duration, num_steps=40)
    job.exchange = 0.1
    job.at(100.0, lambda: job.leave(slow))
    job.run()
    assert max(at for at, _ in job.formed) < 40 * (1.3 + 2 * job.exchange)
    assert sum(slow in pair for pair in exchanges(job)) > 10


def test_active_passive_pairs_are_uniform() -> None:
    job = job_of(Pairwise(seed=3), [0] * 6, lambda worker, step: 1.0, num_steps=10**6)
    for pipeline in range(6):
        job.at(400.0, lambda p=pipeline: job.leave(Worker(0, p)))
    job.run()
    met = Counter(exchanges(job))
    assert len(met) == 9
    assert min(met.values()) > 0.6 * max(met.values())


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True), st.integers(0, 99))
def test_active_and_passive_sets_stay_balanced_when_workers_leave(
    leaving: list[int], seed: int
) -> None:
    policy = Pairwise(seed)
    job = job_of(policy, [0] * 8, random_durations(seed), num_steps=10**6)
    for pipeline in leaving:
        job.at(10.0, lambda p=pipeline: job.leave(Worker(0, p)))
    sides: list[bool] = []
    job.at(60.0, lambda: sides.extend(is_active(policy, w) for w in job.steps))
    for pipeline in range(8):
        job.at(60.0, lambda p=pipeline: job.leave(Worker(0, p)))
    job.run()
    assert abs(2 * sum(sides) - len(sides)) <= 1
    late = [group for at, group in job.formed if 30 < at < 60 and len(group.members) == 2]
    assert late


def test_an_active_worker_reports_once() -> None:
    policy, workers = Pairwise(), [Worker(0, p) for p in range(3)]
    for worker in workers:
        policy.on_join(worker, "n0", 0.0)
    assert [is_active(policy, worker) for worker in workers] == [True, False, True]
    [group] = policy.on_ready(workers[0], 0.0)
    assert group.members == (workers[0], workers[1])
    assert policy.on_ready(workers[2], 0.0) == []  # the passive one is in an exchange
    assert policy.on_ready(workers[1], 0.5) == []  # it continues when the exchange ends
    with pytest.raises(PolicyError, match="s0p2 asks for a group before"):
        policy.on_ready(workers[2], 0.5)
    assert [g.members for g in policy.on_done(group, True, 1.0)] == [(workers[1], workers[2])]


def test_worker_that_left_is_not_paired() -> None:
    policy, workers = Pairwise(), [Worker(0, p) for p in range(3)]
    for worker in workers:
        policy.on_join(worker, "n0", 0.0)
    [group] = policy.on_ready(workers[0], 0.0)
    assert policy.on_ready(workers[2], 0.0) == policy.on_leave(workers[2], 0.5) == []
    assert policy.on_done(group, True, 1.0) == []

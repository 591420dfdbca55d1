"""Balanced: all micro-batches are assigned, the last worker ends early, noise changes nothing."""

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.balanced import MicrobatchBalancer, balance_microbatches
from polyrhythm.types import Worker

speeds_of = st.lists(st.integers(1, 40), min_size=1, max_size=8)
W = [Worker(0, pipeline) for pipeline in range(16)]


def optimum(speeds: list[int], num_microbatches: int, min_count: int) -> Fraction:
    """The shortest time for all micro-batches, by trying every time at which one can end."""
    ends = sorted({Fraction(n, s) for s in speeds for n in range(num_microbatches + 1)})
    for end in ends:
        can_do = [end * speed // 1 for speed in speeds]
        if min(can_do) >= min_count and sum(can_do) >= num_microbatches:
            return end
    raise AssertionError("no time is long enough")


@given(speeds_of, st.integers(0, 40), st.integers(0, 2))
def test_balanced_counts_minimize_the_last_finish_time(
    speeds: list[int], extra: int, min_count: int
) -> None:
    num_microbatches = min_count * len(speeds) + extra
    counts = balance_microbatches(speeds, num_microbatches, min_count)
    assert sum(counts) == num_microbatches
    assert min(counts) >= min_count
    end = max(Fraction(count, speed) for count, speed in zip(counts, speeds, strict=True))
    assert end == optimum(speeds, num_microbatches, min_count)
    even = Fraction(num_microbatches, sum(speeds))
    floor = max(even, Fraction(min_count, min(speeds)))
    assert end <= floor + Fraction(1, min(speeds)), "within one micro-batch of even times"


@given(st.integers(1, 8), st.integers(8, 60))
def test_equal_speeds_get_equal_shares_the_first_ones_more(num: int, num_microbatches: int) -> None:
    counts = balance_microbatches([2.5] * num, num_microbatches)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


def test_a_worker_six_times_slower_costs_one_sixteenth_not_five_sixths() -> None:
    counts = balance_microbatches([1.0] * 5 + [1 / 6] + [1.0] * 10, 256)
    assert counts[5] == 2
    assert max(counts) == 17  # proportional shares would round its 2.8 up to 3: 18 units of time


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0.01, 100)), max_size=60),
    st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=6),
)
def test_global_batch_is_constant(
    measurements: list[tuple[int, float]], present: list[set[int]]
) -> None:
    balancer = MicrobatchBalancer(24)
    for i, (pipeline, seconds) in enumerate(measurements):
        workers = [W[p] for p in sorted(present[i % len(present)])]
        counts = balancer.assign(workers)
        assert list(counts) == workers
        assert sum(counts.values()) == 24
        assert min(counts.values()) >= 1
        balancer.record(W[pipeline], max(1, counts.get(W[pipeline], 1)), seconds)


def run_balancer(
    balancer: MicrobatchBalancer, seconds: list[float], steps: int, noise: float
) -> list[dict[Worker, int]]:
    rng = random.Random(0)
    assignments = []
    for _ in range(steps):
        counts = balancer.assign(W[: len(seconds)])
        assignments.append(counts)
        for worker, count in counts.items():
            each = seconds[worker.pipeline] * (1 + noise * rng.uniform(-1, 1))
            balancer.record(worker, count, each * count)
    return assignments


def step_time(counts: dict[Worker, int], seconds: list[float]) -> float:
    return max(count * seconds[worker.pipeline] for worker, count in counts.items())


def test_noise_does_not_change_the_assignment() -> None:
    assignments = run_balancer(MicrobatchBalancer(256), [1.0] * 15 + [6.0], steps=100, noise=0.05)
    assert all(assignment == assignments[10] for assignment in assignments[10:])


def test_noise_changes_the_assignment_without_min_gain() -> None:
    assignments = run_balancer(
        MicrobatchBalancer(256, min_gain=0.0), [1.0] * 15 + [6.0], steps=100, noise=0.05
    )
    assert any(assignment != assignments[10] for assignment in assignments[10:])


@given(st.lists(st.floats(0.2, 5), min_size=2, max_size=8), st.integers(0, 7))
def test_assignment_follows_lasting_slowdowns_within_min_gain(
    seconds: list[float], which: int
) -> None:
    balancer = MicrobatchBalancer(64)
    run_balancer(balancer, seconds, steps=20, noise=0.0)
    seconds[which % len(seconds)] *= 4
    assigned = run_balancer(balancer, seconds, steps=40, noise=0.0)[-1]
    best = balance_microbatches([1 / each for each in seconds], 64)
    shortest = max(count * each for count, each in zip(best, seconds, strict=True))
    assert step_time(assigned, seconds) <= shortest / (1 - 0.05) * 1.001


def test_unmeasured_worker_gets_the_mean_speed() -> None:
    balancer = MicrobatchBalancer(12)
    assert balancer.assign(W[:2]) == {W[0]: 6, W[1]: 6}
    for worker in W[:2]:
        balancer.record(worker, 6, 6.0)
    assert balancer.assign(W[:3]) == {W[0]: 4, W[1]: 4, W[2]: 4}


def test_invalid_speeds_and_measurements_are_refused() -> None:
    for speeds, num in [([], 4), ([1.0, 0.0], 4), ([1.0, float("nan")], 4), ([1.0] * 5, 4)]:
        with pytest.raises(PolicyError, match="fix:"):
            balance_microbatches(speeds, num)
    for count, seconds in [(0, 1.0), (1, 0.0), (1, float("inf")), (1, float("nan"))]:
        with pytest.raises(PolicyError, match="s0p0 took"):
            MicrobatchBalancer(4).record(W[0], count, seconds)
    with pytest.raises(PolicyError, match="smoothing=0"):
        MicrobatchBalancer(4, smoothing=0.0)

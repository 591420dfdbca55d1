"""Balanced: all micro-batches are dealt, the last one ends as early as it can, nothing flaps."""

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.balanced import Dealer, share
from polyrhythm.types import Worker

speeds_of = st.lists(st.integers(1, 40), min_size=1, max_size=8)
W = [Worker(0, pipeline) for pipeline in range(16)]


def optimum(speeds: list[int], num_microbatches: int, least: int) -> Fraction:
    """The shortest time in which so many can be done, by trying all times at which one ends."""
    ends = sorted({Fraction(n, s) for s in speeds for n in range(num_microbatches + 1)})
    for end in ends:
        can_do = [end * speed // 1 for speed in speeds]
        if min(can_do) >= least and sum(can_do) >= num_microbatches:
            return end
    raise AssertionError("the last time is long enough for all")


@given(speeds_of, st.integers(0, 40), st.integers(0, 2))
def test_all_are_dealt_and_the_last_one_ends_as_early_as_possible(
    speeds: list[int], extra: int, least: int
) -> None:
    num_microbatches = least * len(speeds) + extra
    counts = share(speeds, num_microbatches, least)
    assert sum(counts) == num_microbatches
    assert min(counts) >= least
    took = max(Fraction(count, speed) for count, speed in zip(counts, speeds, strict=True))
    assert took == optimum(speeds, num_microbatches, least)
    even = Fraction(num_microbatches, sum(speeds))
    floor = max(even, Fraction(least, min(speeds)))
    assert took <= floor + Fraction(1, min(speeds)), "within one micro-batch of even times"


@given(st.integers(1, 8), st.integers(8, 60))
def test_equal_speeds_get_equal_shares_the_first_ones_more(num: int, num_microbatches: int) -> None:
    counts = share([2.5] * num, num_microbatches)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


def test_a_worker_six_times_slower_costs_one_sixteenth_not_five_sixths() -> None:
    counts = share([1.0] * 5 + [1 / 6] + [1.0] * 10, 256)
    assert counts[5] == 2
    assert max(counts) == 17  # proportional shares would round its 2.8 up to 3: 18 units of time


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0.01, 100)), max_size=60),
    st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=6),
)
def test_the_global_batch_is_constant_whatever_is_measured_and_whoever_is_here(
    measurements: list[tuple[int, float]], present: list[set[int]]
) -> None:
    dealer = Dealer(24)
    for i, (pipeline, seconds) in enumerate(measurements):
        workers = [W[p] for p in sorted(present[i % len(present)])]
        counts = dealer.deal(workers)
        assert list(counts) == workers
        assert sum(counts.values()) == 24
        assert min(counts.values()) >= 1
        dealer.measured(W[pipeline], max(1, counts.get(W[pipeline], 1)), seconds)


def deal_for(
    dealer: Dealer, seconds: list[float], steps: int, noise: float
) -> list[dict[Worker, int]]:
    draw = random.Random(0)
    deals = []
    for _ in range(steps):
        counts = dealer.deal(W[: len(seconds)])
        deals.append(counts)
        for worker, count in counts.items():
            each = seconds[worker.pipeline] * (1 + noise * draw.uniform(-1, 1))
            dealer.measured(worker, count, each * count)
    return deals


def step_time(counts: dict[Worker, int], seconds: list[float]) -> float:
    return max(count * seconds[worker.pipeline] for worker, count in counts.items())


def test_noise_does_not_change_a_deal() -> None:
    deals = deal_for(Dealer(256), [1.0] * 15 + [6.0], steps=100, noise=0.05)
    assert all(deal == deals[10] for deal in deals[10:])


def test_without_a_worth_the_same_noise_does_change_it() -> None:
    deals = deal_for(Dealer(256, worth=0.0), [1.0] * 15 + [6.0], steps=100, noise=0.05)
    assert any(deal != deals[10] for deal in deals[10:])


@given(st.lists(st.floats(0.2, 5), min_size=2, max_size=8), st.integers(0, 7))
def test_a_lasting_slowdown_is_followed_to_within_what_is_worth_it(
    seconds: list[float], which: int
) -> None:
    dealer = Dealer(64)
    deal_for(dealer, seconds, steps=20, noise=0.0)
    seconds[which % len(seconds)] *= 4
    dealt = deal_for(dealer, seconds, steps=40, noise=0.0)[-1]
    best = share([1 / each for each in seconds], 64)
    shortest = max(count * each for count, each in zip(best, seconds, strict=True))
    assert step_time(dealt, seconds) <= shortest / (1 - 0.05) * 1.001


def test_one_that_is_not_measured_yet_is_taken_as_typical() -> None:
    dealer = Dealer(12)
    assert dealer.deal(W[:2]) == {W[0]: 6, W[1]: 6}
    for worker in W[:2]:
        dealer.measured(worker, 6, 6.0)
    assert dealer.deal(W[:3]) == {W[0]: 4, W[1]: 4, W[2]: 4}


def test_what_cannot_be_dealt_or_measured_is_refused() -> None:
    for speeds, num in [([], 4), ([1.0, 0.0], 4), ([1.0, float("nan")], 4), ([1.0] * 5, 4)]:
        with pytest.raises(PolicyError, match="fix:"):
            share(speeds, num)
    for count, seconds in [(0, 1.0), (1, 0.0), (1, float("inf")), (1, float("nan"))]:
        with pytest.raises(PolicyError, match="s0p0 took"):
            Dealer(4).measured(W[0], count, seconds)
    with pytest.raises(PolicyError, match="smoothing=0"):
        Dealer(4, smoothing=0.0)

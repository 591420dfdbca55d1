"""Loss curves of `bench converge`: when a target is reached, and how runs are compared."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.converge.bench import median_ratio, speedup
from benchmarks.converge.loss_curves import LossCurve, smoothed

losses = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=30)


def curve(values: list[float]) -> LossCurve:
    count = len(values)
    return LossCurve(
        times=tuple(float(i + 1) for i in range(count)),
        batches=tuple(10 * (i + 1) for i in range(count)),
        losses=tuple(values),
    )


def test_a_straight_line_is_crossed_where_it_meets_the_target() -> None:
    line = curve([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0])
    assert line.time_to(5.5) == pytest.approx(4.5)
    assert line.batches_to(5.5) == pytest.approx(45)


def test_one_lucky_point_does_not_reach_a_target() -> None:
    lucky = curve([9.0, 9.0, 2.0, 9.0, 9.0, 3.0, 3.0, 3.0])
    assert lucky.time_to(4.0) > 5


@given(losses, st.floats(0.1, 10.0), st.floats(0.0, 5.0))
def test_a_lower_target_is_never_reached_sooner(
    values: list[float], target: float, lower: float
) -> None:
    found = curve(values)
    assert found.time_to(target - lower) >= found.time_to(target)


@given(losses, st.floats(0.1, 10.0))
def test_a_target_is_reached_within_the_run_or_never(values: list[float], target: float) -> None:
    found = curve(values)
    time = found.time_to(target)
    assert 1 <= time <= len(values) or time == math.inf
    assert (time == math.inf) == (min(smoothed(values)) > target)
    assert (found.batches_to(target) == math.inf) == (time == math.inf)


@given(losses)
def test_smoothing_keeps_constants_and_stays_within_the_values(values: list[float]) -> None:
    found = smoothed(values)
    assert len(found) == len(values)
    assert min(values) - 1e-9 <= min(found)
    assert max(found) <= max(values) + 1e-9
    assert smoothed([values[0]] * 5) == pytest.approx([values[0]] * 5)


def test_a_side_that_never_reaches_the_target_is_not_sooner() -> None:
    assert speedup(30.0, 20.0, slow_end=40.0) == 1.5
    assert speedup(30.0, math.inf, slow_end=40.0) == 0
    assert (
        speedup(math.inf, 20.0, slow_end=40.0) == 2
    )  # it may have come at its end, at the earliest


def test_ratios_are_between_runs_of_one_seed() -> None:
    assert median_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 2.0]) == 2.0

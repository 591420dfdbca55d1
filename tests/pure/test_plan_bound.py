"""The lower bound is never above the cost of a layout, and close to known optima."""

import numpy as np
import pytest
from hypothesis import given

from benchmarks.plan.cases import BEST, planted, published
from polyrhythm.cost.dtfm import PairTimes
from polyrhythm.plan.dtfm import bound
from polyrhythm.plan.dtfm.bound import lower_bound
from tests.pure.dtfm_cases import brute_force, small_times


@given(small_times())
def test_the_bound_is_never_above_the_best_layout(times: PairTimes) -> None:
    assert lower_bound(times) <= brute_force(times) * (1 + 1e-12)


def random_times(rng: np.random.Generator) -> PairTimes:
    """Return up to 8 devices in up to 4 regions; links by region, equal or made unequal."""
    shapes = [(1, 4), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (6, 1), (4, 1)]
    num_stages, size = shapes[rng.integers(len(shapes))]
    num_devices = num_stages * size
    region = rng.integers(rng.integers(1, 5), size=num_devices)
    link = rng.uniform(0.1, 3, (4, 4))[np.ix_(region, region)]
    link *= rng.lognormal(0, rng.choice([0, 0.3]), link.shape)
    link = np.triu(link, 1) + np.triu(link, 1).T
    return PairTimes(sync=link * rng.uniform(0, 2), hop=link, num_stages=num_stages)


@pytest.mark.long
def test_the_bound_is_below_brute_force_on_1000_clusters_and_often_meets_it() -> None:
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(1000):
        times = random_times(rng)
        shares.append(lower_bound(times) / brute_force(times))
    assert max(shares) <= 1 + 1e-12
    assert np.mean(shares) > 0.85
    assert np.mean(np.array(shares) > 1 - 1e-6) > 0.2


@pytest.mark.parametrize("name", BEST)
def test_the_gap_is_small_on_the_published_clusters(name: str) -> None:
    """For four of the five the bound equals the cost of a known layout."""
    gap = 1 - lower_bound(published(name, shuffle=0)) / BEST[name]
    assert -1e-5 < gap < (0.15 if name == "case5_worldwide" else 1e-5)


def test_the_bound_meets_a_planted_optimum() -> None:
    times, best = planted(8, 8, seed=0, depth=2)
    assert lower_bound(times) == pytest.approx(best)


def test_fewer_levels_lower_the_bound_and_keep_it_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    times = published("case5_worldwide", noise=0)
    whole = lower_bound(times)
    monkeypatch.setattr(bound, "MAX_LEVELS", 5)
    assert 0 < lower_bound(times) < whole

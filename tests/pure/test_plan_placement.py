"""The placement search: known optima, a planted one, and the same plan for the same seed."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plan.cases import BEST, planted, published
from polyrhythm.cost.dtfm import PairTimes, layout_cost
from polyrhythm.errors import PlanError
from polyrhythm.plan.dtfm.bound import lower_bound
from polyrhythm.plan.dtfm.placement import Placement, SearchEffort, place
from reproduction.dtfm.genetic import GeneticSettings, search
from tests.grids import num_examples
from tests.pure.dtfm_cases import brute_force, small_times

SHORT = SearchEffort(num_rounds=5, num_moves=20_000)


@pytest.mark.parametrize("name", BEST)
def test_the_best_known_layout_is_found_in_any_order_of_devices(name: str) -> None:
    """One seed here; `polyrhythm bench plan` has three."""
    found = place(published(name, shuffle=1), seed=1)
    assert found.cost.total <= BEST[name] + 5e-5
    assert found.proven == (name != "case5_worldwide")


@settings(max_examples=num_examples(50))
@given(small_times(), st.integers(0, 1000))
def test_small_clusters_are_placed_as_well_as_by_brute_force(times: PairTimes, seed: int) -> None:
    found = place(times, seed=seed, effort=SearchEffort(num_rounds=4, num_moves=5000))
    best = brute_force(times)
    assert best * (1 - 1e-9) <= found.cost.total <= best * 1.02
    assert found.bound <= best * (1 + 1e-9)


def test_a_seed_fixes_the_plan() -> None:
    times = published("case5_worldwide", shuffle=0, noise=0)
    first, again, other = (place(times, seed=seed, effort=SHORT) for seed in (3, 3, 4))
    assert first == again
    assert first.cost.layout != other.cost.layout


def test_a_seed_fixes_the_plan_in_another_process() -> None:
    program = """
from polyrhythm.plan.dtfm.placement import SearchEffort, place
from benchmarks.plan.cases import published
times = published("case5_worldwide", shuffle=0, noise=0)
print(place(times, seed=3, effort=SearchEffort(num_rounds=2, num_moves=5000)).cost.layout)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    times = published("case5_worldwide", shuffle=0, noise=0)
    here = place(times, seed=3, effort=SearchEffort(num_rounds=2, num_moves=5000))
    assert done.stdout == f"{here.cost.layout}\n"


@pytest.mark.long
def test_unequal_links_are_planned_far_better_than_by_the_published_search() -> None:
    """At a fifth of the published evaluations here; `polyrhythm bench plan` has them all."""
    times = published("case5_worldwide", shuffle=0, noise=0)
    reference = search(times, seed=0, settings=GeneticSettings(num_evaluations=1000)).best
    found = place(times, effort=SHORT)
    assert found.cost.total < 0.85 * reference.total
    assert lower_bound(times) <= found.cost.total


@pytest.mark.parametrize(("depth", "paired"), [(1, False), (1, True), (2, False)])
def test_a_planted_layout_of_256_devices_is_found(depth: int, paired: bool) -> None:
    times, best = planted(16, 16, seed=0, depth=depth, paired=paired)
    found = place(times, effort=SHORT)
    assert found.cost.total <= 1.05 * best


def test_each_improvement_is_reported_once_with_its_cost() -> None:
    times = published("case5_worldwide", shuffle=0, noise=1)
    improvements: list[Placement] = []
    found = place(times, effort=SHORT, on_better=improvements.append)
    totals = [placement.cost.total for placement in improvements]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)
    assert improvements[-1] == found
    assert improvements[0].why == "construction"
    assert found.why == "annealing"
    assert layout_cost(found.cost.layout, times) == found.cost


@pytest.mark.parametrize("num_stages", [1, 2, 7, 14])
def test_odd_shapes_are_placed(num_stages: int) -> None:
    rng = np.random.default_rng(0)
    weights = np.triu(rng.uniform(1, 2, (14, 14)), 1)
    times = PairTimes(sync=weights + weights.T, hop=weights + weights.T, num_stages=num_stages)
    found = place(times, effort=SHORT)
    assert found.bound <= found.cost.total * (1 + 1e-9)


def test_one_device_costs_nothing() -> None:
    alone = PairTimes(sync=np.zeros((1, 1)), hop=np.zeros((1, 1)), num_stages=1)
    found = place(alone)
    assert found.cost.layout == ((0,),)
    assert found.proven


@pytest.mark.parametrize("effort", [{"num_rounds": -1}, {"num_moves": 0}])
def test_an_impossible_effort_is_refused(effort: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="rounds"):
        SearchEffort(**effort)


def test_nothing_is_compiled_until_a_search_begins() -> None:
    program = """
import sys
import polyrhythm.plan.dtfm.placement, reproduction.dtfm.genetic, polyrhythm.plan.dtfm.exact
print("numba" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"

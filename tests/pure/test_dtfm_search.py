"""DT-FM's search: its printed moves and figures, without the defects of the published code."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan.cases import BEST, published
from polyrhythm.cost.dtfm import PairTimes, layout_cost
from polyrhythm.errors import PlanError
from reproduction.dtfm import local_search
from reproduction.dtfm.genetic import GeneticSettings, LocalSearch, crossover, replace_worst, search
from tests.pure.dtfm_cases import brute_force, small_times


def labels_for(times: PairTimes, number: int) -> np.ndarray:
    rng = np.random.default_rng(number)
    return rng.permutation(np.arange(times.num_devices) % times.num_stages)


def cut(labels: np.ndarray, weights: np.ndarray) -> float:
    return float(weights[labels[:, None] != labels].sum() / 2)


@given(small_times(), st.integers(0, 100), st.sampled_from(LocalSearch))
def test_a_local_search_leaves_groups_of_one_size(
    times: PairTimes, number: int, kind: LocalSearch
) -> None:
    labels = labels_for(times, number)
    getattr(local_search, kind)(labels, times.hop, times.num_stages)
    counts = np.bincount(labels, minlength=times.num_stages)
    assert (counts == times.num_pipelines).all()


@given(small_times(), st.integers(0, 100))
def test_kernighan_lin_never_cuts_more(times: PairTimes, number: int) -> None:
    labels = labels_for(times, number)
    before = cut(labels, times.hop)
    local_search.kernighan_lin(labels, times.hop, times.num_stages)
    assert cut(labels, times.hop) <= before + 1e-9


def test_a_pair_of_exchanged_devices_comes_from_the_fastest_links() -> None:
    """Two groups of two near devices each: both pairs are split, so pipelines use their links."""
    hop = np.full((4, 4), 9.0) - 9 * np.eye(4)
    hop[0, 1] = hop[1, 0] = hop[2, 3] = hop[3, 2] = 1.0
    labels = np.array([0, 0, 1, 1])
    local_search.circular(labels, hop, 2)
    assert labels[0] != labels[1]
    assert labels[2] != labels[3]


def test_cycle_continues_while_the_gain_grows() -> None:
    """Of three near pairs all are split by a cycle, and one stays if only two groups exchange."""
    labels = np.array([0, 0, 1, 1, 2, 2])
    hop = np.array([[1.0, 9, 11], [9, 1, 10], [11, 10, 1]])[np.ix_(labels, labels)]
    hop[0, 4:] = hop[4:, 0] = 14  # once device 0 is gone, the last group is not far from the first
    hop[1, 4:] = hop[4:, 1] = 8
    np.fill_diagonal(hop, 0)
    local_search.circular(labels, hop, 3)
    assert (labels[::2] != labels[1::2]).all()


@pytest.mark.parametrize("kind", LocalSearch)
def test_without_gain_nothing_moves(kind: LocalSearch) -> None:
    """A pass makes steps without gain, and undoes them."""
    labels = labels_for(published("case5_worldwide"), 0)
    before = labels.copy()
    getattr(local_search, kind)(labels, np.ones((64, 64)) - np.eye(64), 8)
    assert (labels == before).all()


@given(small_times(), st.integers(0, 100), st.integers(0, 8))
def test_an_offspring_has_groups_of_one_size(times: PairTimes, number: int, num_genes: int) -> None:
    first, second = labels_for(times, number), labels_for(times, number + 1)
    rng = np.random.default_rng(number)
    child = crossover(first, second, num_genes, times, rng)
    counts = np.bincount(child, minlength=times.num_stages)
    assert (counts == times.num_pipelines).all()


def test_an_offspring_is_its_second_parent_with_few_genes_of_the_first() -> None:
    times = published("case5_worldwide")
    first, second = labels_for(times, 0), labels_for(times, 1)
    child = crossover(first, second, 5, times, np.random.default_rng(0))
    assert 1 <= (child != second).sum() <= 10  # five genes, and as many to restore the sizes
    assert (crossover(first, second, 0, times, np.random.default_rng(0)) == second).all()


def test_an_offspring_takes_the_place_of_the_worst_of_all() -> None:
    """The published code lets it replace a parent only."""
    population = [np.array([number]) for number in range(3)]
    costs = [2.0, 5.0, 3.0]
    replace_worst(population, costs, np.array([3]), 6.0)
    assert costs == [2.0, 5.0, 3.0]
    replace_worst(population, costs, np.array([3]), 4.0)
    assert costs == [2.0, 4.0, 3.0]
    assert [int(labels[0]) for labels in population] == [0, 3, 2]


def test_a_search_ends_when_that_is_enough() -> None:
    times = published("case5_worldwide", noise=0)
    asked = iter([False] * 50 + [True])
    short = search(times, seed=0, settings=GeneticSettings(), should_stop=lambda: next(asked))
    assert short == search(times, seed=0, settings=GeneticSettings(num_evaluations=150))


def test_a_search_with_the_seed_of_the_shuffle_does_not_undo_it() -> None:
    """With one generator for both, the first random partition would be the unshuffled one."""
    times = published("case5_worldwide", shuffle=1)
    first = search(times, seed=1, settings=GeneticSettings(num_evaluations=100)).improvements[0]
    assert first[1] > 1.2 * BEST["case5_worldwide"]


@pytest.mark.parametrize("kind", LocalSearch)
def test_a_seed_fixes_the_search(kind: LocalSearch) -> None:
    """The published code assigns to `random.seed`, so that nothing is seeded."""
    times = published("case5_worldwide", noise=0)
    settings = GeneticSettings(num_evaluations=150, local_search=kind)
    first, again, other = (search(times, seed=s, settings=settings) for s in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_layout_costs_what_is_reported() -> None:
    """The published matching may be worse than its cost says."""
    times = published("case5_worldwide", noise=0)
    found = search(times, seed=0, settings=GeneticSettings(num_evaluations=300))
    assert layout_cost(found.best.layout, times).total == pytest.approx(found.improvements[-1][1])


def test_search_finds_and_misses_what_the_published_one_does() -> None:
    settings = GeneticSettings(num_evaluations=400)
    found = {
        name: search(published(name, shuffle=0), seed=0, settings=settings).best.total
        for name in ("case1_datacenter_ondemand", "case2_datacenter_spot", "case4_regional")
    }
    assert found["case1_datacenter_ondemand"] == pytest.approx(3.4398, abs=5e-5)
    assert found["case2_datacenter_spot"] == pytest.approx(49.504, abs=5e-4)
    assert found["case4_regional"] == pytest.approx(BEST["case4_regional"], abs=5e-5)


@given(small_times(max_devices=6))
def test_small_clusters_are_searched_well(times: PairTimes) -> None:
    settings = GeneticSettings(num_evaluations=60, population=20)
    assert search(times, seed=0, settings=settings).best.total >= brute_force(times) * (1 - 1e-9)


@pytest.mark.parametrize(("population", "num_evaluations"), [(1, 10), (20, 10)])
def test_impossible_settings_are_refused(population: int, num_evaluations: int) -> None:
    with pytest.raises(PlanError, match="population of 100"):
        GeneticSettings(population=population, num_evaluations=num_evaluations)

"""Figure 5: the best cost so far, against evaluations, of four ways to search.

`random` takes layouts as they are drawn (random_scheduler.py). The others breed 100 random
partitions (`plan/dtfm/genetic.py`) and differ in their local search: the paper's, Kernighan and
Lin's with the weight of eq. 3, and Kernighan and Lin's as the published baseline has it. That one
(scheduler_baseline.py) weighs a pair by what its activations take less what its gradients take.
Since the planner's gradients are larger, its weights are negative: it gathers what it should part.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import PUBLISHED, PairTimes, device_links, layout_cost
from polyrhythm.describe.cluster import Cluster
from polyrhythm.types import Seconds
from reproduction.dtfm.genetic import GeneticSettings, LocalSearch, crossover, replace_worst, search
from reproduction.dtfm.networks import planning_times

OURS, BASELINE, PRINTED, RANDOM = (
    "the paper's search",
    "Kernighan-Lin, published weights",
    "Kernighan-Lin, weights of eq. 3",
    "random",
)
SEEDS = (0, 1, 2)  # appendix B.1
NUM_EVALUATIONS = 300  # the published code makes 5000; all is found before 300
_POPULATION, _NUM_GENES = 100, 5

Curve = list[Seconds]  # after each evaluation


def curves(name: str, num_evaluations: int = NUM_EVALUATIONS) -> dict[str, Curve]:
    """The mean over three seeds, for one network."""
    times, baseline = planning_times(name), baseline_weights(name)
    ways: dict[str, Callable[[int], Curve]] = {
        OURS: lambda seed: _searched(times, LocalSearch.CIRCULAR, seed, num_evaluations),
        BASELINE: lambda seed: _by_baseline(times, baseline, seed, num_evaluations),
        PRINTED: lambda seed: _searched(times, LocalSearch.KERNIGHAN_LIN, seed, num_evaluations),
        RANDOM: lambda seed: _drawn(times, seed, num_evaluations),
    }
    return {
        way: np.mean([run(seed) for seed in SEEDS], axis=0).tolist() for way, run in ways.items()
    }


def baseline_weights(name: str) -> NDArray[np.float64]:
    """Of each pair: the seconds of activations less those of gradients; latencies cancel."""
    _, bandwidth = device_links(Cluster.load(name))
    weights = (PUBLISHED.activation_bytes - PUBLISHED.gradient_bytes) / bandwidth
    np.fill_diagonal(weights, 0.0)
    return weights


def _searched(
    times: PairTimes, local_search: LocalSearch, seed: int, num_evaluations: int
) -> Curve:
    settings = GeneticSettings(
        num_evaluations=num_evaluations,
        population=_POPULATION,
        num_genes=_NUM_GENES,
        local_search=local_search,
    )
    found = search(times, seed=seed, settings=settings)
    ends = [at for at, _ in found.improvements[1:]] + [num_evaluations + 1]
    steps = zip(found.improvements, ends, strict=True)
    return [cost for (begin, cost), end in steps for _ in range(begin, end)]


def _by_baseline(
    times: PairTimes, weights: NDArray[np.float64], seed: int, num_evaluations: int
) -> Curve:
    """`genetic.search` with a local search by other weights than the cost's own."""
    from polyrhythm.plan.dtfm.group_layout import partition_cost
    from polyrhythm.plan.dtfm.local_search import kernighan_lin  # compiled: imported when needed

    rng = np.random.default_rng(seed)
    population: list[NDArray[np.int64]] = []
    costs: list[Seconds] = []
    evaluated: list[Seconds] = []
    for evaluation in range(num_evaluations):
        if evaluation < _POPULATION:
            labels = rng.permutation(np.arange(times.num_devices) % times.num_stages)
        else:
            first, second = rng.choice(_POPULATION, size=2, replace=False)
            labels = crossover(population[first], population[second], _NUM_GENES, times, rng)
            kernighan_lin(labels, weights, times.num_stages)
        groups = np.argsort(labels, kind="stable").reshape(times.num_stages, -1)
        cost = partition_cost(groups, times)
        evaluated.append(cost)
        if evaluation < _POPULATION:
            population.append(labels)
            costs.append(cost)
        else:
            replace_worst(population, costs, labels, cost)
    return best_so_far(evaluated)


def _drawn(times: PairTimes, seed: int, num_evaluations: int) -> Curve:
    rng = np.random.default_rng(seed)
    shape = times.num_stages, times.num_pipelines
    layouts = (rng.permutation(times.num_devices).reshape(shape) for _ in range(num_evaluations))
    return best_so_far([layout_cost(layout.tolist(), times).total for layout in layouts])


def best_so_far(costs: Sequence[Seconds]) -> Curve:
    return list(itertools.accumulate(costs, min))

"""Figure 5: the best cost so far, by evaluations, of four searches.

`random` evaluates layouts as they are drawn (random_scheduler.py). The others run the genetic
algorithm (`genetic.py`) and differ in the local search: the paper's own, Kernighan-Lin with the
weight of eq. 3, and Kernighan-Lin as in the published baseline (scheduler_baseline.py), which
weighs a pair by the time of its activations minus that of its gradients. The planner's gradients
are larger, so these weights are negative: the baseline joins devices that it should separate.
"""

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import PUBLISHED, PairTimes, device_links, layout_cost
from polyrhythm.describe.cluster import Cluster
from polyrhythm.types import Seconds
from reproduction.dtfm.genetic import GeneticSettings, LocalSearch, search
from reproduction.dtfm.testbed import planning_times

OURS, BASELINE, PRINTED, RANDOM = (
    "the paper's search",
    "Kernighan-Lin, published weights",
    "Kernighan-Lin, weights of eq. 3",
    "random",
)
_SEEDS = (0, 1, 2)  # appendix B.1
_NUM_EVALUATIONS = 300  # the published code makes 5000; every improvement comes before 300

Curve = list[Seconds]  # best cost after each evaluation


def curves(name: str, num_evaluations: int = _NUM_EVALUATIONS) -> dict[str, Curve]:
    """The mean curves over three seeds, for one network."""
    times = planning_times(name)

    def genetic(kind: LocalSearch, weights: NDArray[np.float64] | None, seed: int) -> Curve:
        settings = GeneticSettings(num_evaluations=num_evaluations, local_search=kind)
        found = search(times, seed=seed, settings=settings, weights=weights).improvements
        ends = [start for start, _ in found[1:]] + [num_evaluations + 1]
        steps = zip(found, ends, strict=True)
        return [cost for (start, cost), end in steps for _ in range(start, end)]

    runs: dict[str, Callable[[int], Curve]] = {
        OURS: partial(genetic, LocalSearch.CIRCULAR, None),
        BASELINE: partial(genetic, LocalSearch.KERNIGHAN_LIN, baseline_weights(name)),
        PRINTED: partial(genetic, LocalSearch.KERNIGHAN_LIN, None),
        RANDOM: partial(_random_search, times, num_evaluations),
    }
    return {
        method: np.mean([run(seed) for seed in _SEEDS], axis=0).tolist()
        for method, run in runs.items()
    }


def baseline_weights(name: str) -> NDArray[np.float64]:
    """Of each pair, the seconds of activations minus those of gradients; latencies cancel."""
    _, bandwidth = device_links(Cluster.load(name))
    weights = (PUBLISHED.activation_bytes - PUBLISHED.gradient_bytes) / bandwidth
    np.fill_diagonal(weights, 0.0)
    return weights


def _random_search(times: PairTimes, num_evaluations: int, seed: int) -> Curve:
    rng = np.random.default_rng(seed)
    shape = times.num_stages, times.num_pipelines
    layouts = (rng.permutation(times.num_devices).reshape(shape) for _ in range(num_evaluations))
    costs = (layout_cost(layout.tolist(), times).total for layout in layouts)
    return list(itertools.accumulate(costs, min))

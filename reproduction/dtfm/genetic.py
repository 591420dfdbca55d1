"""DT-FM's hybrid genetic algorithm: a genetic search over partitions with a local search.

The population starts as random balanced partitions. Two parents, drawn uniformly, produce an
offspring: the second parent with a few genes (the group of a device) of the first, repaired so that
groups have equal sizes again, and improved by a local search. The offspring replaces the worst of
the population if it is better.

Source: Yuan et al., arXiv:2206.01288, section 3.4; population size, number of offspring and of
genes from the published code (DS3Lab/DT-FM, commit cda948f). Departures: defects of that code are
not repeated. It seeds nothing (`random.seed = i` replaces the function); here a seed fixes the
result. Its offspring replaces the worse parent, and the test ignores parent 2 (it compares with a
boolean); here, as printed, the worst of all is replaced. Its layout may cost more than it reports,
because a matching is taken one threshold too late; here the cost is that of the layout. It repairs
group sizes in device order, which favours the first devices; here in random order. The slow parts
are compiled, so that comparisons at equal time are fair.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import LayoutCost, PairTimes
from polyrhythm.errors import PlanError
from polyrhythm.types import Seconds

_Labels = NDArray[np.int64]  # the group of each device


class LocalSearch(StrEnum):
    CIRCULAR = "circular"
    KERNIGHAN_LIN = "kernighan_lin"  # the paper's baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneticSettings:
    num_evaluations: int = 5000  # of partitions, including the first population
    population: int = 100
    num_genes: int = 5  # that an offspring takes from its first parent
    local_search: LocalSearch = LocalSearch.CIRCULAR

    def __post_init__(self) -> None:
        if not 2 <= self.population <= self.num_evaluations:
            raise PlanError(
                f"{self.population} partitions and {self.num_evaluations} evaluations",
                expected="at least 2 partitions, and at least as many evaluations",
                fix="use a population of 100 and 5000 evaluations, as DT-FM does",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneticResult:
    best: LayoutCost
    improvements: tuple[tuple[int, Seconds], ...]  # (evaluations so far, best cost by then)


def search(
    times: PairTimes,
    *,
    seed: int,
    settings: GeneticSettings | None = None,
    weights: NDArray[np.float64] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> GeneticResult:
    """Run the genetic algorithm; stop early if `should_stop` is true before an offspring.

    The local search weighs pairs of devices by `weights` (default: the hops of `times`). Equal
    seeds give equal results.
    """
    # Compiled: imported when used.
    from polyrhythm.plan.dtfm.path import layout_of_groups, partition_cost

    settings = settings or GeneticSettings()
    weights = times.hop if weights is None else weights
    rng = np.random.default_rng(seed)
    population: list[_Labels] = []
    costs: list[Seconds] = []
    improvements: list[tuple[int, Seconds]] = []
    for evaluation in range(1, settings.num_evaluations + 1):
        if evaluation <= settings.population:
            labels = rng.permutation(np.arange(times.num_devices) % times.num_stages)
        elif should_stop():
            break
        else:
            labels = _offspring(population, times, weights, settings, rng)
        cost = partition_cost(_groups(labels, times), times)
        if not improvements or cost < improvements[-1][1]:
            improvements.append((evaluation, cost))
        if evaluation <= settings.population:
            population.append(labels)
            costs.append(cost)
        else:
            replace_worst(population, costs, labels, cost)
    best = population[int(np.argmin(costs))]
    return GeneticResult(
        best=layout_of_groups(_groups(best, times), times), improvements=tuple(improvements)
    )


def replace_worst(
    population: list[_Labels], costs: list[Seconds], labels: _Labels, cost: Seconds
) -> None:
    """Replace the worst partition of the population by a better offspring."""
    worst = int(np.argmax(costs))
    if cost < costs[worst]:
        population[worst], costs[worst] = labels, cost


def _offspring(
    population: list[_Labels],
    times: PairTimes,
    weights: NDArray[np.float64],
    settings: GeneticSettings,
    rng: np.random.Generator,
) -> _Labels:
    from reproduction.dtfm import local_search  # compiled: imported when used

    first, second = rng.choice(len(population), size=2, replace=False)
    labels = crossover(population[first], population[second], settings.num_genes, times, rng)
    is_circular = settings.local_search is LocalSearch.CIRCULAR
    improve = local_search.circular if is_circular else local_search.kernighan_lin
    improve(labels, weights, times.num_stages)
    return labels


def crossover(
    first: _Labels, second: _Labels, num_genes: int, times: PairTimes, rng: np.random.Generator
) -> _Labels:
    """Return the second parent with some genes of the first, repaired to groups of equal size."""
    genes = rng.choice(len(first), size=min(num_genes, len(first)), replace=False)
    mixed = second.copy()
    mixed[genes] = first[genes]
    labels = mixed.tolist()
    num_missing = times.num_pipelines - np.bincount(mixed, minlength=times.num_stages)
    wanted = np.repeat(np.arange(times.num_stages), np.maximum(num_missing, 0)).tolist()
    num_surplus = np.maximum(-num_missing, 0).tolist()
    for device in rng.permutation(len(labels)).tolist() if wanted else ():
        if num_surplus[labels[device]]:
            num_surplus[labels[device]] -= 1
            labels[device] = wanted.pop()
    return np.array(labels)


def _groups(labels: _Labels, times: PairTimes) -> NDArray[np.int64]:
    """One row of devices per group."""
    order = np.argsort(labels, kind="stable")
    return order.reshape(times.num_stages, times.num_pipelines)

"""DT-FM's hybrid genetic algorithm: partitions breed, a local search improves the offspring.

A population of random balanced partitions. Two parents, drawn evenly, have an offspring: the
second parent with a few genes (which group a device is in) of the first, mended so that groups
have one size again. A local search follows. The offspring takes the place of the population's
worst if it is better than that.

Source: Yuan et al., arXiv:2206.01288, section 3.4; population, number of offspring and of genes
from the published code (DS3Lab/DT-FM, commit cda948f). Departures: that code's defects are not
repeated. It seeds nothing (`random.seed = i` replaces the function); here a seed fixes the result.
It lets an offspring replace the worse parent, and ignores parent 2 in the test (it compares with a
boolean); here, as printed, the worst of all goes. Its layout may cost more than it reports, by a
matching taken one threshold too late; here the layout is what the cost says. It mends sizes in
device order, which favours the first devices; here in random order. What takes long is compiled,
so that comparisons at equal time are fair to it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import LayoutCost, PairTimes
from polyrhythm.errors import PlanError
from polyrhythm.types import Seconds

_Labels = NDArray[np.int64]  # which group each device is in


class LocalSearch(StrEnum):
    PAIRWISE = "pairwise"  # as printed
    CIRCULAR = "circular"  # its circular version, which the published code runs
    KERNIGHAN_LIN = "kernighan_lin"  # the paper's baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneticSettings:
    num_evaluations: int = 5000  # of partitions, those of the first population included
    population: int = 100
    num_genes: int = 5  # that an offspring has from its first parent
    local_search: LocalSearch = LocalSearch.CIRCULAR

    def __post_init__(self) -> None:
        if not 2 <= self.population <= self.num_evaluations:
            raise PlanError(
                f"{self.population} partitions and {self.num_evaluations} evaluations",
                expected="at least 2 parents, and one evaluation for each or more",
                fix="use a population of 100 and 5000 evaluations, as DT-FM does",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    best: LayoutCost
    improvements: tuple[tuple[int, Seconds], ...]  # (evaluations so far, best cost by then)


def search(
    times: PairTimes,
    *,
    seed: int,
    settings: GeneticSettings | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> Found:
    """Run the genetic algorithm, which ends early if `enough`, asked before each offspring.

    Equal seeds give equal results.
    """
    from polyrhythm.plan.dtfm.group_layout import (  # compiled: imported when needed
        layout_of_groups,
        partition_cost,
    )

    settings = settings or GeneticSettings()
    rng = np.random.default_rng(seed)
    population: list[_Labels] = []
    costs: list[Seconds] = []
    improvements: list[tuple[int, Seconds]] = []
    for evaluation in range(1, settings.num_evaluations + 1):
        if evaluation <= settings.population:
            labels = rng.permutation(np.arange(times.num_devices) % times.num_stages)
        elif enough():
            break
        else:
            labels = _offspring(population, times, settings, rng)
        cost = partition_cost(_groups(labels, times), times)
        if not improvements or cost < improvements[-1][1]:
            improvements.append((evaluation, cost))
        if evaluation <= settings.population:
            population.append(labels)
            costs.append(cost)
        else:
            replace_worst(population, costs, labels, cost)
    best = population[int(np.argmin(costs))]
    return Found(
        best=layout_of_groups(_groups(best, times), times), improvements=tuple(improvements)
    )


def replace_worst(
    population: list[_Labels], costs: list[Seconds], labels: _Labels, cost: Seconds
) -> None:
    """The offspring takes the place of the worst of all, if it is better than that."""
    worst = int(np.argmax(costs))
    if cost < costs[worst]:
        population[worst], costs[worst] = labels, cost


def _offspring(
    population: list[_Labels], times: PairTimes, settings: GeneticSettings, rng: np.random.Generator
) -> _Labels:
    from polyrhythm.plan.dtfm import local_search  # compiled: imported when needed

    first, second = rng.choice(len(population), size=2, replace=False)
    labels = crossover(population[first], population[second], settings.num_genes, times, rng)
    improve = {
        LocalSearch.PAIRWISE: local_search.pairwise,
        LocalSearch.CIRCULAR: local_search.circular,
        LocalSearch.KERNIGHAN_LIN: local_search.kernighan_lin,
    }[settings.local_search]
    improve(labels, times.hop, times.num_stages)
    return labels


def crossover(
    first: _Labels, second: _Labels, num_genes: int, times: PairTimes, rng: np.random.Generator
) -> _Labels:
    """The second parent with some genes of the first; groups of one size."""
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

"""Placement by DT-FM's cost: known optima, unequal links against DT-FM's search, 512 devices.

Times are CPU seconds of this process, which runs one thread; what has to be compiled is before the
first of them. DT-FM's search is ours of its paper, compiled as well (`plan/dtfm`).
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.plan.cases import BEST, ROUNDING, WORLDWIDE, planted, published
from polyrhythm.cost.dtfm import PairTimes
from polyrhythm.plan.dtfm.exact import search_exactly
from polyrhythm.plan.dtfm.placement import SearchEffort, place
from polyrhythm.types import Seconds
from reproduction.dtfm.genetic import GeneticSettings, search

BARS: Mapping[str, float] = {
    "optima": 15,
    "cpu_s": 2.0,
    "noisy": 0.15,
    "noisy_equal_cpu": 0.20,
    "n512_s": 30.0,
    "n512_gap": 0.05,
}
_Result = TypeVar("_Result")

AT_MOST = ("cpu_s", "n512_s", "n512_gap")  # where less is better


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRow:
    """A cluster whose best cost is known: one of the five, or a planted one."""

    case: str
    seed: int
    cost: Seconds
    best: Seconds
    gap_to_bound: float
    found_by: str
    cpu: Seconds

    @property
    def reached(self) -> bool:
        return self.cost <= self.best + ROUNDING

    @property
    def gap(self) -> float:
        return self.cost / self.best - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyRow:
    """The world-wide cluster with unequal links: ours and DT-FM's."""

    seed: int
    cost: Seconds
    gap_to_bound: float
    cpu: Seconds
    dtfm_cost: Seconds
    dtfm_cpu: Seconds
    dtfm_cost_equal_cpu: Seconds  # in as much time as ours took

    @property
    def below(self) -> float:
        return 1 - self.cost / self.dtfm_cost

    @property
    def below_equal_cpu(self) -> float:
        return 1 - self.cost / self.dtfm_cost_equal_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class DtfmRows:
    optima: tuple[PlacedRow, ...]
    noisy: tuple[NoisyRow, ...]
    large: tuple[PlacedRow, ...]

    def ratios(self) -> dict[str, float]:
        return {
            "optima": sum(row.reached for row in self.optima),
            "cpu_s": max(row.cpu for row in self.optima),
            "noisy": statistics.mean(row.below for row in self.noisy),
            "noisy_equal_cpu": statistics.mean(row.below_equal_cpu for row in self.noisy),
            "n512_s": max(row.cpu for row in self.large),
            "n512_gap": max(row.gap for row in self.large),
        }

    def figures(self) -> dict[str, float]:
        """How far from the lower bound, at most."""
        gaps = {row.case.split("_")[0]: row.gap_to_bound for row in self.optima}
        return {
            **{f"bound_gap_{case}": gap for case, gap in gaps.items()},
            "bound_gap_noisy": max(row.gap_to_bound for row in self.noisy),
            "bound_gap_n512": max(row.gap_to_bound for row in self.large),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What to measure; planted clusters by how many stages a region has, and whether paired."""

    seeds: tuple[int, ...]
    noisy_seeds: tuple[int, ...]
    effort: SearchEffort
    num_evaluations: int  # of DT-FM's search
    large: tuple[tuple[int, bool], ...]


_FULL = _Plan(
    seeds=(0, 1, 2),
    noisy_seeds=(0, 1, 2, 3, 4),
    effort=SearchEffort(),
    num_evaluations=5000,
    large=((1, True), (2, False), (2, True)),
)
_QUICK = _Plan(
    seeds=(0,),
    noisy_seeds=(0,),
    effort=SearchEffort(num_rounds=2, num_moves=50_000),
    num_evaluations=500,
    large=((1, True),),
)


def measure_dtfm(*, quick: bool, on_progress: Callable[[str], None]) -> DtfmRows:
    """All of it; `on_progress` hears a line after each part."""
    plan = _QUICK if quick else _FULL
    _warm_up()
    optima = []
    for name in BEST:
        optima += [_known(name, seed, plan.effort) for seed in plan.seeds]
        on_progress(f"{name}: {sum(row.reached for row in optima)} of {len(optima)} optima so far")
    noisy = []
    for seed in plan.noisy_seeds:
        noisy.append(_noisy(seed, plan))
        on_progress(f"unequal links, seed {seed}: {noisy[-1].below:.3f} below DT-FM's search")
    large = []
    for row in _large(plan):
        large.append(row)
        on_progress(f"{row.case}: {row.gap:.4f} above the best")
    return DtfmRows(optima=tuple(optima), noisy=tuple(noisy), large=tuple(large))


def _warm_up() -> None:
    """Compile, or load what is compiled."""
    times = published(WORLDWIDE, noise=0)
    place(times, effort=SearchEffort(num_rounds=1, num_moves=100))
    place(published(WORLDWIDE, num_stages=16), effort=SearchEffort(num_rounds=0))
    search(times, seed=0, settings=GeneticSettings(population=2, num_evaluations=3))
    search_exactly(published("case3_multi_datacenter"))


def _known(name: str, seed: int, effort: SearchEffort) -> PlacedRow:
    return _placed(name, published(name, shuffle=seed), BEST[name], seed, effort)


def _large(plan: _Plan) -> Iterator[PlacedRow]:
    for depth, paired in plan.large:
        times, best = planted(32, 16, seed=1, depth=depth, paired=paired)
        name = f"512 devices, {depth} x {16 // depth} a region{', paired' if paired else ''}"
        yield _placed(name, times, best, 1, plan.effort)


def _placed(
    case: str, times: PairTimes, best: Seconds, seed: int, effort: SearchEffort
) -> PlacedRow:
    found, cpu = _timed(lambda: place(times, seed=seed, effort=effort))
    return PlacedRow(
        case=case,
        seed=seed,
        cost=found.cost.total,
        best=best,
        gap_to_bound=found.gap,
        found_by=found.why,
        cpu=cpu,
    )


def _noisy(seed: int, plan: _Plan) -> NoisyRow:
    times = published(WORLDWIDE, shuffle=seed, noise=seed)
    found, cpu = _timed(lambda: place(times, seed=seed, effort=plan.effort))
    settings = GeneticSettings(num_evaluations=plan.num_evaluations)
    dtfm, dtfm_cpu = _timed(lambda: search(times, seed=seed, settings=settings))
    began = time.process_time()
    equal = search(
        times,
        seed=seed,
        settings=GeneticSettings(num_evaluations=10**9),
        enough=lambda: time.process_time() - began >= cpu,
    )
    return NoisyRow(
        seed=seed,
        cost=found.cost.total,
        gap_to_bound=found.gap,
        cpu=cpu,
        dtfm_cost=dtfm.best.total,
        dtfm_cpu=dtfm_cpu,
        dtfm_cost_equal_cpu=equal.best.total,
    )


def _timed(run: Callable[[], _Result]) -> tuple[_Result, Seconds]:
    began = time.process_time()
    return run(), time.process_time() - began

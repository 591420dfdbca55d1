"""Placements by DT-FM's cost, and by the simulated time of a step.

By DT-FM's cost: known optima, unequal links against DT-FM's search, 512 devices. Times are CPU
seconds of this process, which runs one thread; all code is compiled before the first of them.
DT-FM's search is our implementation of its paper (`reproduction/dtfm`), compiled as well.

By simulated steps: our placement, DT-FM's and random ones. DT-FM's is the best layout by its own
cost and its planner's constants, which are the same for every workload; it has eight stages and
eight pipelines, as its authors use it. Ours has the same degrees and equal pipelines: only the
places of the devices differ, and the cuts by a layer or two. Schedules are chosen for each of them
alike. Gradients are exchanged over all links at once, as we do; or in a ring; or with one peer
after the other, as DT-FM assumes (`vs_dtfm`).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from benchmarks.plan import cases
from polyrhythm.cost.dtfm import PairTimes
from polyrhythm.cost.sync import Sync
from polyrhythm.describe.cluster import Cluster
from polyrhythm.plan.dtfm.exact import search_exactly
from polyrhythm.plan.dtfm.placement import SearchEffort, place
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.predict import predict
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.search import search_plan
from polyrhythm.types import Seconds
from reproduction.dtfm.genetic import GeneticSettings, search

DEGREE = 8  # number of stages, and of pipelines
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """A cluster whose best cost is known: one of DT-FM's five, or a planted one."""

    case: str
    seed: int
    cost: Seconds
    best: Seconds
    gap_to_bound: float
    found_by: str
    cpu: Seconds

    @property
    def is_optimal(self) -> bool:
        return self.cost <= self.best + cases.ROUNDING

    @property
    def gap(self) -> float:
        return self.cost / self.best - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyRow:
    """The world-wide cluster with unequal links: our search and DT-FM's."""

    seed: int
    cost: Seconds
    gap_to_bound: float
    cpu: Seconds
    dtfm_cost: Seconds
    dtfm_cpu: Seconds
    dtfm_cost_equal_cpu: Seconds  # in the CPU time of our search

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
            "optima": sum(row.is_optimal for row in self.optima),
            "cpu_s": max(row.cpu for row in self.optima),
            "noisy": statistics.mean(row.below for row in self.noisy),
            "noisy_equal_cpu": statistics.mean(row.below_equal_cpu for row in self.noisy),
            "n512_s": max(row.cpu for row in self.large),
            "n512_gap": max(row.gap for row in self.large),
        }

    def figures(self) -> dict[str, float]:
        """Return the largest distances from the lower bound."""
        gaps = {row.case.split("_")[0]: row.gap_to_bound for row in self.optima}
        return {
            **{f"bound_gap_{case}": gap for case, gap in gaps.items()},
            "bound_gap_noisy": max(row.gap_to_bound for row in self.noisy),
            "bound_gap_n512": max(row.gap_to_bound for row in self.large),
        }


# Seeds, seeds of unequal links, effort, evaluations of DT-FM's search, and planted clusters: the
# stages of a region, and whether paired.
FULL = ((0, 1, 2), (0, 1, 2, 3, 4), SearchEffort(), 5000, ((1, True), (2, False), (2, True)))
QUICK = ((0,), (0,), SearchEffort(num_rounds=2, num_moves=50_000), 500, ((1, True),))


def dtfm_rows(*, quick: bool, on_progress: Callable[[str], None]) -> DtfmRows:
    """Search all placements by DT-FM's cost."""
    seeds, noisy_seeds, effort, num_evaluations, regions = QUICK if quick else FULL
    _compile()
    optima: list[PlacedRow] = []
    for name in cases.BEST:
        for seed in seeds:
            times = cases.published(name, shuffle=seed)
            optima.append(_placed(name, times, cases.BEST[name], seed, effort))
        on_progress(f"{name}: {sum(r.is_optimal for r in optima)} of {len(optima)} optima so far")
    noisy: list[NoisyRow] = []
    for seed in noisy_seeds:
        noisy.append(_noisy(seed, effort, num_evaluations))
        on_progress(f"unequal links, seed {seed}: {noisy[-1].below:.3f} below DT-FM's search")
    large: list[PlacedRow] = []
    for depth, paired in regions:
        times, best = cases.planted(32, 16, seed=1, depth=depth, paired=paired)
        name = f"512 devices, {depth} x {16 // depth} a region{', paired' if paired else ''}"
        large.append(_placed(name, times, best, 1, effort))
        on_progress(f"{name}: {large[-1].gap:.4f} above the best")
    return DtfmRows(optima=tuple(optima), noisy=tuple(noisy), large=tuple(large))


def _compile() -> None:
    """Compile, or load the compiled code."""
    times = cases.published(cases.WORLDWIDE, noise=0)
    place(times, effort=SearchEffort(num_rounds=1, num_moves=100))
    place(cases.published(cases.WORLDWIDE, num_stages=16), effort=SearchEffort(num_rounds=0))
    search(times, seed=0, settings=GeneticSettings(population=2, num_evaluations=3))
    search_exactly(cases.published("case3_multi_datacenter"))


def _placed(
    case: str, times: PairTimes, best: Seconds, seed: int, effort: SearchEffort
) -> PlacedRow:
    found, cpu = _timed(lambda: place(times, seed=seed, effort=effort))
    return PlacedRow(case, seed, found.cost.total, best, found.gap, found.why, cpu)


def _noisy(seed: int, effort: SearchEffort, num_evaluations: int) -> NoisyRow:
    times = cases.published(cases.WORLDWIDE, shuffle=seed, noise=seed)
    found, cpu = _timed(lambda: place(times, seed=seed, effort=effort))
    settings = GeneticSettings(num_evaluations=num_evaluations)
    dtfm, dtfm_cpu = _timed(lambda: search(times, seed=seed, settings=settings))
    start = time.process_time()
    equal = search(
        times,
        seed=seed,
        settings=GeneticSettings(num_evaluations=10**9),
        should_stop=lambda: time.process_time() - start >= cpu,
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


def _timed(run: Callable[[], T]) -> tuple[T, Seconds]:
    start = time.process_time()
    return run(), time.process_time() - start


@dataclass(frozen=True, slots=True)
class Gpt3Workload:
    """GPT3-XL with more or fewer layers."""

    num_layers: int
    batch: int  # sequences
    gradient_bytes: int = 2  # per parameter: 2 in fp16, 4 in fp32

    def __str__(self) -> str:
        kind = "fp16" if self.gradient_bytes == 2 else "fp32"
        return f"{self.num_layers} layers, batch {self.batch}, {kind} gradients"

    def problem(self, cluster: Cluster, sync: Sync) -> Problem:
        return Problem(
            cluster=cluster,
            profile=cases.equal_layers(  # activations are kept, the rest is computed again
                "gpt3-xl",
                self.num_layers,
                cases.XL_FORWARD,
                cases.XL_PARAMETERS * 2,
                cases.XL_ACTIVATIONS,
                stored_bytes=cases.XL_ACTIVATIONS,
            ),
            job=TrainingJob(
                batch_size=self.batch,
                sync=sync,
                gradient_bytes=self.gradient_bytes / 2,
                num_stages=DEGREE,
                num_pipelines=DEGREE,
                unequal=False,
            ),
        )


PUBLISHED_WORKLOADS = tuple(
    Gpt3Workload(layers, batch) for layers in (24, 32, 40) for batch in (1024, 2048, 4096)
)
PLANNERS_WORKLOAD = Gpt3Workload(24, 61 * DEGREE, gradient_bytes=4)  # 61 micro-batches per pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Simulated steps of three placements of one workload on one cluster."""

    case: str
    workload: Gpt3Workload
    sync: Sync
    ours: Seconds
    dtfm: Seconds
    random: Seconds | None = None  # mean over a few random placements

    @property
    def vs_dtfm(self) -> float:
        return self.dtfm / self.ours

    @property
    def vs_random(self) -> float | None:
        return None if self.random is None else self.random / self.ours


def step_rows(*, quick: bool, on_progress: Callable[[str], None]) -> list[StepRow]:
    published = PUBLISHED_WORKLOADS[:1] if quick else PUBLISHED_WORKLOADS
    workloads = [(workload, Sync.ALL_REDUCE) for workload in published]
    for sync in (Sync.ALL_REDUCE, Sync.RING, Sync.SEQUENTIAL):
        workloads.append((PLANNERS_WORKLOAD, sync))
    rows = []
    for case in [cases.WORLDWIDE] if quick else cases.BEST:
        layout = [list(row) for row in place(cases.published(case), seed=0).cost.layout]
        for workload, sync in workloads:
            row = _step_row(case, workload, sync, layout, num_random=1 if quick else 5)
            on_progress(f"{case}, {workload}, {sync}: {row.vs_dtfm:.3f} of DT-FM's plan")
            rows.append(row)
    return rows


def step_ratios(rows: Sequence[StepRow]) -> dict[str, float]:
    world = [row for row in rows if row.case == cases.WORLDWIDE]
    against_random = [row.vs_random for row in world if row.vs_random is not None]
    first = next(row for row in world if row.workload == PUBLISHED_WORKLOADS[0])
    planners = {row.sync: row for row in world if row.workload == PLANNERS_WORKLOAD}
    assert first.vs_random is not None, "random placements are for the world-wide cluster"
    return {
        "vs_random": first.vs_random,
        "vs_random_worst": min(against_random),
        "vs_dtfm": planners[Sync.SEQUENTIAL].vs_dtfm,
        "vs_dtfm_ring": planners[Sync.RING].vs_dtfm,
        "vs_dtfm_all_reduce": planners[Sync.ALL_REDUCE].vs_dtfm,
        "vs_dtfm_worst": min(row.vs_dtfm for row in rows),
        "vs_dtfm_exchange": planners[Sync.SEQUENTIAL].dtfm / planners[Sync.ALL_REDUCE].ours,
    }


def _step_row(
    case: str, workload: Gpt3Workload, sync: Sync, layout: list[list[int]], *, num_random: int
) -> StepRow:
    problem = workload.problem(Cluster.load(case), sync)
    rng = np.random.default_rng(0)
    size = (DEGREE, DEGREE)
    random = [rng.permutation(DEGREE**2).reshape(size).tolist() for _ in range(num_random)]
    is_world = case == cases.WORLDWIDE
    return StepRow(
        case=case,
        workload=workload,
        sync=sync,
        ours=search_plan(problem).best.time.total,
        dtfm=_step(layout, problem),
        random=statistics.fmean(_step(each, problem) for each in random) if is_world else None,
    )


def _step(layout: list[list[int]], problem: Problem) -> Seconds:
    """Simulate a step of a layout[stage][pipeline]."""
    names = list(problem.index)
    devices = [names[device] for column in zip(*layout, strict=True) for device in column]
    num_layers, num_microbatches = problem.num_layers, problem.job.batch_size // DEGREE
    plan = cases.equal_pipelines(
        devices, num_layers, DEGREE, num_microbatches, sync=problem.job.sync
    )
    return predict(plan, problem).time.total

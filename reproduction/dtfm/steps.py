"""Figures 4 and 6: the step times of DT-FM, of DT-FM with random layouts, and of Megatron."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from polyrhythm.plan.dtfm.placement import place
from polyrhythm.types import Seconds
from reproduction.dtfm import systems, testbed
from reproduction.dtfm.systems import ALL_DEGREES, Degrees, Iteration
from reproduction.dtfm.testbed import SEEDS, WORKLOADS, DtfmNetwork, GptWorkload, Layout

_T = TypeVar("_T")
Steps = Mapping[GptWorkload, Seconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSteps:
    """Step times on one network; random layouts are averaged over three draws."""

    planned_cost: Seconds  # of the layout, by the planner
    scheduled: Steps
    scheduled_pipeline: Steps  # the part until the last backward
    at_random: Steps
    megatron: Steps  # with the best degrees of each workload
    best_degrees: Degrees  # of Megatron, for most workloads
    launched: Steps  # Megatron with consecutive ranks in each machine
    best_launched: Degrees
    overlapped: Steps  # DT-FM if messages hid behind compute
    random_overlapped: Steps


def case_steps(network: DtfmNetwork, workloads: Sequence[GptWorkload] = WORKLOADS) -> CaseSteps:
    """Run all systems on one network.

    The layout is the best by the paper's cost. The paper's search finds it as well except in case
    2, where it is the published layout (`optimal_assignment_2` of generate_assignment.py).
    """
    cost = place(testbed.planning_times(network.name)).cost
    drawn = [testbed.random_layout(seed) for seed in SEEDS]
    megatron, best_degrees = _megatron(
        [testbed.random_order(seed) for seed in SEEDS], network, workloads
    )
    launched, best_launched = _megatron(
        [testbed.launcher_order(seed, network) for seed in SEEDS], network, workloads
    )
    scheduled = _iterations(cost.layout, network, workloads)
    return CaseSteps(
        planned_cost=cost.total,
        scheduled={workload: run.total for workload, run in scheduled.items()},
        scheduled_pipeline={workload: run.pipeline for workload, run in scheduled.items()},
        at_random=_dtfm(drawn, network, workloads),
        megatron=megatron,
        best_degrees=best_degrees,
        launched=launched,
        best_launched=best_launched,
        overlapped=_dtfm([cost.layout], network, workloads, overlap=True),
        random_overlapped=_dtfm(drawn, network, workloads, overlap=True),
    )


def ratios(above: Steps, below: Steps) -> dict[GptWorkload, float]:
    return {workload: above[workload] / below[workload] for workload in above}


def _dtfm(
    layouts: Sequence[Layout],
    network: DtfmNetwork,
    workloads: Sequence[GptWorkload],
    *,
    overlap: bool = False,
) -> Steps:
    found = [_iterations(layout, network, workloads, overlap=overlap) for layout in layouts]
    return _mean([{workload: run.total for workload, run in runs.items()} for runs in found])


def _iterations(
    layout: Layout, network: DtfmNetwork, workloads: Sequence[GptWorkload], *, overlap: bool = False
) -> dict[GptWorkload, Iteration]:
    return _by_depth(
        workloads,
        lambda n, batches: systems.dtfm_iterations(layout, n, batches, network, overlap=overlap),
    )


def _megatron(
    orders: Sequence[tuple[int, ...]], network: DtfmNetwork, workloads: Sequence[GptWorkload]
) -> tuple[Steps, Degrees]:
    """Return each workload's step time with its best degrees, and those best for most of them."""
    steps = {}
    for degrees in ALL_DEGREES:
        jobs = [
            systems.MegatronJob(devices=devices, degrees=degrees, network=network)
            for devices in orders
        ]
        steps[degrees] = _mean(
            [_by_depth(workloads, partial(systems.megatron_iterations, job)) for job in jobs]
        )
    best = {of: min(ALL_DEGREES, key=lambda degrees: steps[degrees][of]) for of in workloads}
    return {of: steps[best[of]][of] for of in workloads}, statistics.mode(best.values())


def _by_depth(
    workloads: Sequence[GptWorkload], run: Callable[[int, list[int]], dict[GptWorkload, _T]]
) -> dict[GptWorkload, _T]:
    """Run all batches of one depth at once."""
    found: dict[GptWorkload, _T] = {}
    for num_layers in dict.fromkeys(workload.num_layers for workload in workloads):
        found |= run(num_layers, [of.batch for of in workloads if of.num_layers == num_layers])
    return found


def _mean(found: Sequence[Steps]) -> Steps:
    return {workload: statistics.fmean(steps[workload] for steps in found) for workload in found[0]}

"""Figures 4 and 6: the step times of DT-FM, of DT-FM with random layouts, and of Megatron."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, mode

from polyrhythm.plan.dtfm.placement import place
from polyrhythm.types import Seconds
from reproduction.dtfm import testbed
from reproduction.dtfm.systems import (
    ALL_DEGREES,
    Degrees,
    MegatronJob,
    dtfm_iteration,
    megatron_iteration,
)
from reproduction.dtfm.testbed import SEEDS, WORKLOADS, DtfmNetwork, GptWorkload, Layout

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
    scheduled = {of: dtfm_iteration(cost.layout, of, network) for of in workloads}
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
    return {
        of: fmean(dtfm_iteration(layout, of, network, overlap=overlap).total for layout in layouts)
        for of in workloads
    }


def _megatron(
    orders: Sequence[tuple[int, ...]], network: DtfmNetwork, workloads: Sequence[GptWorkload]
) -> tuple[Steps, Degrees]:
    """Return each workload's step time with its best degrees, and those best for most of them."""
    steps = {}
    for degrees in ALL_DEGREES:
        jobs = [MegatronJob(devices=order, degrees=degrees, network=network) for order in orders]
        for of in workloads:
            steps[degrees, of] = fmean(megatron_iteration(job, of) for job in jobs)
    best = {of: min(ALL_DEGREES, key=lambda degrees: steps[degrees, of]) for of in workloads}
    return {of: steps[best[of], of] for of in workloads}, mode(best.values())

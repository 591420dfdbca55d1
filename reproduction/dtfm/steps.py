"""Figures 4 and 6: how long a step takes in each case, by DT-FM, at random and by Megatron."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyrhythm.plan.dtfm.placement import place
from polyrhythm.types import Seconds
from reproduction.dtfm.megatron import GRID, Degrees, Job, megatron_iterations
from reproduction.dtfm.networks import (
    SEEDS,
    Layout,
    Network,
    launched,
    planning_times,
    random_layout,
    random_order,
)
from reproduction.dtfm.runtime import Iteration, dtfm_iterations
from reproduction.dtfm.workload import NUM_GPUS, WORKLOADS, Workload

Steps = Mapping[Workload, Seconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSteps:
    planned_cost: Seconds  # of the layout, by the planner
    scheduled: Steps
    scheduled_pipeline: Steps  # of that, until the last backward; the rest is gradients
    at_random: Steps  # the mean of three layouts
    megatron: Steps  # the same, with the degrees that are best
    degrees: Mapping[Workload, Degrees]  # of Megatron
    launched: Steps  # Megatron if GPUs of one machine had ranks in a row
    launched_degrees: Mapping[Workload, Degrees]
    overlapped: Steps  # DT-FM if messages hid behind compute
    random_overlapped: Steps

    @property
    def best_degrees(self) -> Degrees:
        """Most often the best."""
        return statistics.mode(self.degrees.values())

    @property
    def best_launched(self) -> Degrees:
        return statistics.mode(self.launched_degrees.values())


def case_steps(network: Network, workloads: Sequence[Workload] = WORKLOADS) -> CaseSteps:
    """All systems on one network.

    The layout is the best by the paper's cost. Its own search finds it too, but for case 2, where
    the published one is this one (`optimal_assignment_2` of generate_assignment.py).
    """
    cost = place(planning_times(network.name)).cost
    planned = cost.layout
    drawn = [random_layout(seed, NUM_GPUS) for seed in SEEDS]
    megatron, degrees = _megatron(
        [random_order(seed, NUM_GPUS) for seed in SEEDS], network, workloads
    )
    in_a_row, degrees_in_a_row = _megatron(
        [launched(seed, network) for seed in SEEDS], network, workloads
    )
    scheduled = _iterations(planned, network, workloads)
    return CaseSteps(
        planned_cost=cost.total,
        scheduled={workload: run.total for workload, run in scheduled.items()},
        scheduled_pipeline={workload: run.pipeline for workload, run in scheduled.items()},
        at_random=_dtfm(drawn, network, workloads),
        megatron=megatron,
        degrees=degrees,
        launched=in_a_row,
        launched_degrees=degrees_in_a_row,
        overlapped=_dtfm([planned], network, workloads, overlap=True),
        random_overlapped=_dtfm(drawn, network, workloads, overlap=True),
    )


def ratios(above: Steps, below: Steps) -> dict[Workload, float]:
    return {workload: above[workload] / below[workload] for workload in above}


def _dtfm(
    layouts: Sequence[Layout],
    network: Network,
    workloads: Sequence[Workload],
    *,
    overlap: bool = False,
) -> Steps:
    found = [_iterations(layout, network, workloads, overlap=overlap) for layout in layouts]
    return _mean([{workload: run.total for workload, run in runs.items()} for runs in found])


def _iterations(
    layout: Layout, network: Network, workloads: Sequence[Workload], *, overlap: bool = False
) -> dict[Workload, Iteration]:
    found: dict[Workload, Iteration] = {}
    for num_layers, batches in _by_depth(workloads).items():
        found |= dtfm_iterations(layout, num_layers, batches, network, overlap=overlap)
    return found


def _megatron(
    orders: Sequence[tuple[int, ...]], network: Network, workloads: Sequence[Workload]
) -> tuple[Steps, dict[Workload, Degrees]]:
    """With the degrees that are best for each workload, and which these are."""
    takes = {degrees: _with_degrees(degrees, orders, network, workloads) for degrees in GRID}
    best = {of: min(GRID, key=lambda degrees: takes[degrees][of]) for of in workloads}
    return {of: takes[best[of]][of] for of in workloads}, best


def _with_degrees(
    degrees: Degrees,
    orders: Sequence[tuple[int, ...]],
    network: Network,
    workloads: Sequence[Workload],
) -> Steps:
    found = []
    for devices in orders:
        job = Job(devices=devices, degrees=degrees, network=network)
        steps: dict[Workload, Seconds] = {}
        for num_layers, batches in _by_depth(workloads).items():
            steps |= megatron_iterations(job, num_layers, batches)
        found.append(steps)
    return _mean(found)


def _by_depth(workloads: Sequence[Workload]) -> dict[int, list[int]]:
    depths: dict[int, list[int]] = {}
    for workload in workloads:
        depths.setdefault(workload.num_layers, []).append(workload.batch)
    return depths


def _mean(found: Sequence[Steps]) -> Steps:
    return {workload: statistics.fmean(steps[workload] for steps in found) for workload in found[0]}

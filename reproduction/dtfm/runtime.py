"""A step of DT-FM's own runtime: GPipe over 64 sequences at a time, then sharded servers.

Every pipeline fills and drains for each 64 of its sequences, as often as the batch needs (gradient
accumulation). Gradients follow when a stage has all of them: each device exchanges its share with
the others one by one (eq. 2).

Source: arXiv:2206.01288, sections 3.2 and 3.5; the 64 from the published script. Section 3.5 says
that messages hide behind compute, which the published code cannot do (`blocking.py`); `overlap` is
what the section says.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from polyrhythm.cost.pipeline import PipelineTimes, simulate
from polyrhythm.cost.step import Replica, StageRun, StageWork, StepSpec, groups_of, pipeline_times
from polyrhythm.cost.sync import Links, Sync, reduce_scatter_times
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Action, Seconds
from reproduction.dtfm.blocking import blocking_ends
from reproduction.dtfm.networks import Layout, Network
from reproduction.dtfm.workload import (
    ACTIVATION_BYTES,
    BACKWARD,
    NUM_GPUS,
    Workload,
    forward_time,
    gradient_bytes,
)

SEQUENCES_AT_A_TIME = 64


class Iteration(NamedTuple):
    total: Seconds
    pipeline: Seconds  # until the last backward; the rest is gradients


def dtfm_iterations(
    layout: Layout,
    num_layers: int,
    batches: Sequence[int],
    network: Network,
    *,
    overlap: bool = False,
) -> dict[Workload, Iteration]:
    """One for each batch: they differ in how often pipelines fill and drain."""
    pipelines = list(zip(*layout, strict=True))
    hops = [hop for devices in pipelines for hop in pairwise(devices)]
    step = _step(layout, num_layers, network.links(hops))
    halves = reduce_scatter_times(groups_of(step), network.busy_links, Sync.SEQUENTIAL)
    times = [pipeline_times(replica.runs, step) for replica in step.replicas]
    schedule = step.replicas[0].schedule
    known = {one: _ends(schedule, one, overlap) for one in set(times)}  # alike, alike
    iterations = {}
    for batch in batches:
        num_before = batch // len(pipelines) // SEQUENCES_AT_A_TIME - 1
        ends = [
            max(num_before * max(known[one]) + known[one][stage] for one in times)
            for stage in range(len(layout))
        ]
        total = max(end + 2 * half for end, half in zip(ends, halves, strict=True))
        iterations[Workload(num_layers, batch)] = Iteration(total, max(ends))
    return iterations


def _ends(
    schedule: Sequence[Sequence[Action]], times: PipelineTimes, overlap: bool
) -> Sequence[Seconds]:
    if overlap:
        return [ends[-1] for ends in simulate(schedule, times).ends]
    return blocking_ends(schedule, times)


def _step(layout: Layout, num_layers: int, links: Links) -> StepSpec:
    num_stages = len(layout)
    forward = forward_time(num_layers / num_stages)
    schedule = ScheduleSpec("gpipe").build(
        num_stages=num_stages, num_microbatches=SEQUENCES_AT_A_TIME
    )
    return StepSpec(
        replicas=tuple(
            Replica(
                runs=tuple(StageRun(device, s, s + 1) for s, device in enumerate(devices)),
                schedule=schedule,
            )
            for devices in zip(*layout, strict=True)
        ),
        stages=tuple(
            StageWork(
                forward=forward,
                backward=BACKWARD * forward,
                activation_bytes=ACTIVATION_BYTES,
                gradient_bytes=size,
            )
            for size in gradient_bytes(num_layers, num_stages)
        ),
        speeds=(1.0,) * NUM_GPUS,
        links=links,
        sync=Sync.SEQUENTIAL,
    )

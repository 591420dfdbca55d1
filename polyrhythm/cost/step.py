"""Compute the step time of several pipelines: they run their schedules, then average gradients.

Each pipeline executes its lists of actions (`cost/pipeline.py`) with the compute of its devices and
the transfers of its links. As soon as all replicas of a stage have ended their last backward, they
synchronise (`cost/sync.py`), while other stages still compute; after that a stage may start its
next step, while others still synchronise. So a step is the steady-state time from one step to the
next, not the sum of all parts.

If replicas average in groups, no pipeline waits for all others: each has its own step time, and the
step of the job is the time in which all together process a batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, Timeline, simulate
from polyrhythm.cost.sync import Links, ReplicaGroup, Sync, reduce_scatter_times
from polyrhythm.types import Action, Seconds

_MAX_STEPS = 8  # simulated until the step time is steady
_STEADY = 1e-3  # relative

Schedule = Sequence[Sequence[Action]]


class StageRun(NamedTuple):
    """Consecutive stages on one device; a half-open range of stages."""

    device: int
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Times and bytes of a stage on a device of speed 1, for one micro-batch."""

    forward: Seconds
    backward: Seconds
    activation_bytes: float  # to the next stage
    gradient_bytes: float  # of its parameters, for a step
    parameter_bytes: float | None = None  # where models are averaged; None: equal to gradient_bytes


def recomputing(stage: StageWork) -> StageWork:
    """Return the stage with recomputed activations: every backward runs its forward again.

    An upper bound: a layer's recomputation ends when its backward has all that it needs.
    """
    return replace(stage, backward=stage.forward + stage.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One pipeline: its devices with their stages, and its schedule."""

    runs: tuple[StageRun, ...]
    schedule: Schedule  # a list of actions for each run


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    replicas: tuple[Replica, ...]
    stages: tuple[StageWork, ...]
    speeds: tuple[float, ...]  # of the cluster's devices
    links: Links
    sync: Sync


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The parts of a step's time, which sum up to `total`."""

    total: Seconds
    compute: Seconds  # of the device that has most to do
    bubbles: Seconds  # filling and draining the pipeline, and waiting for slower stages
    transfers: Seconds  # of activations and their gradients, as far as they are waited for
    sync: Seconds  # of gradients, as far as it is waited for


def step_time(step: StepSpec) -> StepTime:
    """Simulate the step, then again without sync and transfers, to attribute its time to parts."""
    times = [pipeline_times(replica.runs, step) for replica in step.replicas]
    rank_0 = step.replicas[0].runs[0].device  # it has the coordinator
    scatter_times = reduce_scatter_times(groups_of(step), step.links, step.sync, coordinator=rank_0)
    total = _steady(step, times, scatter_times)
    at_once = [0.0] * len(step.stages)
    unsynced = _steady(step, times, at_once)
    near = _steady(step, [_without_links(pipeline_time) for pipeline_time in times], at_once)
    works = [
        max(f + b for f, b in zip(pipeline_time.forward, pipeline_time.backward, strict=True))
        * (len(replica.schedule[0]) // 2)
        for pipeline_time, replica in zip(times, step.replicas, strict=True)
    ]
    compute = min(max(works), near)
    return StepTime(
        total=total,
        compute=compute,
        bubbles=near - compute,
        transfers=max(0.0, unsynced - near),
        sync=max(0.0, total - max(unsynced, near)),
    )


def pipeline_times(runs: Sequence[StageRun], step: StepSpec) -> PipelineTimes:
    """Return the times of one pipeline's devices and links."""
    stages = step.stages
    there: list[LinkTimes] = []
    back: list[LinkTimes] = []
    for here, after in itertools.pairwise(runs):
        size = stages[here.end - 1].activation_bytes
        for links, (a, b) in ((there, (here, after)), (back, (after, here))):
            busy = size / step.links.bandwidth[a.device, b.device]
            latency = step.links.latency[a.device, b.device]
            links.append(LinkTimes(busy=(float(busy),), latency=float(latency)))
    return PipelineTimes(
        forward=tuple(_work(run, step, "forward") for run in runs),
        backward=tuple(_work(run, step, "backward") for run in runs),
        activations=tuple(there),
        gradients=tuple(back),
    )


def groups_of(step: StepSpec) -> list[ReplicaGroup]:
    """Return the replicas of each stage, with the bytes of its gradients."""
    return [
        ReplicaGroup(
            members=tuple(
                next(run.device for run in replica.runs if run.first <= stage < run.end)
                for replica in step.replicas
            ),
            size=work.gradient_bytes,
        )
        for stage, work in enumerate(step.stages)
    ]


def _work(run: StageRun, step: StepSpec, direction: str) -> Seconds:
    work: Seconds = sum(getattr(stage, direction) for stage in step.stages[run.first : run.end])
    return work / step.speeds[run.device]


def _without_links(times: PipelineTimes) -> PipelineTimes:
    free = (LinkTimes(busy=(0.0,)),) * (times.num_stages - 1)
    return replace(times, activations=free, gradients=free)


def _steady(
    step: StepSpec, times: Sequence[PipelineTimes], scatter_times: Sequence[Seconds]
) -> Seconds:
    """Return the time between the ends of consecutive steps; the mean if step times alternate.

    `scatter_times` are the times of each stage's reduce-scatter or all-gather.
    """
    if step.sync is Sync.GROUPS:
        return _in_groups(step, times, scatter_times)
    summed = [0.0] * len(step.stages)
    steps = [0.0]  # when each ends
    for _ in range(_MAX_STEPS):
        summed = _next_summed(step, times, scatter_times, summed)
        steps.append(max(summed))
        period, last = steps[-1] - steps[-2], steps[-2] - steps[max(0, len(steps) - 3)]
        if abs(period - last) <= _STEADY * period:
            return period
    # Long and short steps may alternate for ever: take the mean of an even number.
    half = _MAX_STEPS // 2
    return (steps[-1] - steps[half]) / half


def _next_summed(
    step: StepSpec,
    times: Sequence[PipelineTimes],
    scatter_times: Sequence[Seconds],
    summed: Sequence[Seconds],
) -> list[Seconds]:
    """Return when each stage's reduce-scatter is done, from those times of the step before.

    Decoupled, the reduce-scatter overlaps with the last replica's last backward, and the all-gather
    with the first forward of the next step, layer by layer.
    """
    hides = 1.0 if step.sync is Sync.DECOUPLED else 0.0
    ends = [0.0] * len(scatter_times)  # of each stage's last backward
    lasts = [0.0] * len(scatter_times)  # when its reduce-scatter may start
    cache: dict[tuple[int, PipelineTimes, tuple[Seconds, ...]], Timeline] = {}  # equal pipelines
    for replica, pipeline_time in zip(step.replicas, times, strict=True):
        starts = []
        for device, first, end in replica.runs:
            forwards = [work.forward / step.speeds[device] for work in step.stages[first:end]]
            late = zip(summed[first:end], scatter_times[first:end], forwards, strict=True)
            starts.append(max(at + max(0.0, time - hides * hidden) for at, time, hidden in late))
        key = id(replica.schedule), pipeline_time, tuple(starts)
        if key not in cache:
            cache[key] = simulate(replica.schedule, pipeline_time, ready=starts)
        timeline = cache[key]
        for (device, first, end), done in zip(replica.runs, timeline.ends, strict=True):
            for stage in range(first, end):
                backward = step.stages[stage].backward / step.speeds[device]
                ends[stage] = max(ends[stage], done[-1])
                lasts[stage] = max(lasts[stage], done[-1] - hides * backward)
    return [
        max(end, last + time) for end, last, time in zip(ends, lasts, scatter_times, strict=True)
    ]


def _in_groups(
    step: StepSpec, times: Sequence[PipelineTimes], scatter_times: Sequence[Seconds]
) -> Seconds:
    """Return the step time in groups: pipelines do not wait for one another, so rates add up."""
    rate, num_microbatches = 0.0, 0
    for replica, pipeline_time in zip(step.replicas, times, strict=True):
        alone = replace(step, replicas=(replica,), sync=Sync.ALL_REDUCE)
        takes = _steady(alone, [pipeline_time], scatter_times)
        if takes == 0:
            return 0.0
        rate += (len(replica.schedule[0]) // 2) / takes
        num_microbatches += len(replica.schedule[0]) // 2
    return num_microbatches / rate

"""Predict a plan: the time of a step and its parts, the memory of every device, the price.

The step is simulated (`cost/step.py`). A schedule that is left open is chosen here, within the
memory of the devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, permutations

from polyrhythm.cost.memory import needed, peak_in_flight
from polyrhythm.cost.pipeline import PipelineTimes
from polyrhythm.cost.step import (
    Replica,
    Schedule,
    StageRun,
    StepSpec,
    StepTime,
    groups_of,
    pipeline_times,
    step_time,
)
from polyrhythm.cost.sync import GROUP_SIZE, Sync
from polyrhythm.describe.cluster import Cluster
from polyrhythm.errors import PlanError
from polyrhythm.plan.plan import DevicePart, PipelinePlan, Plan, TimePart
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.recompute import recomputed_layers
from polyrhythm.schedule.plan_schedules import choose_schedule
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import AUTO, Bytes, Seconds

_HOUR: Seconds = 3600.0
_GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """The use of one device in a plan."""

    device: str
    region: str
    pipeline: int
    stages: range
    layers: range
    memory: Bytes  # at most
    limit: Bytes | None  # memory that the plan may use
    busy: Seconds  # computing, in a step
    in_flight: int  # micro-batches at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    plan: Plan  # with the chosen schedules
    time: StepTime
    parts: tuple[TimePart, ...]  # of the time, the largest first
    uses: tuple[DeviceUse, ...]
    replicas: tuple[Replica, ...]
    price: float | None  # of a step; None if a device has no price

    @property
    def samples_per_second(self) -> float:
        assert self.plan.batch is not None, "predict refuses a plan without a batch size"
        return self.plan.batch / self.time.total if self.time.total else math.inf


def predict(plan: Plan, problem: Problem) -> Prediction:
    """Predict a plan; raise PlanError if it does not fit the cluster, the model or the memory."""
    check(plan, problem)
    step = _step(plan, problem)
    runs = [_runs(pipeline, problem) for pipeline in plan.pipelines]
    times = [pipeline_times(each, step) for each in runs]
    plan = replace(
        plan,
        pipelines=tuple(_scheduled(number, plan, one, problem) for number, one in enumerate(times)),
    )
    replicas = tuple(_replica(*each) for each in zip(runs, plan.pipelines, strict=True))
    step = replace(step, replicas=replicas)
    time = step_time(step)
    return Prediction(
        plan=plan,
        time=time,
        parts=time_parts(time, step, times, problem),
        uses=tuple(_uses(plan, times, replicas, problem)),
        replicas=replicas,
        price=price_of(step, time.total, problem.cluster),
    )


def paces(plan: Plan, problem: Problem) -> list[tuple[Seconds, Seconds]]:
    """Return each pipeline's best times for its first micro-batch and for each further one."""
    step = _step(plan, problem)
    times = [pipeline_times(_runs(pipeline, problem), step) for pipeline in plan.pipelines]
    return [(one.first, one.pace) for one in times]


def check(plan: Plan, problem: Problem) -> None:
    """Raise PlanError unless the plan is complete and fits this cluster and model."""
    if sum(plan.layers_per_stage) != problem.num_layers:
        raise PlanError(
            f"stages of {sum(plan.layers_per_stage)} layers in all",
            expected=f"the {problem.num_layers} layers of {problem.profile.name!r}",
            fix="correct layers_per_stage, or plan for this model",
        )
    if plan.batch is None:
        raise PlanError(
            "a plan that does not say how many micro-batches of which size",
            expected="microbatch_size, and num_microbatches of each pipeline",
            fix="add them, or make the plan with polyrhythm plan",
        )
    if plan.sync not in set(Sync):
        raise PlanError(
            f"sync {plan.sync!r}",
            expected=f"one of {', '.join(Sync)}",
            fix="use all_reduce, decoupled or groups",
        )
    for number, pipeline in enumerate(plan.pipelines):
        if not pipeline.devices:
            raise PlanError(
                f"pipeline {number} has no devices",
                expected=f"one for each of the {plan.num_stages} stages",
                fix="name them, or make the plan with polyrhythm plan",
            )
        for device in pipeline.devices:
            if device not in problem.index:
                raise PlanError(
                    f"device {device!r} of pipeline {number}",
                    expected=f"a device of cluster {problem.cluster.name!r}",
                    fix="correct its name, or plan for this cluster",
                )


def _step(plan: Plan, problem: Problem) -> StepSpec:
    """Return the step without its replicas, whose schedules are not known yet."""
    assert plan.microbatch_size is not None, "checked"
    size = plan.microbatch_size
    return problem.step(plan.layers_per_stage, size, plan.sync, plan.recompute)


def _runs(pipeline: PipelinePlan, problem: Problem) -> tuple[StageRun, ...]:
    return tuple(
        StageRun(problem.index[part.device], part.first, part.end) for part in pipeline.parts
    )


def _layers(plan: Plan, first: int, end: int) -> range:
    return range(plan.layers(first).start, plan.layers(end - 1).stop)


def _scheduled(number: int, plan: Plan, times: PipelineTimes, problem: Problem) -> PipelinePlan:
    """Return the pipeline with a schedule that fits the memory of its devices."""
    pipeline = plan.pipelines[number]
    assert plan.microbatch_size is not None, "checked"
    assert pipeline.num_microbatches is not None, "checked"
    max_in_flight = []
    for part in pipeline.parts:
        fits = problem.max_in_flight(
            problem.index[part.device],
            _layers(plan, part.first, part.end),
            plan.microbatch_size,
            pipeline.num_microbatches,
            recomputed_layers(plan, part),
            num_pipelines=plan.num_pipelines,
        )
        if fits < 1:
            raise _too_large(part, plan, problem)
        max_in_flight.append(fits)
    if pipeline.schedule != AUTO:
        return pipeline
    spec = choose_schedule(times, pipeline.num_microbatches, tuple(max_in_flight))
    return replace(pipeline, schedule=str(spec))


@lru_cache(maxsize=64)  # equal pipelines share one schedule, to be simulated once
def _built(spec: str, num_stages: int, num_microbatches: int) -> Schedule:
    return ScheduleSpec.parse(spec).build(num_stages=num_stages, num_microbatches=num_microbatches)


def _replica(runs: tuple[StageRun, ...], pipeline: PipelinePlan) -> Replica:
    assert pipeline.num_microbatches is not None, "checked"
    schedule = _built(pipeline.schedule, len(runs), pipeline.num_microbatches)
    return Replica(runs=runs, schedule=schedule)


def _too_large(part: DevicePart, plan: Plan, problem: Problem) -> PlanError:
    index, layers = problem.index[part.device], _layers(plan, part.first, part.end)
    limit, total = problem.limit(index), problem.cluster.devices[index].memory
    assert limit is not None, "without a limit everything fits"
    assert total is not None, "it has a limit"
    assert plan.microbatch_size is not None, "checked"
    recomputed = recomputed_layers(plan, part)
    count, size = plan.num_pipelines, plan.microbatch_size
    memory = problem.memory(layers, size, recomputed, num_pipelines=count)
    lacking = needed(memory, in_flight=1, window=0) - limit
    smallest = problem.memory(layers, size, layers, num_pipelines=count)
    saved = needed(memory, in_flight=1, window=0) - needed(smallest, in_flight=1, window=0)
    recomputation = f"recompute in its stages (saves {saved / 2**30:.2f} GiB), " * (saved > 0)
    copies = memory.weights * problem.copies_per_weight(count)
    without = f"buddy=False (saves {copies / 2**30:.2f} GiB; a loss then ends the job), "
    return PlanError(
        f"layers {layers.start} to {layers.stop - 1} need {lacking / 2**30:.2f} GiB more than "
        f"{part.device!r} has to give: {limit / 2**30:.2f} of {total / 2**30:.2f} GiB",
        expected="the weights, their gradients and optimizer state, "
        f"{'the copy of a shard of another replica, ' * (copies > 0)}and one micro-batch to fit",
        fix=f"use {recomputation}{without * (copies > 0)}more stages, smaller micro-batches, or a "
        "larger device",
    )


def _uses(
    plan: Plan, times: Sequence[PipelineTimes], replicas: Sequence[Replica], problem: Problem
) -> list[DeviceUse]:
    assert plan.microbatch_size is not None, "checked"
    uses = []
    for number, pipeline in enumerate(plan.pipelines):
        for place, part in enumerate(pipeline.parts):
            layers = _layers(plan, part.first, part.end)
            in_flight = peak_in_flight(replicas[number].schedule[place])
            recomputed = recomputed_layers(plan, part)
            memory = problem.memory(
                layers, plan.microbatch_size, recomputed, num_pipelines=plan.num_pipelines
            )
            one = times[number].forward[place] + times[number].backward[place]
            index = problem.index[part.device]
            use = DeviceUse(
                device=part.device,
                region=problem.cluster.devices[index].region,
                pipeline=number,
                stages=range(part.first, part.end),
                layers=layers,
                memory=needed(memory, in_flight=in_flight, window=0),
                limit=problem.limit(index),
                busy=one * (pipeline.num_microbatches or 0),
                in_flight=in_flight,
            )
            if use.limit is not None and use.memory > use.limit:
                raise PlanError(
                    f"{use.device!r} would hold {in_flight} micro-batches under "
                    f"{pipeline.schedule}: {use.memory / 2**30:.2f} GiB of "
                    f"{use.limit / 2**30:.2f}",
                    expected="a schedule that fits its memory",
                    fix=f"set the schedule of pipeline {number} to {AUTO}",
                )
            uses.append(use)
    return uses


def price_of(step: StepSpec, takes: Seconds, cluster: Cluster) -> float | None:
    """Return the price of a step; None if one of its devices has no price."""
    used = {run.device for replica in step.replicas for run in replica.runs}
    prices = [cluster.devices[device].price_per_hour for device in sorted(used)]
    if any(price is None for price in prices):
        return None
    by_the_hour = sum(price for price in prices if price is not None)
    return by_the_hour * takes / _HOUR + egress_price(step, cluster)


def egress_price(step: StepSpec, cluster: Cluster) -> float:
    """Return the price of all bytes that a step sends between regions."""
    if not cluster.egress_price_per_gb:
        return 0.0
    price = dict(zip(cluster.regions, cluster.egress_price_per_gb, strict=True))
    regions = [device.region for device in cluster.devices]

    def sent(a: int, b: int, size: float) -> float:
        return 0.0 if regions[a] == regions[b] else price[regions[a]] * size / _GIGABYTE

    total = 0.0
    for replica in step.replicas:
        num_microbatches = len(replica.schedule[0]) // 2
        for here, after in pairwise(replica.runs):
            size = step.stages[here.end - 1].activation_bytes * num_microbatches
            total += sent(here.device, after.device, size) + sent(after.device, here.device, size)
    for group in groups_of(step):
        members, share = group.members, 2 * group.size / len(group.members)
        if step.sync is Sync.GROUPS and len(members) > GROUP_SIZE:
            # In groups a member sends to few others, but a larger shard to each.
            share *= (GROUP_SIZE - 1) / (len(members) - 1) * len(members) / GROUP_SIZE
        total += sum(sent(a, b, share) for a, b in permutations(members, 2))
    return total


def time_parts(
    time: StepTime, step: StepSpec, times: Sequence[PipelineTimes], problem: Problem
) -> tuple[TimePart, ...]:
    names = [device.name for device in problem.cluster.devices]
    busiest = max(
        (
            (one.forward[i] + one.backward[i]) * len(replica.schedule[0]),
            f"computing on {names[run.device]}",
        )
        for one, replica in zip(times, step.replicas, strict=True)
        for i, run in enumerate(replica.runs)
    )
    links = [
        (there.transfer + back.transfer, f"{names[a.device]} - {names[b.device]}")
        for one, replica in zip(times, step.replicas, strict=True)
        for there, back, a, b in zip(
            one.activations, one.gradients, replica.runs[:-1], replica.runs[1:], strict=True
        )
    ]
    parts = [
        TimePart(name=busiest[1], takes=time.compute),
        TimePart(name="filling and draining pipelines", takes=time.bubbles),
    ]
    if links:
        parts.append(TimePart(name=f"activations, slowest {max(links)[1]}", takes=time.transfers))
    if len(step.replicas) > 1:
        parts.append(TimePart(name=f"gradients, {_slowest_pair(step, names)}", takes=time.sync))
    return tuple(sorted(parts, key=lambda part: -part.takes))


def _slowest_pair(step: StepSpec, names: Sequence[str]) -> str:
    links = step.links.of_averages(step.sync)
    slowest = max(
        (
            links.transfer(a, b, group.size / len(group.members)),
            f"slowest {names[a]} - {names[b]}",
        )
        for group in groups_of(step)
        for a in group.members
        for b in group.members
        if a != b
    )
    return slowest[1]

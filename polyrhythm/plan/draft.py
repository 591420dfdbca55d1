"""Make a draft of a plan for given degrees: place devices and assign layers, by estimates.

If devices are unequal, the best layers of a stage depend on its devices, and the best devices on
its layers. So both are optimised alternately, from layouts of different kinds, until nothing
changes. The drafts with the best estimates are simulated later.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polyrhythm.cost.sync import Sync
from polyrhythm.describe.cluster import Cluster
from polyrhythm.errors import PlanError
from polyrhythm.plan.layout import (
    DeviceLayout,
    Floats,
    Ints,
    anneal_layout,
    evaluate_layout,
    initial_layouts,
    prices_of,
    reorder_stages,
)
from polyrhythm.plan.partition import partition_layers
from polyrhythm.plan.plan import PipelinePlan, Plan, PlanRegion
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.recompute import recompute_if_needed, recompute_of_stages
from polyrhythm.types import Seconds

_NUM_STARTS = 2  # constructed layouts that are improved
_MAX_ROUNDS = 3  # of placing devices and assigning layers
_NUM_HALVINGS = 40  # of a time interval, until hardly any micro-batch is left in it
_NEVER = 1e-12  # seconds: smallest period, to avoid a division by 0
_WORTHWHILE = 0.01  # fraction of the step that unequal numbers of micro-batches must save


@dataclass(frozen=True, slots=True, order=True)
class PlanShape:
    """Degrees of a plan."""

    num_stages: int
    num_pipelines: int
    microbatch_size: int

    @property
    def num_places(self) -> int:
        return self.num_stages * self.num_pipelines

    def __str__(self) -> str:
        stages = f"{self.num_stages} stage{'s' if self.num_stages > 1 else ''}"
        pipelines = f"{self.num_pipelines} pipeline{'s' if self.num_pipelines > 1 else ''}"
        return f"{stages} x {pipelines}, micro-batches of {self.microbatch_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDraft:
    shape: PlanShape
    layers_per_stage: tuple[int, ...]
    recompute: tuple[bool, ...]  # per stage
    layout: DeviceLayout

    @property
    def value(self) -> float:
        return self.layout.value


def make_draft(problem: Problem, shape: PlanShape, *, num_moves: int, seed: int) -> PlanDraft:
    """Return the best draft found; it may not fit into memory, which `predict` checks."""
    found, unfit = [], None
    for devices, idle in initial_layouts(problem, shape.num_stages, shape.num_pipelines):
        try:
            found.append(_partitioned(problem, shape, devices, idle))
        except PlanError:  # infeasible with these devices; annealing may choose others
            unfit = unfit or _partitioned_by_memory(problem, shape, devices, idle)
    if not found and unfit is not None:
        found = [unfit]
    found.sort(key=lambda draft: draft.value)
    best = [
        improve_draft(problem, start, num_moves=num_moves, seed=seed + number)
        for number, start in enumerate(_unlike(found)[:_NUM_STARTS])
    ]
    return min(best, key=lambda draft: draft.value)


def draft_with_devices(
    problem: Problem, shape: PlanShape, devices: Sequence[Sequence[int]]
) -> PlanDraft:
    """Return the draft of a given layout, with layers assigned to it."""
    placed = np.array(devices, np.int64)
    idle = np.setdiff1d(np.arange(problem.num_devices), placed)
    return _partitioned(problem, shape, placed, idle)


def improve_draft(problem: Problem, draft: PlanDraft, *, num_moves: int, seed: int) -> PlanDraft:
    """Improve a draft by annealing; the result is never worse."""
    best = draft
    for round_number in range(_MAX_ROUNDS):
        prices = prices_of(
            problem,
            best.layers_per_stage,
            best.shape.microbatch_size,
            best.shape.num_pipelines,
            best.recompute,
        )
        layout = anneal_layout(
            problem,
            prices,
            best.layout,
            num_moves=num_moves // (round_number + 1),
            seed=seed + round_number,
        )
        moved = replace(best, layout=layout)
        try:
            partitioned = _partitioned(problem, best.shape, layout.devices, layout.idle)
        except PlanError:  # still infeasible with these devices
            best = min(best, moved, key=lambda each: each.value)
            break
        same = partitioned.layers_per_stage == best.layers_per_stage
        best = min(best, moved, partitioned, key=lambda draft: draft.value)
        if same:
            break
    return best


def draft_to_plan(draft: PlanDraft, problem: Problem) -> Plan:
    """Return the plan with micro-batches assigned and schedules left open."""
    numbers = assign_microbatches(
        problem.job.batch_size // draft.shape.microbatch_size,
        draft.layout.first,
        draft.layout.period,
        even=not problem.job.unequal,
    )
    return assemble_plan(
        problem,
        draft.shape.microbatch_size,
        draft.layers_per_stage,
        zip(draft.layout.devices.T.tolist(), numbers, strict=True),
        left_out=draft.layout.idle.tolist(),
        recompute=draft.recompute,
    )


def assemble_plan(
    problem: Problem,
    microbatch_size: int,
    layers_per_stage: tuple[int, ...],
    pipelines: Iterable[tuple[Iterable[int], int]],
    *,
    left_out: Iterable[int],
    recompute: tuple[bool, ...],
) -> Plan:
    """Return the plan of `pipelines`, each the device of every stage and a number of micro-batches.

    Schedules are left open unless the job fixes them.
    """
    names = [device.name for device in problem.cluster.devices]
    return Plan(
        layers_per_stage=layers_per_stage,
        pipelines=tuple(
            PipelinePlan(
                devices=tuple(names[device] for device in devices),
                num_microbatches=number,
                schedule=problem.job.schedule,
            )
            for devices, number in pipelines
        ),
        microbatch_size=microbatch_size,
        sync=problem.job.sync,
        recompute=recompute,
        cluster=problem.cluster.name,
        model=problem.profile.name,
        left_out=tuple(names[device] for device in left_out),
        regions=regions_of(problem.cluster),
    )


def regions_of(cluster: Cluster) -> tuple[PlanRegion, ...]:
    """Return the devices by site; nothing if all are in one."""
    devices: dict[str, list[str]] = {}
    for device, site in zip(cluster.devices, cluster.sites, strict=True):
        devices.setdefault(site, []).append(device.name)
    found = tuple(PlanRegion(name=name, devices=tuple(some)) for name, some in devices.items())
    return found if len(found) > 1 else ()


def assign_microbatches(
    count: int, first: Sequence[float] | Floats, period: Sequence[float] | Floats, *, even: bool
) -> tuple[int, ...]:
    """Assign micro-batches one by one to the pipeline that finishes first; each gets at least one.

    They are assigned evenly if unequal numbers gain too little.
    """
    num_pipelines = len(first)
    plain = [count // num_pipelines + (p < count % num_pipelines) for p in range(num_pipelines)]
    if even:
        return tuple(plain)
    paces = [max(period[p], _NEVER) for p in range(num_pipelines)]

    def done_by(time: float) -> list[int]:
        return [1 + max(0, int((time - first[p]) / paces[p])) for p in range(num_pipelines)]

    # Assign most of them at once: those that each finishes by a time at which not all are done.
    early, late = 0.0, max(first) + count * max(period)
    for _ in range(_NUM_HALVINGS):
        middle = (early + late) / 2
        early, late = (early, middle) if sum(done_by(middle)) > count else (middle, late)
    numbers = done_by(early)
    queue = [(first[p] + numbers[p] * period[p], p) for p in range(num_pipelines)]
    heapq.heapify(queue)
    for _ in range(count - sum(numbers)):
        done, p = heapq.heappop(queue)
        numbers[p] += 1
        heapq.heappush(queue, (done + period[p], p))

    def takes(counts: Sequence[int]) -> float:
        return max(first[p] + (counts[p] - 1) * period[p] for p in range(num_pipelines))

    if takes(plain) <= takes(numbers) * (1 + _WORTHWHILE):
        return tuple(plain)
    return tuple(numbers)


def _partitioned(problem: Problem, shape: PlanShape, devices: Ints, idle: Ints) -> PlanDraft:
    """Return the best draft of this layout, with layers balanced by work with or without gradients.

    Raises PlanError if nothing fits.
    """
    found = []
    count = problem.job.batch_size / shape.microbatch_size / shape.num_pipelines
    for layers in dict.fromkeys(
        layers_for(
            problem,
            shape.microbatch_size,
            devices,
            count,
            per_byte=each,
            num_pipelines=shape.num_pipelines,
        )
        for each in (0.0, _sync_per_byte(problem, devices) / count)
    ):
        room = problem.memory_limits[devices].min(axis=1)
        recompute = recompute_of_stages(
            problem, layers, shape.microbatch_size, room, shape.num_pipelines
        )
        prices = prices_of(problem, layers, shape.microbatch_size, shape.num_pipelines, recompute)
        layout = reorder_stages(prices, evaluate_layout(prices, devices, idle))
        found.append(_draft(shape, layers, recompute, layout))
    return min(found, key=lambda draft: draft.value)


def _draft(
    shape: PlanShape, layers: tuple[int, ...], recompute: tuple[bool, ...], layout: DeviceLayout
) -> PlanDraft:
    return PlanDraft(shape=shape, layers_per_stage=layers, recompute=recompute, layout=layout)


def _partitioned_by_memory(
    problem: Problem, shape: PlanShape, devices: Ints, idle: Ints
) -> PlanDraft:
    """Return a draft with layers in proportion to memory; missing memory costs time."""
    size = shape.microbatch_size
    least = problem.least_memory(
        size,
        recompute=problem.job.recompute != "never",
        num_pipelines=shape.num_pipelines,
    )
    single = [float(least[layer, layer + 1]) for layer in range(problem.num_layers)]
    room = problem.memory_limits[devices].min(axis=1)
    layers = partition_layers(single, (1 / np.minimum(room, sum(single))).tolist())
    recompute = recompute_of_stages(problem, layers, size, room, shape.num_pipelines)
    prices = prices_of(problem, layers, size, shape.num_pipelines, recompute)
    return _draft(shape, layers, recompute, evaluate_layout(prices, devices, idle))


def layers_for(
    problem: Problem,
    microbatch_size: int,
    devices: Ints,
    num_microbatches: float = math.inf,
    *,
    per_byte: Seconds = 0.0,
    num_pipelines: int,
) -> tuple[int, ...]:
    """Return the best numbers of layers for stages of these devices, [stage, pipeline].

    `num_pipelines`: of the whole plan, on which the memory depends.

    The work of a layer is that of a micro-batch, plus `per_byte` of its parameters: their gradient
    exchange, divided by the micro-batches of a step. A stage that fits only if it recomputes also
    runs the forward of its layers again. Raises PlanError if nothing fits.
    """
    layers = problem.layers(microbatch_size)
    sizes = np.array([0.0, *(float(layer.activation_bytes) for layer in layers)])
    here, after = devices[:-1], devices[1:]
    bandwidth = problem.links.bandwidth
    slowest = np.minimum(bandwidth[here, after], bandwidth[after, here]).min(axis=1)
    room = problem.memory_limits[devices].min(axis=1)
    recomputes = recompute_if_needed(problem, microbatch_size, room, num_pipelines=num_pipelines)
    least = np.where(
        recomputes,
        problem.least_memory(microbatch_size, recompute=True, num_pipelines=num_pipelines),
        problem.least_memory(microbatch_size, num_pipelines=num_pipelines),
    )
    forward = np.cumsum([0.0, *(layer.forward for layer in layers)])
    return partition_layers(
        [layer.forward + layer.backward + per_byte * layer.parameter_bytes for layer in layers],
        (1 / np.array(problem.speeds))[devices].max(axis=1).tolist(),
        num_microbatches=num_microbatches,
        transfers=sizes[None, :] / slowest[:, None],
        fits=least <= room[:, None, None],
        extra=np.where(recomputes, forward[None, :] - forward[:, None], 0.0),
    )


def _sync_per_byte(problem: Problem, devices: Ints) -> float:
    """Return the seconds that a byte of parameters adds to a step, averaged over stages."""
    num_pipelines = devices.shape[1]
    if num_pipelines == 1:
        return 0.0
    bandwidth = problem.links.of_averages(Sync(problem.job.sync)).bandwidth
    among = bandwidth[devices[:, :, None], devices[:, None, :]]
    apart = ~np.eye(num_pipelines, dtype=bool)
    slowest = np.where(apart, among, np.inf).min(axis=(1, 2))
    return float((2 * problem.job.gradient_bytes / num_pipelines / slowest).mean())


def _unlike(drafts: list[PlanDraft]) -> list[PlanDraft]:
    """Return the first draft of each value: starts of equal cost are mostly the same."""
    seen: dict[float, PlanDraft] = {}
    for draft in drafts:
        seen.setdefault(round(draft.value, 9), draft)
    return list(seen.values())

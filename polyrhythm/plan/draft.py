"""A plan in outline for given degrees: devices placed and layers dealt, in turn, by estimates.

Where devices are unequal, how many layers a stage gets depends on who runs it, and who should run
it on how many layers it has. So both are done in turn, from layouts of different kinds, until
nothing changes. What comes out is simulated later, if its estimate is among the best.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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
from polyrhythm.plan.plan import AUTO, PipelinePlan, Plan
from polyrhythm.plan.problem import Problem

if TYPE_CHECKING:
    from polyrhythm.plan.layout_kernel import LayoutPrices

_NUM_STARTS = 2  # of those made in one go, that are worked on
_MAX_ROUNDS = 3  # of placing and dealing
_NUM_HALVINGS = 40  # of a time, until hardly any micro-batch is left between
_NEVER = 1e-12  # seconds: a pace that is none
_WORTHWHILE = 0.01  # a share of the step that unequal numbers of micro-batches must save


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
    layout: DeviceLayout

    @property
    def value(self) -> float:
        return self.layout.value


def make_draft(problem: Problem, shape: PlanShape, *, num_moves: int, seed: int) -> PlanDraft:
    """The best outline found, which may not fit into memory; for `predict` to say."""
    found, unfit = [], None
    for devices, idle in initial_layouts(problem, shape.num_stages, shape.num_pipelines):
        try:
            found.append(_partitioned(problem, shape, devices, idle))
        except PlanError:  # not with these devices; annealing may bring others
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
    """This layout, with layers dealt to it."""
    placed = np.array(devices, np.int64)
    idle = np.setdiff1d(np.arange(problem.num_devices), placed)
    return _partitioned(problem, shape, placed, idle)


def improve_draft(problem: Problem, draft: PlanDraft, *, num_moves: int, seed: int) -> PlanDraft:
    """Going on from there; never worse."""
    best = draft
    for round_number in range(_MAX_ROUNDS):
        prices = _prices(problem, best.shape, best.layers_per_stage)
        layout = anneal_layout(
            problem,
            prices,
            best.layout,
            num_moves=num_moves // (round_number + 1),
            seed=seed + round_number,
        )
        moved = replace(best, layout=layout)
        try:
            dealt = _partitioned(problem, best.shape, layout.devices, layout.idle)
        except PlanError:  # still not with these devices
            best = min(best, moved, key=lambda one: one.value)
            break
        same = dealt.layers_per_stage == best.layers_per_stage
        best = min(best, moved, dealt, key=lambda one: one.value)
        if same:
            break
    return best


def draft_to_plan(draft: PlanDraft, problem: Problem) -> Plan:
    """The plan, with micro-batches dealt and schedules left open."""
    names = [device.name for device in problem.cluster.devices]
    numbers = assign_microbatches(
        problem.job.batch // draft.shape.microbatch_size,
        draft.layout.first,
        draft.layout.period,
        even=not problem.job.unequal,
    )
    return Plan(
        layers_per_stage=draft.layers_per_stage,
        pipelines=tuple(
            PipelinePlan(
                devices=tuple(names[device] for device in column),
                num_microbatches=number,
                schedule=problem.job.schedule or AUTO,
            )
            for column, number in zip(draft.layout.devices.T.tolist(), numbers, strict=True)
        ),
        microbatch_size=draft.shape.microbatch_size,
        sync=problem.job.sync,
        cluster=problem.cluster.name,
        model=problem.profile.name,
        left_out=tuple(names[device] for device in draft.layout.idle.tolist()),
    )


def assign_microbatches(
    count: int, first: Sequence[float] | Floats, period: Sequence[float] | Floats, *, even: bool
) -> tuple[int, ...]:
    """One after another to the pipeline that would be done with it first; at least one to each.

    Evenly, as far as that goes, if nothing is to be gained.
    """
    num_pipelines = len(first)
    plain = [count // num_pipelines + (p < count % num_pipelines) for p in range(num_pipelines)]
    if even:
        return tuple(plain)
    paces = [max(period[p], _NEVER) for p in range(num_pipelines)]

    def done_by(time: float) -> list[int]:
        return [1 + max(0, int((time - first[p]) / paces[p])) for p in range(num_pipelines)]

    # Most of them at once: what each has done by a time at which not all are done.
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

    def takes(dealt: Sequence[int]) -> float:
        return max(first[p] + (dealt[p] - 1) * period[p] for p in range(num_pipelines))

    if takes(plain) <= takes(numbers) * (1 + _WORTHWHILE):
        return tuple(plain)
    return tuple(numbers)


def _partitioned(problem: Problem, shape: PlanShape, devices: Ints, idle: Ints) -> PlanDraft:
    """Layers for this layout, by work alone or with their gradients, and what it takes with them.

    Raises PlanError if nothing fits.
    """
    found = []
    for layers in dict.fromkeys(
        layers_for(problem, shape, devices, with_gradients=each) for each in (False, True)
    ):
        prices = _prices(problem, shape, layers)
        layout = reorder_stages(problem, prices, evaluate_layout(problem, prices, devices, idle))
        found.append(PlanDraft(shape=shape, layers_per_stage=layers, layout=layout))
    return min(found, key=lambda draft: draft.value)


def _partitioned_by_memory(
    problem: Problem, shape: PlanShape, devices: Ints, idle: Ints
) -> PlanDraft:
    """Layers in proportion to room, though they do not fit: what is missing costs time."""
    least = problem.least_memory(shape.microbatch_size)
    single = [float(least[layer, layer + 1]) for layer in range(problem.num_layers)]
    room = problem.memory_limits[devices].min(axis=1)
    layers = partition_layers(single, (1 / np.minimum(room, sum(single))).tolist())
    prices = _prices(problem, shape, layers)
    layout = evaluate_layout(problem, prices, devices, idle)
    return PlanDraft(shape=shape, layers_per_stage=layers, layout=layout)


def layers_for(
    problem: Problem, shape: PlanShape, devices: Ints, *, with_gradients: bool
) -> tuple[int, ...]:
    """The best way to deal layers to stages of these devices.

    Work is that of a micro-batch, to which a layer's gradients may be added: what they take to be
    exchanged, over the micro-batches of a step.
    """
    layers = problem.layers(shape.microbatch_size)
    count = problem.job.batch / shape.microbatch_size / shape.num_pipelines
    per_byte = _sync_per_byte(problem, devices) / count if with_gradients else 0.0
    slowness = (1 / np.array(problem.speeds))[devices].max(axis=1)
    return partition_layers(
        [layer.forward + layer.backward + per_byte * layer.parameter_bytes for layer in layers],
        slowness.tolist(),
        num_microbatches=count,
        transfers=_transfers(problem, shape, devices),
        fits=_fits(problem, shape, devices),
    )


def _sync_per_byte(problem: Problem, devices: Ints) -> float:
    """Seconds that a byte of parameters adds to a step, in the mean over stages."""
    num_pipelines = devices.shape[1]
    if num_pipelines == 1:
        return 0.0
    bandwidth = problem.links.bandwidth
    among = bandwidth[devices[:, :, None], devices[:, None, :]]
    apart = ~np.eye(num_pipelines, dtype=bool)
    slowest = np.where(apart, among, np.inf).min(axis=(1, 2))
    return float((2 * problem.job.gradient_bytes / num_pipelines / slowest).mean())


def _prices(problem: Problem, shape: PlanShape, layers: tuple[int, ...]) -> "LayoutPrices":
    return prices_of(
        problem,
        problem.stages(layers, shape.microbatch_size),
        layers,
        shape.microbatch_size,
        shape.num_pipelines,
        even=not problem.job.unequal,
    )


def _transfers(problem: Problem, shape: PlanShape, devices: Ints) -> Floats:
    """[stage, n]: the slowest link after a stage, if n layers are before it."""
    layers = problem.layers(shape.microbatch_size)
    sizes = np.array([0.0, *(float(layer.activation_bytes) for layer in layers)])
    here, after = devices[:-1], devices[1:]
    bandwidth = problem.links.bandwidth
    slowest = np.minimum(bandwidth[here, after], bandwidth[after, here]).min(axis=1)
    times: Floats = sizes[None, :] / slowest[:, None]
    return times


def _fits(problem: Problem, shape: PlanShape, devices: Ints) -> NDArray[np.bool_] | None:
    """[stage, a, b]: whether every device of a stage holds layers a to b and a micro-batch."""
    if np.isinf(problem.memory_limits).all():
        return None
    size = problem.least_memory(shape.microbatch_size)
    room = problem.memory_limits[devices].min(axis=1)
    fits: NDArray[np.bool_] = size[None, :, :] <= room[:, None, None]
    return fits


def _unlike(drafts: list[PlanDraft]) -> list[PlanDraft]:
    """The first of each value: starts that cost the same are mostly the same."""
    seen: dict[float, PlanDraft] = {}
    for draft in drafts:
        seen.setdefault(round(draft.value, 9), draft)
    return list(seen.values())

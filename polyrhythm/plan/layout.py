"""Place devices on stages and pipelines, by an estimate of the step as it really runs.

Annealing (`layout_anneal.py`) starts from constructed layouts (`construction.py`): near devices
next to each other as pipelines, stages or between, and equally fast or large ones together. Stages
are given: `draft.py` alternates between assigning layers and placing devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import PairTimes
from polyrhythm.cost.memory import needed
from polyrhythm.cost.sync import GROUP_SIZE, Sync
from polyrhythm.plan.construction import construct_layouts, nearest
from polyrhythm.plan.problem import Problem

if TYPE_CHECKING:  # compiled: imported when needed
    from polyrhythm.plan.layout_kernel import LayoutPrices

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_NUM_NEAR = 8  # devices that annealing brings next to one another
_NO_ROOM = 1e3  # penalty in steps for a device that cannot hold its stage
_HOUR = 3600.0
_HOT, _COLD = 0.05, 0.001  # temperatures as fractions of the initial value
_SEQUENTIAL = (Sync.SEQUENTIAL, Sync.RING)  # a ring is about as slow as one peer after the other


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceLayout:
    devices: Ints  # [stage, pipeline]
    idle: Ints
    value: float  # of the job's objective, estimated
    first: Floats  # seconds of each pipeline's first micro-batch
    period: Floats  # and of each further one


def distances(problem: Problem) -> Floats:
    """Return the seconds for a message of typical size between two devices, both ways."""
    links = problem.links
    layers = problem.profile.layers
    size = max(1.0, float(np.mean([layer.activation_bytes for layer in layers])))
    apart = ~np.eye(problem.num_devices, dtype=bool)
    with np.errstate(divide="ignore"):
        one_way = np.where(apart, links.latency + size / links.bandwidth, 0.0)
    both: Floats = one_way + one_way.T
    return both


def initial_layouts(
    problem: Problem, num_stages: int, num_pipelines: int
) -> Iterator[tuple[Ints, Ints]]:
    """Yield layouts with their idle devices: far, slow or expensive ones."""
    spread, speeds, limits = distances(problem), np.array(problem.speeds), problem.memory_limits
    for kept in _kept(problem, num_stages * num_pipelines, spread):
        idle = np.setdiff1d(np.arange(problem.num_devices), kept)
        near = PairTimes(
            sync=spread[np.ix_(kept, kept)], hop=spread[np.ix_(kept, kept)], num_stages=num_stages
        )
        made = [kept[layout] for layout in construct_layouts(near)]
        yield from ((layout, idle) for layout in made)
        # Equally fast or large devices together, near ones adjacent: as stages and as pipelines.
        row, rows = made[0].T.ravel(), []
        if speeds[kept].max() > speeds[kept].min():
            rows.append(row[np.argsort(-speeds[row], kind="stable")])
        if limits[kept].max() > limits[kept].min():
            by_memory = row[np.argsort(-limits[row], kind="stable")]
            rows += [by_memory, by_memory[::-1]]
        for each in rows:
            yield np.ascontiguousarray(each.reshape(num_stages, num_pipelines)), idle
            yield np.ascontiguousarray(each.reshape(num_pipelines, num_stages).T), idle


def evaluate_layout(prices: "LayoutPrices", devices: Ints, idle: Ints) -> DeviceLayout:
    """Return a given layout with its estimated value."""
    from polyrhythm.plan.layout_kernel import FIRST, PERIOD, make_state, values

    state = make_state(devices.astype(np.int64), idle.astype(np.int64), prices)
    return DeviceLayout(
        devices=devices,
        idle=idle,
        value=values(state, prices)[0],
        first=state.columns[FIRST],
        period=state.columns[PERIOD],
    )


def reorder_stages(prices: "LayoutPrices", start: DeviceLayout) -> DeviceLayout:
    """Return the layout with its stages in a better order."""
    from polyrhythm.plan.layout_anneal import order_rows

    devices, idle = start.devices.astype(np.int64), start.idle.astype(np.int64)
    order_rows(devices, idle, prices)
    return evaluate_layout(prices, devices, idle)


def anneal_layout(
    problem: Problem, prices: "LayoutPrices", start: DeviceLayout, *, num_moves: int, seed: int
) -> DeviceLayout:
    """Return the best layout that annealing finds from `start`."""
    from polyrhythm import jit
    from polyrhythm.plan.layout_anneal import anneal_step

    if problem.num_devices == 1 or start.value <= 0:
        return start
    devices, idle = start.devices.astype(np.int64), start.idle.astype(np.int64)
    near = nearest(distances(problem), _NUM_NEAR)
    jit.seed(seed)
    hot, cold = _HOT * start.value, _COLD * start.value
    anneal_step(devices, idle, prices, near, num_moves, hot, cold)
    return evaluate_layout(prices, devices, idle)


def prices_of(
    problem: Problem,
    layers_per_stage: Sequence[int],
    microbatch_size: int,
    num_pipelines: int,
    recompute: Sequence[bool] = (),
) -> "LayoutPrices":
    from polyrhythm.plan.layout_kernel import LayoutPrices

    stages = problem.stages(layers_per_stage, microbatch_size, recompute)
    links, sync = problem.links, Sync(problem.job.sync)
    apart = ~np.eye(problem.num_devices, dtype=bool)
    averages = links.of_averages(sync)
    per_byte, latency = _per_byte(links.bandwidth), np.where(apart, links.latency, 0.0)
    average_per_byte = _per_byte(averages.bandwidth)
    average_latency = np.where(apart, averages.latency, 0.0)
    group = min(num_pipelines, GROUP_SIZE) if sync is Sync.GROUPS else num_pipelines
    work = np.array([stage.forward + stage.backward for stage in stages])
    num_microbatches = problem.job.batch_size / microbatch_size
    egress = _egress(problem)
    return LayoutPrices(
        np.array(
            [
                work,
                [float(stage.activation_bytes) for stage in stages],
                [stage.gradient_bytes / group for stage in stages],
            ]
        ),
        np.array(
            [
                1 / np.array(problem.speeds),
                1 / links.uplinks,
                [(device.price_per_hour or 0.0) / _HOUR for device in problem.cluster.devices],
            ]
        ),
        np.array(
            [
                latency + latency.T,
                np.maximum(per_byte, per_byte.T),
                per_byte + per_byte.T,
                egress + egress.T,
                average_latency + average_latency.T,
                np.maximum(average_per_byte, average_per_byte.T),
                averages.uses_uplink,
            ]
        ),
        _over(
            problem,
            layers_per_stage,
            microbatch_size,
            recompute,
            work.sum() * num_microbatches,
            num_pipelines,
        ),
        float(num_microbatches),
        float(group - 1),
        problem.job.objective == "cost",
        not problem.job.unequal,
        sync not in _SEQUENTIAL,
    )


def _per_byte(bandwidth: Floats) -> Floats:
    """Return seconds per byte between devices; 0 from a device to itself."""
    apart = ~np.eye(len(bandwidth), dtype=bool)
    return np.divide(1.0, bandwidth, out=np.zeros_like(bandwidth), where=apart)


def _over(
    problem: Problem,
    layers_per_stage: Sequence[int],
    microbatch_size: int,
    recompute: Sequence[bool],
    work: float,
    num_pipelines: int,
) -> Floats:
    """Return the penalty [stage, device] of a device that cannot hold a stage and a micro-batch."""
    over = np.zeros((len(layers_per_stage), problem.num_devices))
    if np.isinf(problem.memory_limits).all():
        return over
    end = 0
    for stage, count in enumerate(layers_per_stage):
        layers = range(end, end + count)
        end = layers.stop
        recomputed = layers if recompute and recompute[stage] else ()
        memory = problem.memory(layers, microbatch_size, recomputed, num_pipelines=num_pipelines)
        bytes_needed = needed(memory, in_flight=1, window=0)
        missing = np.maximum(0.0, bytes_needed - problem.memory_limits)
        over[stage] = np.where(missing > 0, _NO_ROOM * work * (1 + missing / bytes_needed), 0.0)
    return over


def _egress(problem: Problem) -> Floats:
    """Return the egress price per byte, [source, target]."""
    cluster = problem.cluster
    if not cluster.egress_price_per_gb:
        return np.zeros((problem.num_devices, problem.num_devices))
    region = np.array([cluster.regions.index(device.region) for device in cluster.devices])
    price = np.array(cluster.egress_price_per_gb)[region] / 1e9
    return np.where(region[:, None] == region[None, :], 0.0, price[:, None])


def _kept(problem: Problem, count: int, distance: Floats) -> list[Ints]:
    """Yield the devices to start with if not all are used: nearest, fastest or cheapest ones."""
    everyone = np.arange(problem.num_devices)
    if count == problem.num_devices:
        return [everyone]
    speeds = np.array(problem.speeds)
    middle = np.sort(distance, axis=1)[:, :count].mean(axis=1)
    rent = np.array([device.price_per_hour or 0.0 for device in problem.cluster.devices])
    orders = [np.argsort(middle / speeds, kind="stable"), np.lexsort((middle, -speeds))]
    if problem.memory_limits.max() > problem.memory_limits.min():
        orders.append(np.lexsort((middle, -problem.memory_limits)))
    if problem.job.objective == "cost":
        orders.append(np.lexsort((middle, rent / speeds)))
    return [np.sort(order[:count]) for order in orders]

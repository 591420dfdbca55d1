"""A lower bound of the step time of any plan, which shows how good a plan is.

For P pipelines, M micro-batches that take W seconds each at speed 1, and devices of speeds v that
sum up to V, four arguments; the largest of them holds.

1. Between its last backward and its first forward of the next step, stage s of a pipeline waits
   for the stages before it, to which the one goes and from which the other comes. So with m
   micro-batches of t_s: T >= m t_s + t_0 + ... + t_(s-1), and t_s <= T / m (1 - 1/m)^s. The work of
   a micro-batch is the sum of v t. Over all pipelines, with m as large as it can be and the fastest
   devices first: M W <= T (sum of v (1 - 1/m)^s).
2. A device is busy, then synchronises what it holds, at best at the speed of its uplink. Weighted
   with speeds and summed: T V >= M W + min(v) * (what one replica of all layers takes to be sent).
3. Each layer is on P devices: T >= M * (work of the layer) / (the P largest speeds).
4. Leave out all links slower than some bandwidth: what is connected then are islands. A pipeline
   on an island is part of its speed; one that leaves it sends every micro-batch over a link that
   was left out. Of P pipelines x leave theirs; whatever x is, they must do M micro-batches.

Sources: none; `tests/pure/test_step_bound.py` compares it with all plans of small clusters.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.sync import Sync
from polyrhythm.plan.problem import Problem
from polyrhythm.types import Seconds

_ROUNDING = 1e-9
_NEVER = 1e-300


def step_bound(problem: Problem, *, sizes: tuple[int, ...]) -> Seconds:
    """Return a lower bound of the step time of any plan with these micro-batch sizes."""
    job = problem.job
    bounds = []
    for size in sizes:
        most = min(problem.num_devices, job.batch_size // size)
        numbers = range(1, most + 1) if job.num_pipelines is None else [job.num_pipelines]
        bounds += [least_step(problem, size, number) for number in numbers]
    return min(bounds)


def least_step(
    problem: Problem, microbatch_size: int, num_pipelines: int, num_devices: int | None = None
) -> Seconds:
    """Return the bound for `num_pipelines` pipelines on at most `num_devices` devices."""
    layers = problem.layers(microbatch_size)
    count = problem.job.batch_size / microbatch_size
    works = [layer.forward + layer.backward for layer in layers]
    work = sum(works)
    speeds = np.sort(np.array(problem.speeds))[::-1]
    used = speeds[: num_devices or len(speeds)].sum()
    sent = _sent(problem, num_pipelines)
    shorter = 1 - 1 / max(count - num_pipelines + 1, 1.0)
    stage = np.arange(len(speeds)) // num_pipelines
    filled = (speeds * shorter**stage)[: num_devices or len(speeds)].sum()
    bounds = [
        count * work / filled,
        (count * work + speeds[-1] * num_pipelines * sent) / used,
        count * max(works) / speeds[:num_pipelines].sum(),
    ]
    if len(layers) > 1:
        smallest = min(layer.activation_bytes for layer in layers[:-1])
        for islands, bandwidth in _islands(problem):
            bounds.append(
                _divided(
                    count, work, num_pipelines, islands, smallest / bandwidth, speeds[-1] * sent
                )
            )
    return float(max(bounds) * (1 - _ROUNDING))


def least_price(problem: Problem, sizes: tuple[int, ...]) -> float | None:
    """Return a lower bound of a step's compute price; None if a device has no price."""
    prices = [device.price_per_hour for device in problem.cluster.devices]
    if any(price is None for price in prices):
        return None
    cheapest = min((price or 0.0) / v for price, v in zip(prices, problem.speeds, strict=True))
    work = min(
        problem.job.batch_size
        / size
        * sum(layer.forward + layer.backward for layer in problem.layers(size))
        for size in sizes
    )
    return cheapest * work / 3600 * (1 - _ROUNDING)


def _sent(problem: Problem, num_pipelines: int) -> Seconds:
    """Return the least time of reduce-scatter plus all-gather of all layers' gradients."""
    if num_pipelines == 1 or problem.job.sync != Sync.ALL_REDUCE:
        return 0.0  # no device waits for all of it, or it does not add up over stages
    gradients = sum(layer.parameter_bytes for layer in problem.profile.layers)
    fastest = float(problem.links.uplinks.max())
    share = 2 * (num_pipelines - 1) / num_pipelines
    return share * gradients * problem.job.gradient_bytes / fastest


def _divided(
    count: float,
    work: Seconds,
    num_pipelines: int,
    islands: NDArray[np.float64],
    crossing: Seconds,
    sent: float,
) -> Seconds:
    """Argument 4: the least time over the number of pipelines that leave their island."""
    leaving = np.arange(num_pipelines + 1)
    largest = np.concatenate([[0.0], np.cumsum(islands)])
    inside = largest[np.minimum(num_pipelines - leaving, len(islands))]
    done = count * work + sent * (num_pipelines - leaving)
    # A link that takes no time carries any number of pipelines, if at least one leaves.
    crossed = leaving * work / crossing if crossing > 0 else np.where(leaving > 0, np.inf, 0.0)
    takes = done / np.maximum(inside + crossed, _NEVER)
    return float(takes.min())


def _islands(problem: Problem) -> Iterator[tuple[NDArray[np.float64], float]]:
    """Yield the islands' sums of speeds, largest first, and the fastest link between islands."""
    both = problem.links.both_ways
    speeds = np.array(problem.speeds)
    for island in problem.islands:
        apart = island[:, None] != island[None, :]
        sums = np.bincount(island, weights=speeds).astype(np.float64)
        yield np.sort(sums)[::-1], float(both[apart].max())

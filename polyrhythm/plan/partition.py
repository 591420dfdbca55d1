"""Partition layers into stages so that the slowest stage is as fast as possible.

A dynamic programme over stages and layers finds the partition whose slowest stage, or slowest
transfer between stages, is fastest; among those with the same bottleneck, the one whose stages are
most equal. A stage is as slow as its slowest replica and holds no more than its smallest one. Once
per step it waits for all stages before it (`step_bound.py`), so with few micro-batches late stages
should have less work.

`partition_within_memory` does this for a job without measurements, on devices of equal speed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from polyrhythm.describe.units import show
from polyrhythm.errors import PlanError
from polyrhythm.types import Bytes

Floats = NDArray[np.float64]


def partition_layers(
    work: Sequence[float],
    slowness: Sequence[float],
    *,
    num_microbatches: float = math.inf,
    transfers: Floats | None = None,
    fits: NDArray[np.bool_] | None = None,
    extra: Floats | None = None,
) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    `work` is per layer, `slowness` per stage; micro-batches are those of a pipeline in a step.
    `transfers[s, n]` is the time of the link after stage s if n layers are before it;
    `fits[s, a, b]` whether stage s can hold layers a to b, and `extra[s, a, b]` the work that it
    has then besides that of its layers. Raises PlanError if nothing fits.
    """
    num_layers, num_stages = len(work), len(slowness)
    if num_stages > num_layers:
        raise PlanError(
            f"{num_stages} stages for {num_layers} layers",
            expected=f"at most {num_layers} stages, one layer or more in each",
            fix=f"use at most {num_layers} stages, or a model with more layers",
        )
    done = np.concatenate([[0.0], np.cumsum(work)])
    inside = done[None, :] - done[:, None]  # [a, b]
    before = np.arange(num_layers + 1)
    ordered = before[:, None] < before[None, :]
    # best[n]: (bottleneck, sum of squares) of the first stages with n layers in all
    worst = np.where(before == 0, 0.0, np.inf)
    spread = np.where(before == 0, 0.0, np.inf)
    elapsed = np.zeros(num_layers + 1)  # of one micro-batch in the stages before
    choices = []
    for stage, slow in enumerate(slowness):
        all_work = inside if extra is None else inside + extra[stage]
        takes = np.where(ordered, all_work * slow, np.inf)
        if fits is not None:
            takes = np.where(fits[stage], takes, np.inf)
        waited = elapsed[:, None] / num_microbatches
        longest = np.maximum(worst[:, None], takes + waited)
        if transfers is not None and stage < num_stages - 1:
            longest = np.maximum(longest, transfers[stage][None, :])
        squares = spread[:, None] + np.where(np.isfinite(takes), takes, np.inf) ** 2
        # Of equal bottlenecks, up to rounding, the one with the smallest sum of squares.
        lowest = longest.min(axis=0)
        good = longest <= lowest[None, :] * (1 + 1e-9)
        choice = np.where(good, squares, np.inf).argmin(axis=0)
        worst, spread = longest[choice, before], squares[choice, before]
        elapsed = elapsed[choice] + np.where(np.isfinite(worst), takes[choice, before], 0.0)
        choices.append(choice)
    if not np.isfinite(worst[-1]):
        raise PlanError(
            f"no partition of {num_layers} layers into {num_stages} stages",
            expected="every stage to fit into the memory of its devices",
            fix="use more stages, smaller micro-batches, or devices with more memory",
        )
    ends = [num_layers]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return tuple(b - a for a, b in zip(ends[::-1][:-1], ends[::-1][1:], strict=True))


@dataclass(frozen=True, slots=True)
class StageMemoryLimit:
    """The memory that a stage may use, and the device that it is on."""

    device: str
    nbytes: Bytes


def partition_within_memory(
    work: Sequence[float],
    needed: Floats,
    limits: Sequence[StageMemoryLimit],
) -> tuple[int, ...]:
    """Return the number of layers of each stage: equal work, within the memory of each stage.

    `needed[a, b]` are the bytes of layers a to b, `limits` is per stage. Raises PlanError, which
    names the stage that does not fit and the number of stages that would.
    """
    room = np.array([limit.nbytes for limit in limits], np.float64)
    fits = needed[None, :, :] <= room[:, None, None]
    even = (1.0,) * len(limits)
    if len(limits) <= len(work) and not _is_feasible(fits):
        raise _too_large(needed, limits, work)
    return partition_layers(work, even, fits=fits)


def _is_feasible(fits: NDArray[np.bool_]) -> bool:
    """Whether some partition has `fits[stage, a, b]` for every stage and its layers a to b."""
    num_layers = fits.shape[1] - 1
    ordered = np.triu(np.ones((num_layers + 1, num_layers + 1), bool), k=1)
    reached = np.arange(num_layers + 1) == 0
    for allowed in fits:
        reached = (reached[:, None] & allowed & ordered).any(axis=0)
    return bool(reached[-1])


def _too_large(
    needed: Floats, limits: Sequence[StageMemoryLimit], work: Sequence[float]
) -> PlanError:
    """Split by memory; name the stage that lacks most of it."""
    single = [float(needed[i, i + 1]) for i in range(len(work))]
    counts = partition_layers(single, [1 / max(1, limit.nbytes) for limit in limits])
    ends = list(pairwise(accumulate(counts, initial=0)))
    lacking = [needed[a, b] - limit.nbytes for (a, b), limit in zip(ends, limits, strict=True)]
    stage = int(np.argmax(lacking))
    (a, b), limit = ends[stage], limits[stage]
    smallest = min(limits, key=lambda each: each.nbytes)
    enough = next(
        (
            number
            for number in range(len(limits) + 1, len(work) + 1)
            if _is_feasible(np.stack([needed <= smallest.nbytes] * number))
        ),
        None,
    )
    largest = int(np.argmax(single))
    return PlanError(
        f"stage {stage} of {len(limits)} (layers {a} to {b - 1}) needs {_show(needed[a, b])} and "
        f"{limit.device!r} has {_show(limit.nbytes)} for it",
        expected="its weights, their gradients and two optimizer values each, as Adam has, in "
        "memory; activations come on top",
        fix=f"use {enough} stages, with as many processes for each pipeline"
        if enough is not None
        else f"use devices with more memory: layer {largest} alone needs {_show(single[largest])}",
    )


def _show(nbytes: float) -> str:
    return show(int(nbytes), Bytes)

"""The memory of a stage as a sum of terms, and how many micro-batches fit.

Two terms depend on the schedule: the activations of the micro-batches in flight, and the messages
between stages. A stage that recomputes its activations holds for a micro-batch in flight only what
its layers start from, and the activations of one layer while it runs the backward of that layer.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174, with every
layer as a segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from polyrhythm.describe.units import check_amount
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Action, Bytes, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one stage, for one micro-batch size."""

    weights: Bytes
    gradients: Bytes
    optimizer: Bytes  # its state: two floats per weight for Adam
    activation: Bytes  # held for one micro-batch from its forward to its backward
    message: Bytes  # one activation or gradient at the boundary, received or being sent
    recomputed: Bytes = 0  # held in a backward, once: activations of the layer that is recomputed
    cast: Bytes = 0  # copies of weights in the dtype of autocast, which all micro-batches share
    temporary: Bytes = 0  # of the layer that runs, and workspaces of the device's libraries

    def __post_init__(self) -> None:
        for field in fields(self):
            check_amount(field.name, getattr(self, field.name), Bytes)


def needed(stage: StageMemory, *, in_flight: int, window: int) -> Bytes:
    """Return the peak bytes of the stage with `in_flight` micro-batches.

    Counted: weights, gradients, optimizer state, `in_flight` times what a forward leaves for its
    backward, what a backward recomputes, copies of weights for autocast, what a layer needs while
    it runs, and `window` boundary messages: receives posted ahead and sends under way, of both
    directions together. Not counted: the framework itself, and memory lost between allocations;
    leave room for them in the limit.
    """
    weights = stage.weights + stage.gradients + stage.optimizer + stage.cast
    fixed = weights + stage.recomputed + stage.temporary
    return fixed + in_flight * stage.activation + window * stage.message


def max_in_flight(stage: StageMemory, limit: Bytes, num_microbatches: int, *, window: int) -> int:
    """Return how many of `num_microbatches` fit into `limit`; 0 if not even one."""
    room = limit - needed(stage, in_flight=0, window=window)
    free = num_microbatches if stage.activation == 0 else room // stage.activation
    return 0 if room < 0 else min(free, num_microbatches)


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Return the peak number of micro-batches between forward and backward: held activations."""
    live = peak = 0
    for op, _ in actions:
        live += 1 if op is Op.F else -1
        peak = max(peak, live)
    return peak


class ActivationMemory(NamedTuple):
    """Activations of consecutive layers."""

    per_microbatch: Bytes  # from the forward of a micro-batch to its backward
    recomputed: Bytes = 0  # once, during a backward


def recomputed_activations(stored: Sequence[Bytes], kept: Sequence[Bytes]) -> ActivationMemory:
    """Return the activations of layers that recompute, each on its own.

    `stored` is what a layer stores without recomputation, and `kept` the part of it that stays from
    forward to backward: its input. Backwards run one layer at a time, so the largest rest counts.
    If no layer keeps more than it stores, the memory never exceeds that without recomputation.
    """
    rests = (full - part for full, part in zip(stored, kept, strict=True))
    return ActivationMemory(sum(kept), max([0, *rests]))


def peak_temporary(temporary: Sequence[Bytes], held: Sequence[Bytes]) -> Bytes:
    """Return the peak of consecutive layers beyond what all of them hold for a micro-batch.

    `temporary` is what each needs while it runs, beyond what it holds. When a layer runs, those
    after it hold nothing yet in the forward, and nothing any more in the backward.
    """
    peak = later = 0
    for own, stored in zip(reversed(temporary), reversed(held), strict=True):
        peak = max(peak, own - later)
        later += stored
    return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of a pipeline's stages by micro-batch size, and their limits."""

    stages: Mapping[int, Sequence[StageMemory]]  # by micro-batch size, then per stage
    limits: Sequence[Bytes]  # per stage
    window: int  # boundary messages that a stage holds, as in `needed`

    def __post_init__(self) -> None:
        for size, stages in self.stages.items():
            if len(stages) != len(self.limits):
                raise DescriptionError(
                    f"memory of {len(stages)} stages for micro-batches of {size}, "
                    f"and {len(self.limits)} limits",
                    expected="one of each per stage",
                    fix="describe the memory of every stage",
                )

    def needed(self, microbatch_size: int, in_flight: Sequence[int]) -> tuple[Bytes, ...]:
        """Return the bytes that each stage needs."""
        stages = zip(self.stages[microbatch_size], in_flight, strict=True)
        return tuple(needed(stage, in_flight=n, window=self.window) for stage, n in stages)

    def max_in_flight(self, microbatch_size: int, num_microbatches: int) -> tuple[int, ...]:
        """Return per stage how many of `num_microbatches` fit; 0 if not even one.

        A size that is not in `stages` does not fit.
        """
        if microbatch_size not in self.stages:
            return (0,) * len(self.limits)
        return tuple(
            max_in_flight(stage, limit, num_microbatches, window=self.window)
            for stage, limit in zip(self.stages[microbatch_size], self.limits, strict=True)
        )

"""The memory of a stage as a sum of terms, and how many micro-batches fit.

Two terms depend on the schedule: the activations of the micro-batches in flight, and the messages
between stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

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

    def __post_init__(self) -> None:
        for field in fields(self):
            check_amount(field.name, getattr(self, field.name), Bytes)


def needed(stage: StageMemory, *, in_flight: int, window: int) -> Bytes:
    """Return the peak bytes of the stage with `in_flight` micro-batches.

    Counted: weights, gradients, optimizer state, `in_flight` times what a forward leaves for its
    backward, and `window` boundary messages: receives posted ahead and sends under way, of both
    directions together. Not counted: what a single layer needs while it runs, the framework itself,
    and memory lost between allocations; leave room for them in the limit.
    """
    fixed = stage.weights + stage.gradients + stage.optimizer
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

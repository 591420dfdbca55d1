"""Which samples of a step each pipeline computes, where all pipelines make each step together.

A step is one global batch: so many positions in a row, cut into micro-batches. Pipelines get whole
micro-batches, one after the other in the order of their numbers, so that the batch is the same
whoever computes it. The last micro-batch may be smaller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from polyrhythm.errors import PlanError
from polyrhythm.sync.dispatch import Range, SamplerState


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The global batch of each step, cut into micro-batches."""

    size: int  # samples
    microbatch_size: int

    def __post_init__(self) -> None:
        if self.size < 1 or not 1 <= self.microbatch_size <= self.size:
            raise PlanError(
                f"a batch of {self.size} samples in micro-batches of {self.microbatch_size}",
                expected="at least one sample, and micro-batches no larger than the batch",
                fix="use a larger batch_size, or a smaller microbatch_size",
            )

    @property
    def num_microbatches(self) -> int:
        return -(-self.size // self.microbatch_size)

    def equal_shares(self, num_pipelines: int) -> tuple[int, ...]:
        """Micro-batches of each pipeline, as even as it goes, larger ones first."""
        each, rest = divmod(self.num_microbatches, num_pipelines)
        if each < 1:
            raise PlanError(
                f"{self.num_microbatches} micro-batches for {num_pipelines} pipelines",
                expected="at least one for each pipeline",
                fix="use a larger batch_size, a smaller microbatch_size, or fewer pipelines",
            )
        return tuple(each + (pipeline < rest) for pipeline in range(num_pipelines))

    def range_of(self, step: int, microbatches: range) -> Range:
        """The positions of some micro-batches in a row of a step."""
        start = step * self.size
        ends = (microbatches.start, microbatches.stop)
        first, end = (start + min(end * self.microbatch_size, self.size) for end in ends)
        return first, end


def microbatch_ranges(shares: Sequence[int]) -> list[range]:
    """The micro-batches of each pipeline, from how many each gets."""
    return [range(*ends) for ends in pairwise(accumulate(shares, initial=0))]


class RemainingSamples:
    """The positions that are left, counted on without gaps from how many were used."""

    def __init__(self, sampler_state: SamplerState) -> None:
        self._first = sampler_state.num_used
        self._returned = sorted((*sampler_state.pool, *sampler_state.outstanding))
        self._next = sampler_state.next

    def ranges(self, start: int, end: int) -> tuple[Range, ...]:
        """What was given back comes first, then what was never dealt."""
        found, begins = list[Range](), self._first
        for low, high in (*self._returned, (self._next, self._next + end)):
            ends = begins + high - low
            first, last = max(start, begins), min(end, ends)
            if first < last:
                found.append((low + first - begins, low + last - begins))
            begins = ends
        return tuple(found)

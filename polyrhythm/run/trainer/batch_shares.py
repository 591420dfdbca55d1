"""Which samples of a step each pipeline computes in the lockstep sync modes.

A step is one global batch: consecutive positions, divided into micro-batches. Each pipeline gets
consecutive whole micro-batches, in the order of pipeline numbers, so that the batch does not
depend on the number of pipelines. The last micro-batch may be smaller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from polyrhythm.errors import PlanError
from polyrhythm.sync.dispatch import Range, SamplerState


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The global batch of each step, divided into micro-batches."""

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
        """Divide the micro-batches evenly among pipelines, larger shares first."""
        each, rest = divmod(self.num_microbatches, num_pipelines)
        if each < 1:
            raise PlanError(
                f"{self.num_microbatches} micro-batches for {num_pipelines} pipelines",
                expected="at least one for each pipeline",
                fix="use a larger batch_size, a smaller microbatch_size, or fewer pipelines",
            )
        return tuple(each + (pipeline < rest) for pipeline in range(num_pipelines))

    def range_of(self, step: int, microbatches: range) -> Range:
        """Return the positions of consecutive micro-batches of a step."""
        offset = step * self.size
        start = offset + min(microbatches.start * self.microbatch_size, self.size)
        return start, offset + min(microbatches.stop * self.microbatch_size, self.size)


def microbatch_ranges(shares: Sequence[int]) -> list[range]:
    """Return the micro-batches of each pipeline, given the number of each."""
    return [range(*bounds) for bounds in pairwise(accumulate(shares, initial=0))]


class RemainingSamples:
    """The positions not used yet, renumbered consecutively from the number of used ones."""

    def __init__(self, sampler_state: SamplerState) -> None:
        self._first = sampler_state.num_used
        self._returned = sorted((*sampler_state.pool, *sampler_state.outstanding))
        self._next = sampler_state.next

    def ranges(self, start: int, end: int) -> tuple[Range, ...]:
        """Return the positions numbered `start` to `end`: returned ones first, then new ones."""
        found, offset = list[Range](), self._first
        for low, high in (*self._returned, (self._next, self._next + end)):
            next_offset = offset + high - low
            first, last = max(start, offset), min(end, next_offset)
            if first < last:
                found.append((low + first - offset, low + last - offset))
            offset = next_offset
        return tuple(found)

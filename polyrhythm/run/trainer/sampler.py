"""Batch samplers: which samples a pipeline computes in its next step.

A step is one global batch: consecutive positions, divided into micro-batches. In lockstep each
pipeline gets consecutive whole micro-batches, in the order of pipeline numbers, so that the batch
does not depend on the number of pipelines. Otherwise a pipeline acquires samples when it has
finished its last ones, so that fast pipelines get more; each sample is used once.

Only the first stage of a pipeline calls the sampler; later stages read the batch header.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile
from typing import Protocol

import msgspec
from msgspec import structs

from polyrhythm.errors import PlanError
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.checkpoint.manifest import CheckpointError
from polyrhythm.run.data.loader import PredictedRanges, resolved_ranges
from polyrhythm.run.data.sample_dispatcher import SampleDispatcher
from polyrhythm.run.pipeline.batch import BatchSlice
from polyrhythm.sync.dispatch import Range, Ranges, SamplerState
from polyrhythm.sync.modes import SyncMode


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The global batch of each step, divided into micro-batches."""

    size: int  # samples
    microbatch_size: int
    first_position: int = 0  # of step 0; another one after a restore with another size

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

    def step_at(self, position: int) -> int:
        """Return the global step of the sample at a position."""
        return (position - self.first_position) // self.size

    def start_of(self, step: int) -> int:
        """Return the number of samples that the steps before `step` use."""
        return self.first_position + step * self.size

    def range_of(self, step: int, microbatches: range) -> Range:
        """Return the positions of consecutive micro-batches, relative to those of step 0."""
        offset = step * self.size
        start = offset + min(microbatches.start * self.microbatch_size, self.size)
        return start, offset + min(microbatches.stop * self.microbatch_size, self.size)


class DataSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What determines the samples of each step; saved in every checkpoint."""

    batch_size: int
    microbatch_size: int  # recorded only: a step uses the same samples
    seed: int
    shuffle: bool
    num_samples: int | None  # None for an iterable dataset
    first_position: int = 0  # as in GlobalBatch

    def check_continues(self, saved: "DataSettings") -> None:
        """Refuse to continue in another order of samples; raises CheckpointError."""
        for name in ("seed", "shuffle", "num_samples"):
            here, there = getattr(self, name), getattr(saved, name)
            if here != there:
                same = "the same dataset"
                if name != "num_samples":
                    same = f"data=pr.DataConfig({name}={there})"
                raise CheckpointError(
                    f"{name}={here}, and the checkpoint has {name}={there}",
                    expected="the data of the checkpoint: in another order, samples that were used "
                    "would be used again, and others not at all",
                    fix=f"pass {same}, or restore(restart_data=True) to keep weights, optimizer "
                    "and step, and to read the data from its first sample on",
                )

    def continued(self, global_batch: GlobalBatch, step: int, num_used: int) -> GlobalBatch:
        """Return the batch after a restore at `step`: its samples follow the used ones."""
        first = self.first_position
        if global_batch.size != self.batch_size:
            first = num_used - step * global_batch.size
        return replace(global_batch, first_position=first)


def microbatch_ranges(shares: Sequence[int]) -> list[range]:
    """Return the micro-batches of each pipeline, given the number of each."""
    return [range(*bounds) for bounds in pairwise(accumulate(shares, initial=0))]


class RemainingSamples:
    """The positions not used yet, renumbered consecutively from the number of used ones."""

    def __init__(self, sampler_state: SamplerState) -> None:
        self._first = sampler_state.num_used
        self._returned = sorted((*sampler_state.pool, *sampler_state.outstanding))
        self._next = sampler_state.next
        self._last_returned = self._first + sum(high - low for low, high in self._returned)

    def ranges(self, start: int, end: int) -> tuple[Range, ...]:
        """Return the positions numbered `start` to `end`: returned ones first, then new ones."""
        if start == end:
            return ()
        if start >= self._last_returned:  # mostly; called for many steps ahead
            shift = self._next - self._last_returned
            return ((start + shift, end + shift),)
        found, offset = list[Range](), self._first
        for low, high in (*self._returned, (self._next, self._next + end)):
            next_offset = offset + high - low
            first, last = max(start, offset), min(end, next_offset)
            if first < last:
                found.append((low + first - offset, low + last - offset))
            offset = next_offset
        return tuple(found)


class StepCursor:
    """Counts global steps over the samples that are not used yet.

    After groups a part of the first one's samples may be used. Then it has the others alone if one
    pipeline computes them; several need whole steps, and use up to a step more in the end.
    """

    def __init__(
        self,
        global_batch: GlobalBatch,
        sampler_state: SamplerState,
        end: int,
        *,
        is_alone: bool = False,
    ) -> None:
        """`end`: the number of global steps, counted from the start of training.

        `is_alone`: one pipeline computes the steps.
        """
        self.global_batch, self._initial = global_batch, sampler_state
        self._start, self._remaining = sampler_state.num_used, RemainingSamples(sampler_state)
        self._num_made, self._first = 0, global_batch.step_at(sampler_state.num_used)
        self._num_steps = end - self._first
        used = self._start - global_batch.start_of(self._first)
        self._num_omitted = used if is_alone else 0  # samples of the first step

    @property
    def is_over(self) -> bool:
        return self._num_made >= self._num_steps

    def next(self, microbatches: range) -> BatchSlice | None:
        if self.is_over:
            return None
        ranges = self.peek(microbatches)
        self._num_made += 1
        return BatchSlice(self._first + self._num_made - 1, ranges)

    def peek(self, microbatches: range, num_skipped: int = 0) -> Ranges:
        """Return the ranges that `next` would return, or that after `num_skipped` calls of it."""
        if self._num_made + num_skipped >= self._num_steps:
            return ()
        bounds = self.global_batch.range_of(self._num_made + num_skipped, microbatches)
        start, end = (self._start + max(0, bound - self._num_omitted) for bound in bounds)
        return self._remaining.ranges(start, end)

    def sampler_state(self, step: int | None = None) -> SamplerState:
        """Return the state after all started steps are done, or after `step` global steps."""
        num_made = self._num_made if step is None else step - self._first
        used = self._start + max(0, num_made * self.global_batch.size - self._num_omitted)
        left = self._remaining.ranges(used, used + self._initial.next)
        pool = tuple((low, min(high, self._initial.next)) for low, high in left)
        pool = tuple((low, high) for low, high in pool if low < high)
        return SamplerState(next=used + sum(high - low for low, high in pool), pool=pool)


class BatchSampler(Protocol):
    def next(self) -> BatchSlice | None:
        """Return the next samples of this pipeline; None when the phase is over."""

    def peek(self) -> PredictedRanges:
        """Return the ranges that the following `next` probably returns, for prefetching."""

    def peek_ahead(self, num_steps: int) -> tuple[Ranges, ...]:
        """Return the ranges of up to `num_steps` steps after that of `peek`, if predictable."""

    def acknowledge(self) -> None:
        """Report that the last samples are used."""

    def sampler_state(self) -> SamplerState:
        """Return which samples are used, for a checkpoint."""


class LockstepSampler:
    """All pipelines know the shares of a step."""

    def __init__(self, steps: StepCursor, microbatches: range) -> None:
        """`microbatches`: this pipeline's share of the last step, and probably of the next."""
        self._steps, self._microbatches = steps, microbatches

    def peek(self) -> PredictedRanges:
        return self._steps.peek(self._microbatches)

    def peek_ahead(self, num_steps: int) -> tuple[Ranges, ...]:
        found = (self._steps.peek(self._microbatches, 1 + i) for i in range(num_steps))
        return tuple(takewhile(bool, found))

    def acknowledge(self) -> None:
        """Do nothing: all pipelines know which samples are used."""

    def sampler_state(self, step: int | None = None) -> SamplerState:
        return self._steps.sampler_state(step)


class FixedShareSampler(LockstepSampler):
    """Each pipeline has the same micro-batches of each step.

    If gradients are averaged over pipelines, a pipeline's loss is weighted by its samples.
    """

    def __init__(
        self, steps: StepCursor, shares: Sequence[int], pipeline: int, *, averages_gradients: bool
    ) -> None:
        super().__init__(steps, microbatch_ranges(shares)[pipeline])
        self._num_pipelines, self._averages_gradients = len(shares), averages_gradients

    def next(self) -> BatchSlice | None:
        found = self._steps.next(self._microbatches)
        if found is None or not self._averages_gradients:
            return found
        if self._num_pipelines == 1:
            return structs.replace(found, is_whole=True)
        weight = found.num_samples * self._num_pipelines / self._steps.global_batch.size
        return structs.replace(found, weight=weight)


class BalancedShareSampler(LockstepSampler):
    """Shares follow the pipelines' speed; gradients are weighted by micro-batches (`balanced`)."""

    def __init__(self, steps: StepCursor, sync: GroupSync) -> None:
        super().__init__(steps, range(0))
        self._sync = sync

    def next(self) -> BatchSlice | None:
        if self._steps.is_over:
            return None
        self._microbatches = self._sync.share(self._steps.global_batch.num_microbatches)
        found, global_batch = self._steps.next(self._microbatches), self._steps.global_batch
        if found is None:
            return None
        weight = found.num_samples * global_batch.num_microbatches / global_batch.size
        return structs.replace(found, weight=weight)  # the last micro-batch may be smaller


class DispatchedSampler:
    """The coordinator dispatches samples on request; requests are one chunk ahead."""

    def __init__(self, global_batch: GlobalBatch, sync: GroupSync, count: int) -> None:
        """`count`: samples of this pipeline in each of its steps."""
        self._global_batch, self._count = global_batch, count
        self._samples = SampleDispatcher(sync)
        self._number = -1  # of the last chunk returned
        self._requests = deque([self._samples.acquire(0, count)])  # for the chunks after it

    def next(self) -> BatchSlice | None:
        ranges = self._requests[0].wait()
        if not ranges:
            return None
        self._request_next()
        self._requests.popleft()
        self._number += 1
        step = self._global_batch.step_at(max(end - 1 for _, end in ranges))
        return BatchSlice(step, ranges)

    def peek(self) -> PredictedRanges:
        return self._requests[0]

    def peek_ahead(self, num_steps: int) -> tuple[Ranges, ...]:
        return ()

    def acknowledge(self) -> None:
        self._samples.acknowledge(self._number)
        if resolved_ranges(self._requests[0]):
            self._request_next()  # now, so that the answer is here when the next step starts

    def sampler_state(self) -> SamplerState:
        return self._samples.sampler_state()

    def _request_next(self) -> None:
        """Request the chunk after the one for the next step, unless already requested."""
        if len(self._requests) == 1:
            self._requests.append(self._samples.acquire(self._number + 2, self._count))


def make_sampler(
    mode: SyncMode,
    global_batch: GlobalBatch,
    shares: Sequence[int],
    pipeline: int,
    sampler_state: SamplerState,
    end: int,
    sync: GroupSync | None,
) -> BatchSampler:
    """Make the sampler of a sync mode; `sync` is the GroupSync of a first stage, else None."""
    if sync is not None and not mode.lockstep:
        return DispatchedSampler(
            global_batch, sync, shares[pipeline] * global_batch.microbatch_size
        )
    steps = StepCursor(global_batch, sampler_state, end, is_alone=len(shares) == 1)
    if sync is not None and mode.balances_microbatches:
        return BalancedShareSampler(steps, sync)
    averages_gradients = mode.averages == "gradients"
    return FixedShareSampler(steps, shares, pipeline, averages_gradients=averages_gradients)


def sum_of_weights(mode: SyncMode, global_batch: GlobalBatch, num_pipelines: int) -> int:
    """Return the sum over pipelines of the weights of their losses, if gradients are averaged."""
    if mode.averages != "gradients" or num_pipelines == 1:
        return 1
    return global_batch.num_microbatches if mode.balances_microbatches else num_pipelines

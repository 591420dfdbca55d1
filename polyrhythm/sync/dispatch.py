"""The sample dispatcher: which pipeline computes which samples, each position once.

Positions count samples from the start of training (`run/data/order.py` maps positions to samples).
A pipeline acquires them in chunks on demand: a fast one acquires more, and its samples do not
depend on its number. A chunk is outstanding until its update is done. If models are averaged, only
the pipeline has that update until an average with it is committed: its chunks are uncommitted until
then. The outstanding and uncommitted chunks of a lost pipeline return to the pool and are
dispatched again before new positions. So each position below `next` is used, outstanding with one
pipeline, or in the pool.

A pipeline numbers its chunks from 0 in each incarnation. A repeated request returns the same chunk.

Source: none; SDPipe and Prague assign each worker a fixed share of the samples.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from polyrhythm.errors import PolicyError
from polyrhythm.sync.snapshot import register_state

Range = tuple[int, int]  # positions from start to end, end excluded
Ranges = tuple[Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """Initial and current state of a dispatcher: all that a checkpoint needs.

    Positions that were outstanding in a checkpoint are dispatched again.
    """

    limit: int | None = None  # training ends before this position; None for never
    next: int = 0  # the first position that was never dispatched
    pool: Ranges = ()  # returned by lost pipelines
    outstanding: Ranges = ()  # of all pipelines

    def __post_init__(self) -> None:
        ranges = sorted((*self.pool, *self.outstanding))
        ends = [0, *(end for _, end in ranges)]
        is_good = all(end <= start < stop for end, (start, stop) in zip(ends, ranges, strict=False))
        if not (is_good and ends[-1] <= self.next) or (self.limit is not None and self.limit < 0):
            raise PolicyError(
                f"next={self.next} pool={self.pool} outstanding={self.outstanding} "
                f"limit={self.limit}",
                expected="a limit of 0 or more, and ranges (start, end) below next that are not "
                "empty and do not overlap",
                fix="pass a saved sampler state, or SamplerState(limit=...) to start from scratch",
            )

    @property
    def first_unused(self) -> int:
        """The first unused position; samples before it are never read again."""
        return min(start for start, _ in ((self.next, 0), *self.pool, *self.outstanding))

    @property
    def num_used(self) -> int:
        return self.next - sum(end - start for start, end in (*self.pool, *self.outstanding))


class SampleLedger:
    def __init__(self, sampler_state: SamplerState, *, has_commits: bool = False) -> None:
        """`has_commits`: a chunk of a lost pipeline is used only if an average has its update."""
        self.limit = sampler_state.limit
        self._next = sampler_state.next
        self._pool = merge_ranges((*sampler_state.pool, *sampler_state.outstanding))
        self._num_acquired: dict[int, int] = {}  # chunks, by pipeline
        # Chunks that are not used yet, by pipeline (if it has any) and by number.
        self._outstanding: dict[int, dict[int, Ranges]] = {}
        self._has_commits = has_commits
        self._uncommitted: dict[int, Ranges] = {}  # of updates since the last published model
        self._published: dict[int, Ranges] = {}  # of the model that the pipeline averages now

    def acquire(self, pipeline: int, number: int, count: int, until: int | None = None) -> Ranges:
        """Return chunk `number` of a pipeline: `count` positions, or fewer at the end.

        The end is the limit or `until`. If no position is available now, return (), which uses up
        no number; if `is_exhausted`, none will become available.
        """
        if self.is_outstanding(pipeline, number):
            return self._outstanding[pipeline][number]
        if number != self.num_acquired(pipeline):
            raise PolicyError(
                f"chunk {number} of pipeline {pipeline}, which has acquired "
                f"{self.num_acquired(pipeline)}",
                expected="chunks in order, from 0 in each incarnation of a pipeline; no used ones",
                fix=f"acquire chunk {self.num_acquired(pipeline)}",
            )
        end = self._end(until)
        chunk, self._pool = _split_ranges(self._pool, count, end)
        missing = count - sum(stop - start for start, stop in chunk)
        new = int(min(missing, max(end - self._next, 0)))
        if new:
            chunk = merge_ranges((*chunk, (self._next, self._next + new)))
            self._next += new
        if chunk:
            self._outstanding.setdefault(pipeline, {})[number] = chunk
            self._num_acquired[pipeline] = number + 1
        return chunk

    def end_after_batch(self, batch: int) -> None:
        """Limit dispatching to the end of the current batch, of `batch` positions each."""
        last = -(-self._next // batch) * batch
        self.limit = last if self.limit is None else min(self.limit, last)

    def num_acquired(self, pipeline: int) -> int:
        """Number of chunks acquired, which is the number of the pipeline's next chunk."""
        return self._num_acquired.get(pipeline, 0)

    def is_outstanding(self, pipeline: int, number: int) -> bool:
        """Whether a pipeline has acquired chunk `number` and not acknowledged it."""
        return number in self._outstanding.get(pipeline, ())

    def acknowledge(self, pipeline: int, number: int) -> bool:
        """Mark a chunk as used; return whether it was outstanding."""
        if not self.is_outstanding(pipeline, number):
            return False
        chunks = self._outstanding[pipeline]
        if self._has_commits:
            before = self._uncommitted.get(pipeline, ())
            self._uncommitted[pipeline] = merge_ranges((*before, *chunks[number]))
        del chunks[number]
        if not chunks:
            del self._outstanding[pipeline]
        return True

    def publish(self, pipeline: int) -> None:
        """A pipeline offers its model for an average, with the updates of all its used chunks."""
        new = self._uncommitted.pop(pipeline, ())
        if new:
            self._published[pipeline] = merge_ranges((*self._published.get(pipeline, ()), *new))

    def commit(self, pipeline: int) -> None:
        """The model that a pipeline has published is in an average, and is not lost with it."""
        self._published.pop(pipeline, None)

    def release(self, pipeline: int) -> None:
        """Return the outstanding and uncommitted chunks of a lost pipeline to the pool."""
        self._num_acquired.pop(pipeline, None)
        outstanding = _ranges(self._outstanding.pop(pipeline, {}))
        uncommitted = self._uncommitted.pop(pipeline, ()), self._published.pop(pipeline, ())
        self._pool = merge_ranges((*self._pool, *outstanding, *uncommitted[0], *uncommitted[1]))

    def is_exhausted(self, pipeline: int, until: int | None = None) -> bool:
        """Whether a pipeline can get no position before `until`, even if others are lost.

        Its own chunks do not count: they return to the pool only when it is lost.
        """
        end = self._end(until)
        if self._next < end or any(start < end for start, _ in self._pool[:1]):
            return False
        others = (chunks for other, chunks in self._outstanding.items() if other != pipeline)
        return all(start >= end for chunks in others for start, _ in _ranges(chunks))

    def state(self) -> SamplerState:
        outstanding = (r for chunks in self._outstanding.values() for r in _ranges(chunks))
        return SamplerState(
            limit=self.limit,
            next=self._next,
            pool=self._pool,
            outstanding=merge_ranges(outstanding),
        )

    def _end(self, until: int | None) -> float:
        return min(math.inf if end is None else end for end in (self.limit, until))


def merge_ranges(ranges: Iterable[Range]) -> Ranges:
    """Merge adjacent ranges, which do not overlap, into as few as possible, in order."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return tuple(merged)


def _split_ranges(ranges: Ranges, count: int, end: float) -> tuple[Ranges, Ranges]:
    """Split off the first `count` positions below `end`; return them and the rest."""
    first: list[Range] = []
    rest: list[Range] = []
    for start, stop in ranges:
        split = int(max(start, min(stop, start + count, end)))
        count -= split - start
        first += [(start, split)] if start < split else []
        rest += [(split, stop)] if split < stop else []
    return tuple(first), tuple(rest)


def _ranges(chunks: Mapping[int, Ranges]) -> Iterator[Range]:
    return (one_range for ranges in chunks.values() for one_range in ranges)


register_state(SamplerState, SampleLedger)

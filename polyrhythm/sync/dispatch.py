"""The dispenser: which pipeline computes which samples, by position, each of them once.

Positions count samples from the beginning of training on (`run/data/order.py` says which sample is
at which). A pipeline takes them in chunks, when it wants some: so a fast one takes more, and what
it gets has nothing to do with which one it is. A chunk is outstanding until its update is made;
those of a pipeline that is lost go back to the pool, and are dealt again before new ones. So each
position below `next` is used, or outstanding with one pipeline, or in the pool.

A pipeline counts its chunks from 0 in each of its lives. Whoever asks for one again gets the same.

Source: none; SDPipe and Prague give each worker a share of the samples beforehand.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from polyrhythm.errors import PolicyError

Range = tuple[int, int]  # positions from the first number until before the second
Ranges = tuple[Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """What a dispenser begins with, and where it stands: all there is to save.

    What was outstanding when it was saved is dealt again.
    """

    limit: int | None = None  # training ends before this position; None for never
    next: int = 0  # the first position that was never dealt
    pool: Ranges = ()  # given back
    outstanding: Ranges = ()  # of all pipelines

    def __post_init__(self) -> None:
        taken = sorted((*self.pool, *self.outstanding))
        ends = [0, *(end for _, end in taken)]
        is_good = all(end <= start < stop for end, (start, stop) in zip(ends, taken, strict=False))
        if not (is_good and ends[-1] <= self.next) or (self.limit is not None and self.limit < 0):
            raise PolicyError(
                f"next={self.next} pool={self.pool} outstanding={self.outstanding} "
                f"limit={self.limit}",
                expected="a limit of 0 or more, and below next ranges (start, end) that are not "
                "empty and do not overlap",
                fix="give what a dispenser has said, or Supply(limit=...) to begin with",
            )

    @property
    def first_unused(self) -> int:
        """The first position that was not used: what lies before needs never be read again."""
        return min(start for start, _ in ((self.next, 0), *self.pool, *self.outstanding))

    @property
    def num_used(self) -> int:
        return self.next - sum(end - start for start, end in (*self.pool, *self.outstanding))


class SampleDispatcher:
    def __init__(self, sampler_state: SamplerState) -> None:
        self.limit = sampler_state.limit
        self._next = sampler_state.next
        self._pool = merge_ranges((*sampler_state.pool, *sampler_state.outstanding))
        self._num_acquired: dict[int, int] = {}  # chunks, by pipeline
        # Those that are not used yet: by pipeline, if it has any, and by number.
        self._outstanding: dict[int, dict[int, Ranges]] = {}

    def acquire(self, pipeline: int, number: int, count: int, until: int | None = None) -> Ranges:
        """A pipeline's chunk of that number: `count` positions, or fewer where they end.

        They end with the limit, or before `until`. Nothing, which takes no number, if there are
        none at present: for good, if `is_exhausted`.
        """
        if self.is_outstanding(pipeline, number):
            return self._outstanding[pipeline][number]
        if number != self.num_acquired(pipeline):
            raise PolicyError(
                f"chunk {number} of pipeline {pipeline}, which has taken "
                f"{self.num_acquired(pipeline)}",
                expected="chunks in order, from 0 in each life of a pipeline; used ones no more",
                fix=f"take chunk {self.num_acquired(pipeline)}",
            )
        end = self._end(until)
        found, self._pool = _first(self._pool, count, end)
        missing = count - sum(stop - start for start, stop in found)
        new = int(min(missing, max(end - self._next, 0)))
        if new:
            found = merge_ranges((*found, (self._next, self._next + new)))
            self._next += new
        if found:
            self._outstanding.setdefault(pipeline, {})[number] = found
            self._num_acquired[pipeline] = number + 1
        return found

    def end_after_batch(self, batch: int) -> None:
        """Deal no further than to the end of that batch, of so many, which is being dealt."""
        last = -(-self._next // batch) * batch
        self.limit = last if self.limit is None else min(self.limit, last)

    def num_acquired(self, pipeline: int) -> int:
        """The number of the chunk that the pipeline takes next."""
        return self._num_acquired.get(pipeline, 0)

    def is_outstanding(self, pipeline: int, number: int) -> bool:
        """Whether that chunk is outstanding."""
        return number in self._outstanding.get(pipeline, ())

    def acknowledge(self, pipeline: int, number: int) -> bool:
        """The update of a chunk is made: it is used. Whether it was outstanding."""
        if not self.is_outstanding(pipeline, number):
            return False
        chunks = self._outstanding[pipeline]
        del chunks[number]
        if not chunks:
            del self._outstanding[pipeline]
        return True

    def release(self, pipeline: int) -> None:
        """A life of a pipeline is over: what it had not used goes back."""
        self._num_acquired.pop(pipeline, None)
        self._pool = merge_ranges((*self._pool, *_ranges(self._outstanding.pop(pipeline, {}))))

    def is_exhausted(self, pipeline: int, until: int | None = None) -> bool:
        """Whether the pipeline gets none before `until` any more, even if others are lost.

        Those it has itself do not count: they go back only when it is lost.
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
    """The same positions in as few ranges as can be, in order; they do not overlap."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return tuple(found)


def _first(ranges: Ranges, count: int, end: float) -> tuple[Ranges, Ranges]:
    """The first so many positions, if they are below `end_after_batch`, and the rest."""
    found: list[Range] = []
    rest: list[Range] = []
    for start, stop in ranges:
        cut = int(max(start, min(stop, start + count, end)))
        count -= cut - start
        found += [(start, cut)] if start < cut else []
        rest += [(cut, stop)] if cut < stop else []
    return tuple(found), tuple(rest)


def _ranges(chunks: Mapping[int, Ranges]) -> Iterator[Range]:
    return (found for ranges in chunks.values() for found in ranges)

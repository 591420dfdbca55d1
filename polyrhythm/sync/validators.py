"""Validators of groups: whether the last groups connect all workers, and how old their data is.

Two validators check the candidate for the next group of one stage. `UnionConnectivity` requires
that the last P-1 groups and the candidate, each a clique, connect all workers. `CausalAge` bounds
the staleness itself: of every worker, all updates but the last `max_age` must be in the candidate's
average. `contraction` and `spectral_gap` measure groups afterwards.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023: equation 2 in section 3.2 (the mixing matrix),
section 3.3 (sync-graph, Assumption 1), section 3.4 (group validation). Departures: a window
requires only workers that were present throughout it, and has no path through a worker that left; a
failed group connects no workers. Causal age is new: the union of a window ignores the order of its
groups, so {3,4}, {2,3}, {1,2} repeated is connected though an update of 1 needs seven groups to
reach 4; and a permanent straggler delays every window, though no group misses a recent update.
A global average (`average_all.py`) resets both measures; so does a failed one, since validators
only see that all workers left and returned: for once, a stale model may go unnoticed.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import PolicyError
from polyrhythm.types import Group, Worker

_ABSENT_CLOCK = -(2**62)  # the clock of an absent worker: none of its updates is ever missing


class Validator(Protocol):
    """Checks the candidate: the workers of one stage offered since the last `form`."""

    def join(self, worker: Worker) -> None: ...

    def leave(self, worker: Worker) -> None:
        """Remove a worker, also from the candidate; its groups are done."""

    def offer(self, worker: Worker) -> None:
        """Add a worker with one more update to the candidate."""

    def missing_workers(self) -> tuple[Worker, ...]:
        """Workers whose updates the candidate lacks, sorted; empty if it is valid."""

    def is_valid(self) -> bool: ...

    def form(self, group: Group) -> None:
        """Turn the candidate, valid or not, into this group."""

    def done(self, group: Group, ok: bool) -> None:
        """Record that a group averaged; or that it failed, and its members are offered again."""


class UnionConnectivity:
    """Requires that the candidate and the last P-1 groups connect all workers.

    Sets of workers are bit masks.
    """

    def __init__(self, last_groups: int) -> None:
        if last_groups < 1:
            raise PolicyError(
                f"last_groups={last_groups}",
                expected="P >= 1: the number of consecutive groups that must connect all workers",
                fix="use 10, as the paper does, or 1 to average with all workers each time",
            )
        self.last_groups = last_groups  # P
        self._stage = 0
        self._history: deque[int] = deque(maxlen=last_groups - 1)
        self._num_groups = 0
        self._candidate = 0
        self._joined: dict[Worker, int] = {}  # number of groups before the worker joined
        self._required = 0  # workers present since the first group of the window
        self._recent: deque[Worker] = deque()  # workers that joined later

    def join(self, worker: Worker) -> None:
        self._stage = worker.stage
        self._joined[worker] = self._num_groups
        self._recent.append(worker)
        self._require_established()

    def leave(self, worker: Worker) -> None:
        others = ~(1 << worker.pipeline)
        del self._joined[worker]
        if worker in self._recent:
            self._recent.remove(worker)
        self._required &= others
        self._candidate &= others
        for _ in range(len(self._history)):
            self._history.append(self._history.popleft() & others)

    def offer(self, worker: Worker) -> None:
        self._candidate |= 1 << worker.pipeline

    def is_valid(self) -> bool:
        return not self._missing()

    def missing_workers(self) -> tuple[Worker, ...]:
        missing = self._missing()
        pipelines = (p for p in range(missing.bit_length()) if missing >> p & 1)
        return tuple(Worker(self._stage, pipeline) for pipeline in pipelines)

    def form(self, group: Group) -> None:
        self._history.append(self._candidate)
        self._num_groups += 1
        self._candidate = 0
        self._require_established()

    def done(self, group: Group, ok: bool) -> None:
        if ok:
            return
        mask = 0
        for worker in group.members:
            mask |= 1 << worker.pipeline
        for index in reversed(range(len(self._history))):
            if self._history[index] == mask:
                self._history[index] = 0
                return

    def _missing(self) -> int:
        """Required workers outside the candidate's connected component."""
        # Before P groups there is no complete window; Assumption 1 is about complete ones only.
        if len(self._history) < self.last_groups - 1:
            return 0
        missing, groups = self._required & ~self._candidate, list(self._history)
        reached, grows = self._candidate, True
        while missing and grows:
            unreached = []
            for group in groups:
                if group & reached:
                    reached |= group
                else:
                    unreached.append(group)
            grows, groups = len(unreached) < len(groups), unreached
            missing = self._required & ~reached
        return missing

    def _require_established(self) -> None:
        since = self._num_groups - (self.last_groups - 1)
        while self._recent and self._joined[self._recent[0]] <= max(since, 0):
            self._required |= 1 << self._recent.popleft().pipeline


class CausalAge:
    """Requires that of every worker, all updates but the last `max_age` are in the candidate.

    `seen[v][u]` is the number of updates of u that the model of v contains; averaging makes it the
    maximum over the members, so the members of a group share one row from then on. The model of a
    worker that joins is unknown: it counts as having seen no update of the others. When the last
    worker has left, all counts are reset: workers that join then are assumed to have equal models,
    as after a global average, or no trained ones.
    """

    def __init__(self, max_age: int) -> None:
        if max_age < 0:
            raise PolicyError(
                f"max_age={max_age}",
                expected="A >= 0: the number of updates of a worker that a group may miss",
                fix="use 10, or 0 for groups that miss no update",
            )
        self.max_age = max_age  # A
        self._stage = 0
        self._reset()

    def _reset(self) -> None:
        self._num_present = 0
        self._clock = np.zeros(0, np.int64)  # updates of each worker, by its pipeline
        self._seen: list[NDArray[np.int64]] = []  # rows; never changed in place once shared
        self._candidate: dict[int, None] = {}
        self._merged = np.zeros(0, np.int64)  # the row of the candidate
        self._open_rows: dict[int, NDArray[np.int64]] = {}  # rows of open groups, by first member

    def join(self, worker: Worker) -> None:
        self._num_present += 1
        self._stage, pipeline = worker
        self._grow(pipeline + 1)
        # If it was present before, its averaged updates still count; the others are lost.
        num_updates = self._seen[pipeline][pipeline]
        self._seen[pipeline] = self._empty_row()
        self._seen[pipeline][pipeline] = self._clock[pipeline] = num_updates

    def leave(self, worker: Worker) -> None:
        self._num_present -= 1
        if not self._num_present:
            self._reset()
            return
        self._clock[worker.pipeline] = _ABSENT_CLOCK
        if worker.pipeline in self._candidate:
            del self._candidate[worker.pipeline]
            self._merged = self._empty_row()
            for pipeline in self._candidate:
                self._add(pipeline)

    def offer(self, worker: Worker) -> None:
        self._clock[worker.pipeline] += 1
        self._candidate[worker.pipeline] = None
        self._add(worker.pipeline)

    def is_valid(self) -> bool:
        return int((self._clock - self._merged).max(initial=0)) <= self.max_age

    def missing_workers(self) -> tuple[Worker, ...]:
        old = np.flatnonzero(self._clock - self._merged > self.max_age)
        return tuple(Worker(self._stage, int(pipeline)) for pipeline in old)

    def form(self, group: Group) -> None:
        self._open_rows[group.members[0].pipeline] = self._merged
        self._merged = self._empty_row()
        self._candidate.clear()

    def done(self, group: Group, ok: bool) -> None:
        row = self._open_rows.pop(group.members[0].pipeline)
        for worker in group.members:
            if ok:
                self._seen[worker.pipeline] = row
            else:
                self._clock[worker.pipeline] -= 1  # it is offered again with the same update

    def _empty_row(self) -> NDArray[np.int64]:
        return np.zeros(len(self._clock), np.int64)  # several times faster than zeros_like

    def _add(self, pipeline: int) -> None:
        np.maximum(self._merged, self._seen[pipeline], out=self._merged)
        self._merged[pipeline] = self._clock[pipeline]

    def _grow(self, size: int) -> None:
        """Grow the arrays for pipelines below `size` to twice that, so that it is rarely needed."""
        if size <= len(self._clock):
            return
        none = np.zeros(2 * size - len(self._clock), np.int64)
        self._clock = np.append(self._clock, none + _ABSENT_CLOCK)
        self._merged = np.append(self._merged, none)
        self._seen = [np.append(row, none) for row in self._seen]
        self._seen += [self._empty_row() for _ in none]
        self._open_rows = {first: np.append(row, none) for first, row in self._open_rows.items()}


def mixing_matrix(members: Sequence[int], num_workers: int) -> NDArray[np.float64]:
    """W of one group (equation 2): its members average, the others keep their values."""
    mixing = np.eye(num_workers)
    mixing[np.ix_(members, members)] = 1 / len(members)
    return mixing


def contraction(groups: Iterable[Sequence[int]], num_workers: int) -> float:
    """Largest fraction of a disagreement that is left after the groups: ||product of W - J||_2."""
    product = np.eye(num_workers)
    for members in groups:
        product[list(members)] = product[list(members)].mean(axis=0)
    return float(np.linalg.norm(product - 1 / num_workers, ord=2))


def spectral_gap(groups: Sequence[Sequence[int]], num_workers: int) -> float:
    """1 - lambda_2 of the mean of W: the rate of agreement for such groups in random order."""
    mean = np.mean([mixing_matrix(members, num_workers) for members in groups], axis=0)
    return float(1 - np.linalg.norm(mean - 1 / num_workers, ord=2))

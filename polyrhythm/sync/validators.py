"""How well groups mix: whether the last ones connect all workers, and how old a group's news is.

Two validators judge the candidate for the next group of one stage. `UnionConnectivity` asks that
the last P-1 groups and the candidate, each a clique, join all workers into one component.
`CausalAge` asks for what matters in the end: that no update of anybody, up to the last `max_age`,
is missing in the candidate's average. `contraction` and `spectral_gap` measure groups afterwards.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023: equation 2 in section 3.2 (the mixing matrix),
section 3.3 (sync-graph, Assumption 1), section 3.4 (group validation). Departures: a window asks
for the workers that were there all through it, and knows no path through one that has left; a
group that failed connects nobody. Causal age is new: the union of a window ignores the order of its
groups, so {3,4}, {2,3}, {1,2} over and over is connected though news from 1 needs seven groups to
reach 4; and a worker that is always slow holds up every window, though nobody misses anything new.
An average of all workers (`average_all_timeout.py`) begins both measures anew; so does one that has failed,
since validators hear only that all have left and are back: for once, old news may go unnoticed.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import PolicyError
from polyrhythm.types import Group, Worker

_GONE = -(2**62)  # the clock of a worker that is not here: no news of it is ever too old


class Validator(Protocol):
    """Judges the candidate: those offered since the last `form`. All are workers of one stage."""

    def join(self, worker: Worker) -> None: ...

    def leave(self, worker: Worker) -> None:
        """A worker is gone, out of the candidate too; its group is done."""

    def offer(self, worker: Worker) -> None:
        """A worker that has made one more update comes to the candidate."""

    def missing_workers(self) -> tuple[Worker, ...]:
        """Whose updates the candidate does not reach; nobody's if it is valid. Sorted."""

    def is_valid(self) -> bool: ...

    def form(self, group: Group) -> None:
        """The candidate becomes this group, valid or not."""

    def done(self, group: Group, ok: bool) -> None:
        """A group has averaged; or it has given up, and its members will be offered again."""


class UnionConnectivity:
    """The candidate and the last P-1 groups connect the workers; sets of workers are bit masks."""

    def __init__(self, last_groups: int) -> None:
        if last_groups < 1:
            raise PolicyError(
                f"last_groups={last_groups}",
                expected="P >= 1: how many groups in a row have to connect all workers",
                fix="use 10, as the paper does, or 1 to average with everybody each time",
            )
        self.last_groups = last_groups  # P
        self._stage = 0
        self._history: deque[int] = deque(maxlen=last_groups - 1)
        self._num_groups = 0
        self._candidate = 0
        self._joined: dict[Worker, int] = {}  # how many groups there had been
        self._required = 0  # those here since the first group of the window
        self._young: deque[Worker] = deque()  # here, but not as long

    def join(self, worker: Worker) -> None:
        self._stage = worker.stage
        self._joined[worker] = self._num_groups
        self._young.append(worker)
        self._grow_up()

    def leave(self, worker: Worker) -> None:
        others = ~(1 << worker.pipeline)
        del self._joined[worker]
        if worker in self._young:
            self._young.remove(worker)
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
        self._grow_up()

    def done(self, group: Group, ok: bool) -> None:
        if ok:
            return
        mask = 0
        for worker in group.members:
            mask |= 1 << worker.pipeline
        for place in reversed(range(len(self._history))):
            if self._history[place] == mask:
                self._history[place] = 0
                return

    def _missing(self) -> int:
        """Whom the candidate is not connected with: all that are not of its component."""
        # Before P groups there is no whole window, and Assumption 1 speaks of whole ones only.
        if len(self._history) < self.last_groups - 1:
            return 0
        missing, groups = self._required & ~self._candidate, list(self._history)
        reached, grows = self._candidate, True
        while missing and grows:
            apart = []
            for group in groups:
                if group & reached:
                    reached |= group
                else:
                    apart.append(group)
            grows, groups = len(apart) < len(groups), apart
            missing = self._required & ~reached
        return missing

    def _grow_up(self) -> None:
        since = self._num_groups - (self.last_groups - 1)
        while self._young and self._joined[self._young[0]] <= max(since, 0):
            self._required |= 1 << self._young.popleft().pipeline


class CausalAge:
    """No update of any worker, up to the last `max_age`, is missing in all of the candidate.

    `seen[v][u]` is how many updates of u the model of v contains; averaging makes that the largest
    of the members' for all of them, so the members of a group share one row from then on. Nothing
    is known of the model of a worker that joins: it counts as having seen nothing of the others.
    When the last one has left, all counts begin again: those who come then are taken to have a
    common past, as after an average of all workers, or none.
    """

    def __init__(self, max_age: int) -> None:
        if max_age < 0:
            raise PolicyError(
                f"max_age={max_age}",
                expected="A >= 0: how many updates of a worker a group may miss",
                fix="use 10, or 0 for groups that miss nothing",
            )
        self.max_age = max_age  # A
        self._stage = 0
        self._forget()

    def _forget(self) -> None:
        self._num_present = 0
        self._clock = np.zeros(0, np.int64)  # updates of each worker, by its pipeline
        self._seen: list[NDArray[np.int64]] = []  # rows; never changed in place once shared
        self._candidate: dict[int, None] = {}
        self._merged = np.zeros(0, np.int64)  # the row of the candidate
        self._open: dict[int, NDArray[np.int64]] = {}  # rows of groups under way, by first member

    def join(self, worker: Worker) -> None:
        self._num_present += 1
        self._stage, pipeline = worker
        self._grow(pipeline + 1)
        # If it was here before, what it has averaged counts on; what it had not is lost.
        num_updates = self._seen[pipeline][pipeline]
        self._seen[pipeline] = self._empty_row()
        self._seen[pipeline][pipeline] = self._clock[pipeline] = num_updates

    def leave(self, worker: Worker) -> None:
        self._num_present -= 1
        if not self._num_present:
            self._forget()
            return
        self._clock[worker.pipeline] = _GONE
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
        self._open[group.members[0].pipeline] = self._merged
        self._merged = self._empty_row()
        self._candidate.clear()

    def done(self, group: Group, ok: bool) -> None:
        row = self._open.pop(group.members[0].pipeline)
        for worker in group.members:
            if ok:
                self._seen[worker.pipeline] = row
            else:
                self._clock[worker.pipeline] -= 1  # it comes again with the same update

    def _empty_row(self) -> NDArray[np.int64]:
        return np.zeros(len(self._clock), np.int64)  # several times faster than zeros_like

    def _add(self, pipeline: int) -> None:
        np.maximum(self._merged, self._seen[pipeline], out=self._merged)
        self._merged[pipeline] = self._clock[pipeline]

    def _grow(self, size: int) -> None:
        """Make room for pipelines below `size`, and twice as much, so that it is seldom needed."""
        if size <= len(self._clock):
            return
        none = np.zeros(2 * size - len(self._clock), np.int64)
        self._clock = np.append(self._clock, none + _GONE)
        self._merged = np.append(self._merged, none)
        self._seen = [np.append(row, none) for row in self._seen]
        self._seen += [self._empty_row() for _ in none]
        self._open = {first: np.append(row, none) for first, row in self._open.items()}


def mixing_matrix(members: Sequence[int], num_workers: int) -> NDArray[np.float64]:
    """W of one group (equation 2): its members average, the others keep what they have."""
    mixing = np.eye(num_workers)
    mixing[np.ix_(members, members)] = 1 / len(members)
    return mixing


def contraction(groups: Iterable[Sequence[int]], num_workers: int) -> float:
    """How much of a disagreement is left after the groups, at worst: ||product of W - J||_2."""
    product = np.eye(num_workers)
    for members in groups:
        product[list(members)] = product[list(members)].mean(axis=0)
    return float(np.linalg.norm(product - 1 / num_workers, ord=2))


def spectral_gap(groups: Sequence[Sequence[int]], num_workers: int) -> float:
    """1 - lambda_2 of the mean of W: the rate of agreement if such groups come in random order."""
    mean = np.mean([mixing_matrix(members, num_workers) for members in groups], axis=0)
    return float(1 - np.linalg.norm(mean - 1 / num_workers, ord=2))

"""Groups by causal age: workers ready within a window, such that no group misses old updates.

As `adaptive`, but it bounds how old the information in a model is, not whether the last groups
connect. A member that has recently averaged with the straggler's updates is as good as the
straggler itself; so a permanent straggler blocks no group if its few updates spread. A group is
valid if, of every worker, all updates but the last `max_age` are in the model of at least one
member.

Source: none; the window and the enforcement are SDPipe's (`windowed.py`). An update is the
contribution of a worker to a group, so with a group every n steps an age of 10 is 10 n steps. The
bound holds for groups when they are formed: the model of a worker that computes grows older, by the
updates of the others, until its next group.
"""

import math

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.windowed import EnforcementToken, WindowedGroups, WindowRule
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds, Worker

_ABSENT_CLOCK = -(2**62)  # the clock of an absent worker: none of its updates is ever missing


def default_max_age(num_workers: int) -> int:
    """Default of A: 10 for up to 16 workers, in proportion to log2(N) beyond.

    An update spreads like a rumour: while few workers have it, their number grows by a factor per
    round, and the last few get it in about as many rounds again. If each of N workers passes it on
    to one other per round, that takes log2(N) + ln(N) rounds (Pittel, "On Spreading a Rumor", SIAM
    J. Appl. Math. 47(1), 1987), where a round is one update of each worker: 6.8 for 16 workers,
    11.8 for 125. One and a half times that allows for rounds that are not in step: 10 and 18. In a
    simulation of equal workers, 2 % of the groups or fewer are then enforced; half that bound
    enforces several times as many.
    """
    return max(10, math.ceil(2.5 * math.log2(max(num_workers, 1))))


class Age(WindowedGroups):
    """The policy of one stage; the stages of a job share one token."""

    def __init__(
        self,
        num_workers: int,
        *,
        max_age: int | None = None,  # A; None for `default_max_age`
        window: WindowRule = "rate",  # T, or the rule for it
        group_size: int | None = None,  # target of "rate"; None for 3, or all of fewer workers
        max_window: Seconds = 30.0,
        startup_timeout: Seconds = 60.0,  # longest wait at the start for absent workers
        stage: int = 0,
        token: EnforcementToken | None = None,
    ) -> None:
        super().__init__(
            CausalAge(default_max_age(num_workers) if max_age is None else max_age),
            num_workers=num_workers,
            window=window,
            group_size=group_size,
            max_window=max_window,
            startup_timeout=startup_timeout,
            stage=stage,
            token=token,
        )


class CausalAge:
    """Requires that of every worker, all updates but the last `max_age` are in the candidate.

    Connectivity ignores the order of groups, so {3,4}, {2,3}, {1,2} repeated is connected though an
    update of 1 needs seven groups to reach 4; and a permanent straggler delays every window, though
    no group misses a recent update. So this bounds the staleness itself.

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


register_state(Age, CausalAge)

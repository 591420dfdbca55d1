"""The roster of a stage: which workers are present, which are ready, and whether all are.

A job starts with workers that join one after another. "All" means the announced number until that
many are present at once; from then on it means the present workers, so that a worker that left or
died is not waited for, and a late one counts from its join. A worker that never joins is waited
for until `startup_timeout` seconds after the first join.

Source: none; the workers of SDPipe and Prague are present from start to end.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policy import Policy
from polyrhythm.types import Group, Seconds, Worker

MAX_NAMED = 4  # a reason names at most this many missing workers


def format_workers(workers: Sequence[Worker]) -> str:
    return format_items([str(worker) for worker in workers])


def format_items(texts: Sequence[str]) -> str:
    """List the first `MAX_NAMED` texts and the number of the others."""
    named = " ".join(texts[:MAX_NAMED])
    return named + (f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else "")


@dataclass(slots=True)
class Roster:
    num_workers: int  # announced
    startup_timeout: Seconds = 60.0  # longest wait of the first worker for the last
    present: dict[Worker, None] = field(default_factory=dict, init=False)
    ready: dict[Worker, Seconds] = field(default_factory=dict, init=False)  # times, ascending
    assembly_deadline: Seconds = field(default=math.inf, init=False)  # -inf once assembled

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise PolicyError(
                f"num_workers={self.num_workers}",
                expected="at least one worker per stage",
                fix="pass the number of pipelines",
            )
        if not self.startup_timeout >= 0:
            raise PolicyError(
                f"startup_timeout={self.startup_timeout:g}",
                expected="0 seconds or more",
                fix="use 0 to start with the workers that are present",
            )

    def join(self, worker: Worker, now: Seconds) -> None:
        if worker in self.present:
            raise PolicyError(
                f"worker {worker} has joined already",
                expected="one join per worker, until it leaves",
                fix="report that it left before it joins again",
            )
        if not self.present and self.assembly_deadline == math.inf:
            self.assembly_deadline = now + self.startup_timeout
        self.present[worker] = None
        if len(self.present) >= self.num_workers:
            self.assembly_deadline = -math.inf

    def add_ready(self, worker: Worker, now: Seconds) -> None:
        if worker not in self.present:
            raise self._not_joined_error(worker)
        if worker in self.ready:
            raise PolicyError(
                f"worker {worker} is already ready, since t={self.ready[worker]:g}s",
                expected="one ready report per worker and step",
                fix="wait for the group of the first report before reporting again",
            )
        self.ready[worker] = now

    def leave(self, worker: Worker) -> None:
        if worker not in self.present:
            raise self._not_joined_error(worker)
        del self.present[worker]
        self.ready.pop(worker, None)

    def is_assembling(self, now: Seconds) -> bool:
        if now >= self.assembly_deadline:
            self.assembly_deadline = -math.inf
        return self.assembly_deadline > -math.inf

    def all_ready(self, now: Seconds) -> bool:
        """Whether all workers are ready, and at least one is."""
        num_ready = len(self.ready)
        if not num_ready or num_ready < len(self.present):
            return False
        return num_ready >= self.num_workers or not self.is_assembling(now)

    def next_timer(self) -> Seconds:
        """Time at which the ready workers become all workers if nothing happens; inf for never."""
        waits = self.assembly_deadline > -math.inf and 0 < len(self.ready) == len(self.present)
        return self.assembly_deadline if waits else math.inf

    def next_assembly_deadline(self) -> Seconds:
        """Time from which ready workers no longer wait for missing ones; inf for never."""
        waits = self.ready and self.assembly_deadline > -math.inf
        return self.assembly_deadline if waits else math.inf

    def pop_ready(self) -> tuple[Worker, ...]:
        """Remove and return all ready workers, sorted: every member then has the same tuple."""
        members = tuple(sorted(self.ready))
        self.ready.clear()
        return members

    def waiting_since(self) -> Seconds:
        """Time at which the first ready worker became ready; inf if none is."""
        return next(iter(self.ready.values()), math.inf)

    def _not_joined_error(self, worker: Worker) -> PolicyError:
        return PolicyError(
            f"worker {worker} has not joined",
            expected="on_join before any other call for a worker",
            fix="call on_join for it first",
        )


class RosterPolicy(Policy, ABC):
    """A policy that keeps a roster, and releases the groups that are due."""

    _roster: Roster

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self._roster.join(worker, now)
        return []

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        self._roster.add_ready(worker, now)
        return self._release(now)

    def on_timer(self, now: Seconds) -> list[Group]:
        return self._release(now)

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        self._roster.leave(worker)
        return self._release(now)

    @abstractmethod
    def _release(self, now: Seconds) -> list[Group]:
        """Return the groups that are due."""

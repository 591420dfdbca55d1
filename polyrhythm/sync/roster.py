"""The roster of a stage: who takes part, who is ready, and whether that is everybody.

A job starts with workers that arrive one after another. "Everybody" is the number announced, until
that many have been present at once; from then on it is whoever is present, so that one who leaves
or dies is not waited for, and one who comes later counts from its arrival. A worker that never
comes is waited for no longer than `startup` after the first one came.

Source: none of the papers says it. SDPipe's and Prague's workers are there from the beginning to
the end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.types import Seconds, Worker

MAX_NAMED = 4  # how many of the workers that are missing a reason names


def format_workers(workers: Sequence[Worker]) -> str:
    return format_items([str(worker) for worker in workers])


def format_items(texts: Sequence[str]) -> str:
    """The first few, and how many more."""
    named = " ".join(texts[:MAX_NAMED])
    return named + (f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else "")


@dataclass(slots=True)
class Roster:
    num_workers: int  # announced
    startup: Seconds = 60.0  # how long the first one waits for the last
    present: dict[Worker, None] = field(default_factory=dict, init=False)
    ready: dict[Worker, Seconds] = field(default_factory=dict, init=False)  # since when; in order
    assembly_deadline: Seconds = field(default=math.inf, init=False)  # -inf once assembled

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise PolicyError(
                f"num_workers={self.num_workers}",
                expected="at least one worker per stage",
                fix="give the number of pipelines",
            )
        if not self.startup >= 0:
            raise PolicyError(
                f"startup={self.startup:g}",
                expected="0 seconds or more",
                fix="use 0 to begin with whoever is there",
            )

    def join(self, worker: Worker, now: Seconds) -> None:
        if worker in self.present:
            raise PolicyError(
                f"worker {worker} has joined already",
                expected="one join per worker, until it leaves",
                fix="report that it left before it joins again",
            )
        if not self.present and self.assembly_deadline == math.inf:
            self.assembly_deadline = now + self.startup
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
        """Whether everybody is ready, and somebody is."""
        num_ready = len(self.ready)
        if not num_ready or num_ready < len(self.present):
            return False
        return num_ready >= self.num_workers or not self.is_assembling(now)

    def next_timer(self) -> Seconds:
        """When those who are ready can become everybody by waiting; inf for never."""
        waits = self.assembly_deadline > -math.inf and 0 < len(self.ready) == len(self.present)
        return self.assembly_deadline if waits else math.inf

    def next_assembly_deadline(self) -> Seconds:
        """When those who are ready need not wait any more for who is yet to come; inf for never."""
        waits = self.ready and self.assembly_deadline > -math.inf
        return self.assembly_deadline if waits else math.inf

    def pop_ready(self) -> tuple[Worker, ...]:
        """All that are ready, sorted, so that every member names the group alike."""
        members = tuple(sorted(self.ready))
        self.ready.clear()
        return members

    def waiting_since(self) -> Seconds:
        """When the first one became ready; inf if nobody is."""
        return next(iter(self.ready.values()), math.inf)

    def _not_joined_error(self, worker: Worker) -> PolicyError:
        return PolicyError(
            f"worker {worker} is not here",
            expected="that a worker joins before anything else",
            fix="report that it joined first",
        )

"""Gathering: all workers of a stage average together, once, before they go on training.

For evaluation, for saving and for the end of training: there each worker stops and waits for all
the others. A worker that gathers has left the policy of its stage, so that nobody waits for it
there, and is ready for this one instead, until the average of all is done or was given up. Those
who are dead, gone or not there yet are not waited for; one that comes meanwhile is. If somebody has
not gathered when the first one has waited for `timeout`, all who have go on without an average:
one that came back from a loss may have passed the place where the others stop, and whoever waits
for it may hold it up, through the pipeline between them.

Source: none; SDPipe and Prague end without a word on whose model is the result.
"""

from dataclasses import dataclass, field

from polyrhythm.sync.policy import Policy
from polyrhythm.sync.roster import Roster, format_workers
from polyrhythm.types import Group, Seconds, Worker


@dataclass(slots=True)
class AverageAllPolicy(Policy):
    """Of one stage. Whoever takes part has joined it; those who gather are ready for it."""

    timeout: Seconds
    # One announced: nobody is expected but those who are here.
    _roster: Roster = field(default_factory=lambda: Roster(1, startup=0.0), init=False)

    @property
    def has_others(self) -> bool:
        """Whether there is anybody to average with."""
        return len(self._roster.present) > 1

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self._roster.join(worker, now)
        return []

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        self._roster.add_ready(worker, now)
        return self._release(now)

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        self._roster.leave(worker)
        return self._release(now)

    def on_timer(self, now: Seconds) -> list[Group]:
        if now < self.next_timer():
            return []
        late = [
            worker for worker in sorted(self._roster.present) if worker not in self._roster.ready
        ]
        why = f"{format_workers(late)} did not call consolidate() within {self.timeout:g} s"
        return [Group((worker,), why) for worker in self._roster.pop_ready()]

    def next_timer(self) -> Seconds:
        return self._roster.waiting_since() + self.timeout

    def _release(self, now: Seconds) -> list[Group]:
        if not self._roster.all_ready(now):
            return []
        return [Group(self._roster.pop_ready(), why="average_all")]

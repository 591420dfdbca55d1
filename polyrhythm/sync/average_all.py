"""The global average: all workers of a stage average once, before they continue training.

It is used for evaluation, for checkpoints and for the end of training: each worker stops and waits
for all others. During the global average a worker has left the policy of its stage, so that no
group waits for it there, and is ready for this policy instead, until the average commits or fails.
Workers that are dead, have left or have not joined are not waited for; one that joins meanwhile is.
If a worker has not called average_all() when the first one has waited for `timeout`, all callers
continue without an average: a worker that recovered from a loss may have passed the step at which
the others stop, and a worker that waits for that worker may block it through their pipeline.

Source: none; SDPipe and Prague do not say whose model is the result.
"""

from dataclasses import dataclass, field

from polyrhythm.sync.roster import Roster, RosterPolicy, format_workers
from polyrhythm.types import Group, Seconds


@dataclass(slots=True)
class AverageAllPolicy(RosterPolicy):
    """The global average of one stage: workers that call average_all() are ready for it."""

    timeout: Seconds
    # One worker announced: it never waits for workers that have not joined.
    _roster: Roster = field(default_factory=lambda: Roster(1, startup_timeout=0.0), init=False)

    @property
    def has_others(self) -> bool:
        """Whether more than one worker is present."""
        return len(self._roster.present) > 1

    def on_timer(self, now: Seconds) -> list[Group]:
        if now < self.next_timer():
            return []
        late = [
            worker for worker in sorted(self._roster.present) if worker not in self._roster.ready
        ]
        why = f"{format_workers(late)} did not call average_all() within {self.timeout:g} s"
        return [Group((worker,), why) for worker in self._roster.pop_ready()]

    def next_timer(self) -> Seconds:
        return self._roster.waiting_since() + self.timeout

    def _release(self, now: Seconds) -> list[Group]:
        if not self._roster.all_ready(now):
            return []
        return [Group(self._roster.pop_ready(), why="average_all")]

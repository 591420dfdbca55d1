"""All-reduce: all workers average together when all are ready; and the global average.

All-reduce is the synchronous baseline: exact, and as slow as the slowest worker. A worker that left
is not waited for, one that joins takes part in the next group, and one that never joins is waited
for at the start only, for `startup_timeout` at most.

Source: the case of one group of all N workers in Miao et al., "SDPipe: A Semi-Decentralized
Framework for Heterogeneity-aware Pipeline-parallel Training", PVLDB 16(9), 2023, section 3.2.
"""

from dataclasses import dataclass, field

from polyrhythm.sync.policy import Roster, RosterPolicy, format_workers
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds


@dataclass(slots=True)
class AllReduce(RosterPolicy):
    num_workers: int
    startup_timeout: Seconds = 60.0
    _roster: Roster = field(init=False)

    def __post_init__(self) -> None:
        self._roster = Roster(self.num_workers, self.startup_timeout)

    def next_timer(self) -> Seconds:
        return self._roster.next_timer()

    def _release(self, now: Seconds) -> list[Group]:
        if not self._roster.all_ready(now):
            return []
        missing = self.num_workers - len(self._roster.present)
        absent = f"; {missing} of {self.num_workers} workers are absent" if missing > 0 else ""
        return [Group(self._roster.pop_ready(), why=f"all are ready{absent}")]


@dataclass(slots=True)
class AverageAllPolicy(RosterPolicy):
    """The global average of one stage: all workers average once, before they continue training.

    It is used for evaluation, for checkpoints and for the end of training. A worker that calls
    average_all() has left the policy of its stage, so that no group waits for it there, and is
    ready for this policy instead, until the average commits or fails. Workers that are dead, have
    left or have not joined are not waited for; one that joins meanwhile is. If a worker has not
    called average_all() when the first one has waited for `timeout`, all callers continue without
    an average: a worker that recovered from a loss may have passed the step at which the others
    stop, and a worker that waits for that worker may block it through their pipeline.

    Source: none; SDPipe and Prague do not say whose model is the result.
    """

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
        late = sorted(self._roster.present.keys() - self._roster.ready.keys())
        why = f"{format_workers(late)} did not call average_all() within {self.timeout:g} s"
        return [Group((worker,), why) for worker in self._roster.pop_ready()]

    def next_timer(self) -> Seconds:
        return self._roster.waiting_since() + self.timeout

    def _release(self, now: Seconds) -> list[Group]:
        if not self._roster.all_ready(now):
            return []
        return [Group(self._roster.pop_ready(), why="average_all")]


register_state(AllReduce, AverageAllPolicy)

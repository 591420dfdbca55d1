"""All-reduce: all workers average together when all are ready.

The synchronous baseline: exact, and as slow as the slowest worker. A worker that left is not waited
for, one that joins takes part in the next group, and one that never joins is waited for at the
start only, for `startup_timeout` at most.

Source: the case of one group of all N workers in Miao et al., "SDPipe: A Semi-Decentralized
Framework for Heterogeneity-aware Pipeline-parallel Training", PVLDB 16(9), 2023, section 3.2.
"""

from dataclasses import dataclass, field

from polyrhythm.sync.roster import Roster, RosterPolicy
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

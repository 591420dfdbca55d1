"""Partial reduce: the workers that are ready average; none waits for the slowest.

A worker that finishes a step joins a queue. The queue becomes one group when it holds `group_size`
workers, when its oldest member has waited `timeout`, or when it holds all workers.

Source: Miao et al., "Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce",
SIGMOD 2021 (doi 10.1145/3448016.3452773), as its authors sum it up in "SDPipe", PVLDB 16(9), 2023,
section 3.2: a larger but fixed group size.
Departures: `timeout` bounds the wait; members are sorted, so all ranks agree on a name; when fewer
than `group_size` workers are present, all of them form a group. Averages are uniform: that paper's
staleness-aware weights and its guard against disconnected groups are not implemented; `adaptive`
and `age` have such a guard.
"""

import math
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.windowed import target_size
from polyrhythm.sync.policy import Roster, RosterPolicy
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds


@dataclass(slots=True)
class PartialReduce(RosterPolicy):
    num_workers: int
    group_size: int | None = None  # None for 3, as in Prague's random groups, or all of fewer
    timeout: Seconds = math.inf
    startup_timeout: Seconds = 60.0  # longest wait at the start for workers that have not joined
    _size: int = field(init=False)
    _roster: Roster = field(init=False)

    def __post_init__(self) -> None:
        self._roster = Roster(self.num_workers, self.startup_timeout)
        self._size = target_size(self.group_size, self.num_workers)
        if not self.timeout >= 0:
            raise PolicyError(
                f"timeout={self.timeout:g}",
                expected="0 seconds or more",
                fix="use inf to wait until the group is full",
            )

    def next_timer(self) -> Seconds:
        return min(self._roster.waiting_since() + self.timeout, self._roster.next_timer())

    def _release(self, now: Seconds) -> list[Group]:
        roster = self._roster
        if len(roster.ready) >= self._size:
            why = "full"
        elif roster.all_ready(now):
            why = f"all {len(roster.ready)} present workers"
        elif now >= roster.waiting_since() + self.timeout:
            why = "timeout"
        else:
            return []
        return [Group(roster.pop_ready(), why)]


register_state(PartialReduce)

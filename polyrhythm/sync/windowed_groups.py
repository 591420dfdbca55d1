"""Groups of the workers that are ready within a window, enforced to be valid by waiting.

The state machine behind `adaptive` and `age`. The first ready worker opens a window. When it
closes, all ready workers are the candidate for a group. A valid candidate becomes the group. An
invalid one waits for the workers it lacks, if its stage gets the enforcement token, until it is
valid or the lease of the token ends. If the stage may not enforce, the candidate becomes a group as
it is, and that waiver is counted: another stage has the token, the lease has ended, or workers have
yet to join. No worker waits longer than the longest window and a lease; a candidate of all workers
is valid and does not wait. A worker that leaves is no longer waited for, whether it was ready,
required or neither; one that joins late is in the next group it is ready for.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023: Algorithm 2, section 3.2 (groups by window) and
section 3.4 (validation, waiting, ignoring it while another stage enforces). Departures: the window
closes early when all workers are ready; after an invalid candidate the paper opens another window
(line 3 of Algorithm 2), here the group is formed with the arrival that makes it valid.
"""

import math
from collections import Counter

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.roster import Roster, format_workers
from polyrhythm.sync.token import EnforcementToken
from polyrhythm.sync.validators import Validator
from polyrhythm.sync.window import CollectionWindow, FixedWindow, PaperWindow, RateWindow
from polyrhythm.types import Group, Seconds, Worker

WindowRule = str | Seconds  # "rate", "paper" or a fixed length
TARGET_GROUP_SIZE = 3  # members; larger groups make fast workers wait for each other


class WindowedGroups(Policy):
    def __init__(
        self,
        validator: Validator,
        *,
        num_workers: int,
        stage: int,
        token: EnforcementToken | None,
        window: WindowRule,
        group_size: int | None,
        max_window: Seconds,
        startup_timeout: Seconds,
    ) -> None:
        self.roster = Roster(num_workers, startup_timeout)
        self.window = _make_window(window, target_size(group_size, num_workers), max_window)
        self.validator = validator
        self.stage, self.token = stage, token or EnforcementToken()
        self.counters: Counter[str] = Counter()  # groups by why they were formed
        self._max_window = max_window
        self._opened = self._closes = math.inf
        self._enforces_since = math.inf  # inf while it does not enforce
        self._enforces_until = math.inf  # end of its own lease: the token's may be another stage's
        self._awaited = ""
        self._failed: dict[Worker, Seconds] = {}  # when their groups failed

    def on_join(self, worker: Worker, node: str, now: Seconds) -> list[Group]:
        self.roster.join(worker, now)
        self.validator.join(worker)
        return []

    def on_ready(self, worker: Worker, now: Seconds) -> list[Group]:
        roster = self.roster
        roster.add_ready(worker, now)
        if self._failed.pop(worker, None) != now:  # else it retries, and has arrived before
            self.window.record_arrival(worker, now, len(roster.present))
        self.validator.offer(worker)
        if self._closes == math.inf and len(roster.ready) == 1:
            self._opened = now
            self._closes = now + self.window.open(len(roster.present))
        else:
            longest = self._opened + self._max_window
            self._closes = max(self._closes, min(now + self.window.hold_open(), longest))
        return self._decide(now)

    def on_done(self, group: Group, ok: bool, now: Seconds) -> list[Group]:
        self.validator.done(group, ok)
        if not ok:
            self._failed.update(dict.fromkeys(group.members, now))
        return []

    def on_timer(self, now: Seconds) -> list[Group]:
        return self._decide(now)

    def on_leave(self, worker: Worker, now: Seconds) -> list[Group]:
        self.roster.leave(worker)
        self.window.record_leave(worker)
        self.validator.leave(worker)
        self._failed.pop(worker, None)
        if not self.roster.ready:
            self._close()
        return self._decide(now)

    def next_timer(self) -> Seconds:
        if not self.roster.ready:
            return math.inf
        closes = self._enforces_until if self._enforces_since < math.inf else self._closes
        return min(closes, self.roster.next_timer())

    def _decide(self, now: Seconds) -> list[Group]:
        roster = self.roster
        if not roster.ready:
            return []
        if roster.all_ready(now):
            return self._form("all_ready", "all are ready", now)
        if self._enforces_since < math.inf:
            return self._enforce(now)
        if now < self._closes and not self.window.is_full(len(roster.ready)):
            return []
        if self.validator.is_valid():
            return self._form("window", f"window of {now - self._opened:.3g} s", now)
        if roster.is_assembling(now):
            missing = roster.num_workers - len(roster.present)
            return self._form("waived_start", f"waived: {missing} have yet to join", now)
        missing_workers = format_workers(self.validator.missing_workers())
        if self.token.acquire(self.stage, now):
            self._enforces_since, self._awaited = now, missing_workers
            self._enforces_until = self.token.expires
            return []
        why_not = self.token.why_not(self.stage, now)
        return self._form("waived_token", f"waived: lacks {missing_workers}, but {why_not}", now)

    def _enforce(self, now: Seconds) -> list[Group]:
        waited = now - self._enforces_since
        if self.validator.is_valid():
            return self._form("enforced", f"waited {waited:.3g} s for {self._awaited}", now)
        if now >= self._enforces_until:
            missing = format_workers(self.validator.missing_workers())
            return self._form("waived_lease", f"waived: lacks {missing} after {waited:.3g} s", now)
        return []

    def _form(self, how: str, why: str, now: Seconds) -> list[Group]:
        self.counters[how] += 1
        group = Group(self.roster.pop_ready(), why)
        self.window.record_group(len(group.members), len(self.roster.present))
        self.validator.form(group)
        self._close()
        if not how.startswith("waived"):
            self.token.cancel_request(self.stage)
        return [group]

    def _close(self) -> None:
        if self._enforces_since < math.inf:
            self.token.release(self.stage)
        self._opened = self._closes = self._enforces_since = math.inf


def target_size(group_size: int | None, num_workers: int) -> int:
    """Target number of members per group; None means 3, or all workers if there are fewer."""
    if group_size is None:
        return min(TARGET_GROUP_SIZE, num_workers)
    fewest = min(2, num_workers)
    if not fewest <= group_size <= num_workers:
        raise PolicyError(
            f"group_size={group_size} in a job with {num_workers} workers per stage",
            expected=f"{fewest} to {num_workers}: a group of one does not average",
            fix="omit it for 3; use policy all_reduce for groups of all workers",
        )
    return group_size


def _make_window(rule: WindowRule, target: int, longest: Seconds) -> CollectionWindow:
    if not longest > 0:
        raise PolicyError(
            f"max_window={longest:g}",
            expected="more than 0 seconds",
            fix="use at least the time of one step; window=0 never waits",
        )
    if rule == "rate":
        return RateWindow(target, longest)
    if rule == "paper":
        return PaperWindow(longest)
    if isinstance(rule, str):
        raise PolicyError(
            f"window={rule!r}",
            expected="'rate', 'paper' or a number of seconds",
            fix="use 'rate' to have it measured",
        )
    return FixedWindow(rule)

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
(line 3 of Algorithm 2), here the group is formed with the arrival that makes it valid. The rules
for the length of a window, and the lease of the token, are described with their classes.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policy import Policy, Roster, format_workers
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds, Worker

WindowRule = str | Seconds  # "rate", "paper" or a fixed length
TARGET_GROUP_SIZE = 3  # members; larger groups make fast workers wait for each other
TOO_FEW = 2  # a group of fewer is a single worker
LONGER, SHORTER = 2.0, 0.9  # the factors of the authors' published code
BURST = 0.5  # of the mean gap: arrivals closer than this are one burst
MEMORY = 2  # means cover about this many arrivals per worker
NO_STAGE = -1
LEASE: Seconds = 300.0  # must exceed the slowest worker's step, or waiting for it is useless


class Validator(Protocol):
    """Checks the candidate: the workers of one stage offered since the last `form`."""

    def join(self, worker: Worker) -> None: ...

    def leave(self, worker: Worker) -> None:
        """Remove a worker, also from the candidate; its groups are done."""

    def offer(self, worker: Worker) -> None:
        """Add a worker with one more update to the candidate."""

    def missing_workers(self) -> tuple[Worker, ...]:
        """Workers whose updates the candidate lacks, sorted; empty if it is valid."""

    def is_valid(self) -> bool: ...

    def form(self, group: Group) -> None:
        """Turn the candidate, valid or not, into this group."""

    def done(self, group: Group, ok: bool) -> None:
        """Record that a group averaged; or that it failed, and its members are offered again."""


@dataclass(slots=True)
class EnforcementToken:
    """The token that all stages share: only its holder waits for more workers than its window.

    If two stages waited for more workers at once, each could wait for a worker that the other one
    blocks, through the pipeline between them: a deadlock. So a stage waits only while it holds the
    token; meanwhile the others form their groups without enforcement. The worker that the holder
    waits for can be delayed only by other stages of its pipeline; those wait no longer than a
    window; so it becomes ready.

    Source: SDPipe, section 3.4 (deadlock prevention, Figure 3). Departures: in the paper a stage
    holds the token until its group is formed, so one lost worker ends all enforcement for good.
    Here the token is a lease: it expires; the stage releases it when the worker it waited for has
    left and no other is missing; and the last holder lets other stages go first if they have asked
    for it.
    """

    lease: Seconds = LEASE
    holder: int = field(default=NO_STAGE, init=False)  # a stage
    expires: Seconds = field(default=-math.inf, init=False)
    _last: int = field(default=NO_STAGE, init=False)  # the last stage that acquired it
    _refused: dict[int, Seconds] = field(default_factory=dict, init=False)  # time, by stage

    def __post_init__(self) -> None:
        if not self.lease > 0:
            raise PolicyError(
                f"lease={self.lease:g}",
                expected="more than 0 seconds",
                fix="use several times the slowest worker's step",
            )

    def acquire(self, stage: int, now: Seconds) -> bool:
        """Try to acquire the token for `stage`, which must not hold it, until `expires`."""
        assert self.holder != stage or now >= self.expires, f"stage {stage} already has the token"
        if self._is_held(now) or self._goes_after_others(stage, now):
            self._refused[stage] = now
            return False
        self.holder, self._last = stage, stage
        self.expires = now + self.lease
        self._refused.pop(stage, None)
        return True

    def release(self, stage: int) -> None:
        """Release the token; no effect if the lease of `stage` ended and another stage has it."""
        if self.holder == stage:
            self.holder, self.expires = NO_STAGE, -math.inf

    def cancel_request(self, stage: int) -> None:
        """Forget that `stage` asked for the token: its last candidate was valid."""
        self._refused.pop(stage, None)

    def why_not(self, stage: int, now: Seconds) -> str:
        """Reason why `stage` was refused at `now`."""
        if self._is_held(now):
            return f"stage {self.holder} has the token"
        first = min(other for other in self._refused if other != stage)
        return f"stage {first} has the token next"

    def _is_held(self, now: Seconds) -> bool:
        return self.holder != NO_STAGE and now < self.expires

    def _goes_after_others(self, stage: int, now: Seconds) -> bool:
        """Whether `stage` had the token last, and another one was refused within a lease.

        Without this a stage with a permanent straggler could acquire it every time.
        """
        if stage != self._last:
            return False
        self._refused = {other: t for other, t in self._refused.items() if now - t < self.lease}
        return any(other != stage for other in self._refused)


@dataclass(slots=True)
class RunningMean:
    """Exponentially weighted mean; the plain mean of the first `horizon` samples."""

    value: float = math.nan
    _count: int = 0

    def add(self, sample: float, horizon: int) -> None:
        self._count += 1
        if self._count == 1:
            self.value = sample
        else:
            self.value += (sample - self.value) / min(self._count, horizon)

    @property
    def is_known(self) -> bool:
        return self._count > 0


class CollectionWindow:
    """How long a stage collects ready workers, from the first one on, before they become a group.

    All workers that arrive before the window closes are in the group, so its length determines the
    size of groups (SDPipe, section 3.2). Before the first measurement, a measured window closes
    with the g-th arrival (the second, for the paper's).
    """

    __slots__ = ()

    def open(self, num_workers: int) -> Seconds:
        """Open a window and return its length."""
        raise NotImplementedError

    def record_arrival(self, worker: Worker, now: Seconds, num_workers: int) -> None:
        """Record that one of the `num_workers` present workers is ready."""

    def hold_open(self) -> Seconds:
        """Shortest time that the window stays open after an arrival."""
        return 0.0

    def is_full(self, size: int) -> bool:
        """Whether to close the window at once, with `size` ready workers."""
        return False

    def record_group(self, size: int, num_workers: int) -> None:
        """Record that a window closed with `size` ready workers."""

    def record_leave(self, worker: Worker) -> None:
        """Record that a worker is no longer present."""


@dataclass(slots=True)
class FixedWindow(CollectionWindow):
    """A fixed number of seconds: 0 is local SGD, infinity is all-reduce."""

    seconds: Seconds  # T

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise PolicyError(
                f"window={self.seconds:g}",
                expected="0 seconds or more, 'rate' or 'paper'",
                fix="use 'rate' to have it measured",
            )

    def open(self, num_workers: int) -> Seconds:
        return self.seconds


@dataclass(slots=True)
class RateWindow(CollectionWindow):
    """(g - 1) / rate, where rate is the measured number of arrivals per second.

    Groups have about g members, for any number and speed of workers. Workers that arrive in a
    burst, as equal ones do, stay in one group: the window is open while they arrive faster than
    twice the rate. New here, since the paper's rule yields groups of about two for any N.
    """

    target: int  # g
    longest: Seconds
    _gap: RunningMean = field(default_factory=RunningMean, init=False)  # 1 / rate
    _last: Seconds = field(default=math.nan, init=False)
    _is_measured: bool = field(default=False, init=False)

    def record_arrival(self, worker: Worker, now: Seconds, num_workers: int) -> None:
        if not math.isnan(self._last):
            self._gap.add(now - self._last, MEMORY * num_workers)
        self._last = now

    def open(self, num_workers: int) -> Seconds:
        self._is_measured = self._gap.is_known
        if not self._is_measured:
            return self.longest
        return min((min(self.target, num_workers) - 1) * self._gap.value, self.longest)

    def hold_open(self) -> Seconds:
        return BURST * self._gap.value if self._is_measured else 0.0

    def is_full(self, size: int) -> bool:
        return size >= self.target and not self._is_measured

    def record_leave(self, worker: Worker) -> None:
        self._last = math.nan  # if all workers leave for a while, the pause is no gap


@dataclass(slots=True)
class PaperWindow(CollectionWindow):
    """The measured iteration time / N, longer while groups are too small.

    Source: SDPipe, section 5.1 (T is 1/N of the iteration time), section 4 (enlarged when too few
    are ready). Section 4 does not say by how much: here a window with a single worker doubles the
    next one, up to one iteration, and any other shortens it by a tenth, down to 1/N.
    """

    longest: Seconds
    _iteration: RunningMean = field(default_factory=RunningMean, init=False)  # tau
    _last: dict[Worker, Seconds] = field(default_factory=dict, init=False)
    _enlarged: float = field(default=1.0, init=False)
    _is_measured: bool = field(default=False, init=False)

    def record_arrival(self, worker: Worker, now: Seconds, num_workers: int) -> None:
        last = self._last.get(worker)
        if last is not None:
            self._iteration.add(now - last, MEMORY * num_workers)
        self._last[worker] = now

    def open(self, num_workers: int) -> Seconds:
        self._is_measured = self._iteration.is_known
        if not self._is_measured:
            return self.longest
        return min(self._iteration.value * self._enlarged / num_workers, self.longest)

    def is_full(self, size: int) -> bool:
        return size >= TOO_FEW and not self._is_measured

    def record_group(self, size: int, num_workers: int) -> None:
        if size < TOO_FEW:
            self._enlarged = min(self._enlarged * LONGER, max(num_workers, 1))
        else:
            self._enlarged = max(self._enlarged * SHORTER, 1.0)

    def record_leave(self, worker: Worker) -> None:
        self._last.pop(worker, None)


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


register_state(EnforcementToken, RunningMean, FixedWindow, RateWindow, PaperWindow)

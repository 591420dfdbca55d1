"""The state of a scheduler: workers and pipelines, rounds of groups, their order and timeouts.

A step of a worker: it may request a group ahead, it becomes ready, and the end of a round, or a
Skip, ends the step. A round of a group: it waits in the queues of its members, opens once it is
first in all of them, and averages once the members that made a request are ready. A member without
a request when the round opens is passive: it answers while it computes. If it becomes ready before
the round is done, it waits for that round like any other member. `scheduler.py` changes this state.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import NamedTuple, Self

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policy import Policy
from polyrhythm.sync.protocol import Abort, Assign, Commit, Skip
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds, Worker

NUM_SAMPLES = 64  # past durations kept
REFRESH = 8  # compute the median anew after this many new durations
FIRST_APART: Seconds = 30.0  # time until a broken link is tried again; it doubles ...
MAX_APART: Seconds = 960.0  # ... up to this
REPORT_WINDOW: Seconds = 3.0  # in which both workers of a broken link report it


class MemberStatus(Enum):
    ABSENT = "has not joined yet"
    ACTIVE = "is alive"
    LEFT = "has left"
    DEAD = "is dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a scheduler's waits."""

    floor: Seconds = 1.0  # of a learned timeout
    ceiling: Seconds = 240.0  # of an average's timeout; below the lease of the enforcement token
    connect_timeout: Seconds = 20.0  # added for members that have not averaged together before
    ready_timeout: Seconds = 300.0  # longest wait of an assigned group for members that compute
    timeout_factor: float = 10.0  # an average, or a step, may take this many medians
    # A ready worker waits for a group for `group_timeout`, or for this many steps if that is
    # longer, but not longer than `ready_timeout`.
    group_timeout: Seconds = math.inf
    group_timeout_steps: float = 3.0
    average_all_timeout: Seconds = 540.0  # below the timeout of a worker's own waits
    max_retries: float = 2  # a worker skips the average after more failed groups in one step

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.ceiling:
            raise PolicyError(
                f"floor={self.floor:g} ceiling={self.ceiling:g}",
                expected="0 < floor <= ceiling, in seconds",
                fix="omit them: timeouts are learned between the defaults",
            )
        above_0 = (
            self.connect_timeout,
            self.ready_timeout,
            self.timeout_factor,
            self.group_timeout,
            self.group_timeout_steps,
            self.average_all_timeout,
        )
        if not (all(limit > 0 for limit in above_0) and self.max_retries >= 0):
            raise PolicyError(
                f"connect_timeout={self.connect_timeout:g} "
                f"ready_timeout={self.ready_timeout:g} timeout_factor={self.timeout_factor:g} "
                f"group_timeout={self.group_timeout:g} "
                f"group_timeout_steps={self.group_timeout_steps:g} "
                f"average_all_timeout={self.average_all_timeout:g} max_retries={self.max_retries}",
                expected="max_retries of 0 or more, all others above 0",
                fix="omit them for the defaults",
            )


@dataclass(slots=True)
class LearnedTimeout:
    """A timeout learned from the durations of past groups of one stage, or of its steps.

    A fixed timeout is too short for a slow network, and on a fast one a lost peer blocks for
    minutes. Here it is ten times the median of past durations, within bounds: a few outliers do not
    move the median, and ten times is enough for a group of all workers after many pairs, and for a
    temporary straggler. (The median plus k deviations would be the median itself when durations are
    steady, and at most 1 + k times the median: for positive values the median absolute deviation is
    not above the median.) A missed timeout doubles the next one, since an aborted group does not
    show how long it would have taken; each group that completes halves it again.
    """

    timeout_factor: float  # multiple of the typical duration
    floor: Seconds
    ceiling: Seconds
    current: Seconds  # the timeout now; the initial value holds until one is learned
    usual: Callable[[Iterable[Seconds]], Seconds] = median  # the typical duration
    _past: deque[Seconds] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES), init=False)
    _num_new: int = field(default=0, init=False)
    _learned: Seconds = field(init=False)
    _slack: int = field(default=1, init=False)  # doubled by each missed timeout

    def __post_init__(self) -> None:
        self._learned = self.current

    def record(self, duration: Seconds) -> None:
        """Learn from the duration of a completed group."""
        self._past.append(duration)
        self._num_new += 1
        if self._num_new == REFRESH:  # never from fewer: they show too little of the spread
            self._num_new = 0
            self._learned = self.timeout_factor * self.usual(self._past)
        elif self._slack == 1:
            return
        self._slack = max(self._slack // 2, 1)
        self._update()

    def record_timeout(self) -> None:
        """Double the timeout after a group that missed it."""
        self._slack = min(self._slack * 2, 2**20)
        self._update()

    def _update(self) -> None:
        timeout = max(self._learned, self.floor) * self._slack
        self.current = min(timeout, self.ceiling)


class StagePolicy(NamedTuple):
    """The policy that forms groups at a stage, or its global average, with learned timeouts."""

    policy: Policy
    average_timeout: LearnedTimeout  # of an average
    ready_timeout: LearnedTimeout  # of an assigned group, for members that still compute
    wait_timeout: LearnedTimeout | None  # of a ready member without a group; None for no limit
    takes_requests: bool
    is_average_all: bool
    timer: int  # index of its timer in the list of all timers

    @classmethod
    def of(cls, policy: Policy, limits: Limits, timer: int, *, is_average_all: bool) -> Self:
        factor, floor = limits.timeout_factor, limits.floor
        wait_timeout = None
        if limits.group_timeout < math.inf:
            # From the shortest step: others may contain such waits, and the timeout would grow
            # by itself.
            wait_timeout = LearnedTimeout(
                limits.group_timeout_steps,
                limits.group_timeout,
                max(limits.group_timeout, limits.ready_timeout),
                limits.group_timeout,
                usual=min,
            )
        return cls(
            policy,
            LearnedTimeout(factor, floor, limits.ceiling, limits.ceiling),
            LearnedTimeout(factor, floor, limits.ready_timeout, limits.ready_timeout),
            wait_timeout,
            takes_requests=type(policy).on_request is not Policy.on_request,
            is_average_all=is_average_all,
            timer=timer,
        )

    def record_step(self, duration: Seconds) -> None:
        """Learn from the duration of a worker's step."""
        if self.takes_requests:  # else a group is only assigned when all awaited members are ready
            self.ready_timeout.record(duration)
        if self.wait_timeout is not None:
            self.wait_timeout.record(duration)

    def max_ready_wait(self) -> Seconds:
        """Longest time that an assigned group waits for members that still compute."""
        wait = self.ready_timeout.current
        return wait if self.wait_timeout is None else min(wait, self.wait_timeout.current)


@dataclass(slots=True, eq=False)
class GroupRound:
    """One round of a group: queued, then open, then averaging."""

    gid: int
    group: Group
    members: "list[MemberState]"
    stage_policy: StagePolicy
    pending: set[Worker]  # members that have not sent Done
    is_open: bool = False  # it is first in the queue of each member
    assign: Assign | None = None  # sent when it opened
    unready: set[Worker] = field(default_factory=set)  # members with a request that still compute
    passive: set[Worker] = field(default_factory=set)  # members that computed when it opened
    opened: Seconds = 0.0
    started: Seconds = 0.0  # when `unready` became empty
    deadline: Seconds = 0.0

    def waiting_members(self) -> "list[MemberState]":
        """Members whose step the group ends: a ready worker in a group waits for that group."""
        unready = self.unready
        return [member for member in self.members if member.is_ready or member.worker in unready]


class MemberState:
    """State of one worker and of its current step."""

    __slots__ = (
        "aborted_gid",
        "average_all_clock",
        "clock",
        "group_end",
        "has_early_ready",
        "has_early_request",
        "has_joined",
        "has_requested",
        "incarnation",
        "is_active",
        "is_idle",
        "is_ready",
        "is_stopping",
        "met",
        "node",
        "num_failures",
        "queue",
        "reported_clock",
        "requested_clock",
        "solo_group",
        "stage_policy",
        "status",
        "step_end",
        "step_start",
        "worker",
    )

    stage_policy: StagePolicy  # AverageAllPolicy during a global average, else its group policy

    def __init__(self, worker: Worker) -> None:
        self.worker, self.node = worker, ""
        self.status, self.incarnation, self.is_active = MemberStatus.ABSENT, -1, False
        self.start_over(-1)
        self.has_joined = False  # in the policy and the global average of its stage
        self.is_idle = False  # it has left the policy until it has samples again

    def start_over(self, clock: int) -> None:
        """Reset to a worker without a step or group, whose model is that of step `clock`."""
        self.clock = clock
        self.reported_clock = clock  # of the last Ready or AverageAll
        self.requested_clock = clock  # of the last Request
        self.step_start: Seconds = math.inf  # when it started to compute; inf if unknown
        self.average_all_clock = -1  # of the last AverageAll
        # Sent again in answer to duplicates: the end of its last step, or None between its Ready or
        # AverageAll and that end; and the end of its last group.
        self.step_end: Commit | Skip | None = None
        self.group_end: Commit | Abort | None = None
        self.met = 0  # bits of pipelines with which it is connected: they have averaged together
        self.aborted_gid = -1  # the group aborted before its Done, which may still arrive
        self.queue: list[GroupRound] = []  # its groups, in the order of their ids
        self.has_early_ready = self.has_early_request = False  # received before the step ended
        self.is_stopping = False  # AverageAll came early, or it leaves: no more groups open for it
        self.end_step()

    def end_step(self) -> None:
        self.has_requested = self.is_ready = False
        self.solo_group: Group | None = None  # a group of one, sent as Skip when it is ready
        self.num_failures = 0  # failed groups in this step


class Membership:
    """The status of workers, which pipelines are active, and sources of model copies.

    A pipeline with a dead stage cannot train, so all its workers are inactive, at every stage,
    until the dead worker has joined again. If that worker has no model (its clock is 0), each
    worker of the pipeline copies the model of its stage from the same other pipeline, so that the
    stages match. A worker that leaves has finished: the rest of its pipeline finishes too, and
    stays active. Each change of the active workers starts an epoch.

    Source: none; neither SDPipe nor Prague survives a loss (SDPipe, PVLDB 16(9), 2023, section 4,
    leaves it to future work).
    """

    def __init__(self, num_stages: int, num_pipelines: int, *, pipelines_die_whole: bool) -> None:
        self.epoch = 0
        self.pipelines_die_whole = pipelines_die_whole
        self.stages = [
            [MemberState(Worker(stage, pipeline)) for pipeline in range(num_pipelines)]
            for stage in range(num_stages)
        ]
        self.members = {member.worker: member for stage in self.stages for member in stage}

    def change(self, member: MemberState, status: MemberStatus) -> list[MemberState]:
        """Set the status of a worker; return the workers that became active or inactive."""
        member.status = status
        affected = self.pipeline(member) if self.pipelines_die_whole else [member]
        complete = all(o.status in (MemberStatus.ACTIVE, MemberStatus.LEFT) for o in affected)
        changed = []
        for other in affected:
            active = complete and other.status is MemberStatus.ACTIVE
            if active != other.is_active:
                other.is_active = active
                changed.append(other)
        self.epoch += bool(changed)
        return changed

    def missing(self, member: MemberState) -> str:
        """Describe the lost workers because of which an alive worker is not active."""
        lost = [
            o for o in self.pipeline(member) if o.status in (MemberStatus.ABSENT, MemberStatus.DEAD)
        ]
        return ", ".join(f"{other.worker} {other.status.value}" for other in lost)

    def sources(self, behind: Sequence[MemberState]) -> list[tuple[MemberState, MemberState]]:
        """Pair workers of one pipeline with their sources, all in one pipeline if possible.

        The source pipeline is the one whose slowest stage is furthest; one without a trained model
        is no source.
        """
        pipeline = behind[0].worker.pipeline
        columns = zip(*(self.stages[member.worker.stage] for member in behind), strict=True)
        others = [column for column in columns if column[0].worker.pipeline != pipeline]
        active = [column for column in others if all(source.is_active for source in column)]
        if not active and len(behind) > 1:  # no pipeline has all these stages: one source each
            return [pair for member in behind for pair in self.sources([member])]
        best = max(active, key=lambda column: min(source.clock for source in column), default=())
        has_started = any(source.clock > 0 for source in best)
        return list(zip(behind, best, strict=True)) if has_started else []

    def pipeline(self, member: MemberState) -> list[MemberState]:
        """All workers of the member's pipeline, by stage."""
        return [stage[member.worker.pipeline] for stage in self.stages]


class _BrokenLink(NamedTuple):
    until: Seconds
    apart: Seconds  # how long
    num_failures: int


class BrokenLinks:
    """Pairs of workers that exchange nothing directly, since messages between them are lost.

    A link is broken if both workers name each other soon after a group has failed, and one has lost
    the other; both may be slow in an average of large models. Of a worker that has died or stopped,
    only the others report. The link is tried again after a time that doubles with each failure; a
    group that commits over it ends that.

    Source: none.
    """

    def __init__(self) -> None:
        self._links: dict[tuple[Worker, Worker], _BrokenLink] = {}
        # The last report of each worker: the group, when, and whom it names: as lost, or as slow.
        self._reports: dict[Worker, tuple[int, Seconds, dict[Worker, bool]]] = {}

    def report(
        self,
        worker: Worker,
        gid: int,
        lost: Iterable[Worker],
        now: Seconds,
        *,
        slow: Iterable[Worker] = (),
    ) -> list[tuple[Worker, Worker]]:
        """Record which members of a group do not answer a worker; return pairs that this breaks."""
        broken = list[tuple[Worker, Worker]]()
        own = dict.fromkeys(slow, False) | dict.fromkeys(lost, True)
        for other in sorted(own):
            last_gid, last_now, named = self._reports.get(other, (-1, -math.inf, {}))
            is_recent = last_gid == gid and now - last_now <= REPORT_WINDOW
            if is_recent and worker in named and (own[other] or named[worker]):
                pair = min(worker, other), max(worker, other)
                last = self._links.get(pair, _BrokenLink(now, FIRST_APART / 2, 0))
                apart = min(2 * last.apart, MAX_APART)
                self._links[pair] = _BrokenLink(now + apart, apart, last.num_failures + 1)
                broken.append(pair)
        last_gid, _, named = self._reports.get(worker, (-1, now, {}))
        if last_gid == gid:
            own |= {other: is_lost or own.get(other, False) for other, is_lost in named.items()}
        self._reports[worker] = gid, now, own
        return broken

    def among(self, workers: Iterable[Worker], now: Seconds) -> tuple[tuple[Worker, Worker], ...]:
        """Return the pairs of these workers that exchange nothing directly now."""
        if not self._links:
            return ()
        members = set(workers)
        return tuple(
            pair
            for pair, link in sorted(self._links.items())
            if link.until > now and members.issuperset(pair)
        )

    def worst(
        self, pairs: Iterable[tuple[Worker, Worker]], workers: Iterable[Worker]
    ) -> tuple[tuple[Worker, Worker], ...]:
        """Return the pairs that failed most often, as long as one of `workers` is in none of them.

        The others are tried again: one that works again is restored, the rest fails once more.
        """
        relays, kept = set(workers), list[tuple[Worker, Worker]]()
        for pair in sorted(pairs, key=lambda pair: (-self._links[pair].num_failures, pair)):
            if len(relays.difference(pair)) > 0:
                relays.difference_update(pair)
                kept.append(pair)
        return tuple(sorted(kept))

    def reason(self, pairs: Iterable[tuple[Worker, Worker]]) -> str:
        """Describe broken links."""
        texts = []
        for pair in pairs:
            num, (one, other) = self._links[pair].num_failures, pair
            texts.append(f"{one}-{other} failed {num} time{'s' * (num > 1)}")
        return f"link {', '.join(texts)}: no direct messages"

    def restore(self, assign: Assign) -> None:
        """Forget what is broken among the members of a committed group that used these links."""
        members = set(assign.members)
        for pair in [pair for pair in self._links if members.issuperset(pair)]:
            if pair not in assign.apart:
                del self._links[pair]

    def forget(self, worker: Worker) -> None:
        """Forget all about a worker, which has died or starts in a new incarnation."""
        self._reports.pop(worker, None)
        for pair in [pair for pair in self._links if worker in pair]:
            del self._links[pair]


class GroupQueue:
    """One total order of groups: each worker runs its groups in that order.

    Groups are numbered as they are formed. A group is first when it is first in the queue of each
    of its members. The oldest group is first in all its queues, so no two groups can wait for each
    other, and any two workers that share groups see them in the same order.

    Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
    Training", ASPLOS 2020, section 4.1. Departures: a group never overtakes an older one that
    shares a member with it; a group can be removed from the queues, and has a deadline.
    """

    def __init__(self, first_gid: int) -> None:
        self.groups: dict[int, GroupRound] = {}
        self._next_gid = first_gid
        self._deadlines: list[tuple[Seconds, int]] = []  # a heap, including outdated entries

    def add(
        self, group: Group, members: list[MemberState], stage_policy: StagePolicy
    ) -> GroupRound:
        """Append a group to the queues of its members."""
        pending = set(group.members)
        group_round = GroupRound(self._next_gid, group, members, stage_policy, pending)
        self.groups[group_round.gid] = group_round
        self._next_gid += 1
        for member in members:
            member.queue.append(group_round)
        return group_round

    def remove(self, group_round: GroupRound) -> None:
        del self.groups[group_round.gid]
        for member in group_round.members:
            member.queue.remove(group_round)

    def is_first(self, group_round: GroupRound) -> bool:
        for member in group_round.members:
            if member.queue[0] is not group_round or (member.is_stopping and not member.is_ready):
                return False
        return True

    def using(self, pair: tuple[Worker, Worker]) -> Iterator[GroupRound]:
        """Yield the open groups in which both workers exchange messages directly."""
        for group_round in list(self.groups.values()):
            assign = group_round.assign
            if assign is None or group_round.gid not in self.groups:
                continue
            if {*pair} <= {*assign.members} and pair not in assign.apart:
                yield group_round

    def oldest_unready(self, members: Container[MemberState]) -> GroupRound | None:
        """Return the oldest group in which one of these workers waits for unready members."""
        for group_round in self.groups.values():
            if group_round.unready and any(
                member in members and member.is_ready for member in group_round.members
            ):
                return group_round
        return None

    def set_deadline(self, group_round: GroupRound, deadline: Seconds) -> None:
        group_round.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, group_round.gid))

    def next_deadline(self) -> Seconds:
        """The earliest deadline of a group; inf if there is none."""
        while self._deadlines:
            deadline, gid = self._deadlines[0]
            group_round = self.groups.get(gid)
            if group_round is not None and group_round.deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return math.inf

    def expired(self, now: Seconds) -> Iterator[GroupRound]:
        """Yield groups past their deadline, by deadline; the caller removes or extends each."""
        while self.next_deadline() <= now:
            yield self.groups[heapq.heappop(self._deadlines)[1]]


class GroupWait(NamedTuple):
    """One wait of one worker; `number` makes heap comparisons stop before `member`."""

    deadline: Seconds
    number: int
    wait_timeout: Seconds
    clock: int
    member: MemberState

    def is_waiting(self) -> bool:
        member = self.member
        waits = member.is_ready and not member.queue and not member.stage_policy.is_average_all
        return waits and member.clock == self.clock


class GroupWaits:
    """Deadlines of workers that are ready and have no group yet."""

    def __init__(self) -> None:
        self._heap: list[GroupWait] = []
        self._num_waits = 0

    def add(self, member: MemberState, now: Seconds, wait_timeout: Seconds) -> None:
        self._num_waits += 1
        wait = GroupWait(now + wait_timeout, self._num_waits, wait_timeout, member.clock, member)
        heapq.heappush(self._heap, wait)

    def next_deadline(self) -> Seconds:
        """The earliest deadline; inf if no worker waits."""
        while self._heap and not self._heap[0].is_waiting():
            heapq.heappop(self._heap)
        return self._heap[0].deadline if self._heap else math.inf

    def oldest(self, members: Container[MemberState]) -> GroupWait | None:
        """Return the wait of one of these workers that began first; None if none waits."""
        waits = (each for each in self._heap if each.member in members and each.is_waiting())
        return min(waits, key=lambda wait: wait.number, default=None)

    def pop_next(self) -> GroupWait:
        """Remove and return the wait with the deadline of `next_deadline`."""
        return heapq.heappop(self._heap)


register_state(Limits, LearnedTimeout, StagePolicy, MemberStatus, MemberState, Membership)
register_state(GroupRound, GroupQueue, GroupWait, GroupWaits, BrokenLinks, _BrokenLink)
register_state(median, min)  # of learned timeouts

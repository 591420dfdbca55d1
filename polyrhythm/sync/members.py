"""The scheduler's records of one worker, of one round of a group, and of the policy of a stage.

A step of a worker: it may request a group ahead, it becomes ready, and the end of a round, or a
Skip, ends the step. A round of a group: it waits in the queues of its members, opens once it is
first in all of them, and averages once the members that made a request are ready. A member without
a request when the round opens is passive: it answers while it computes. If it becomes ready before
the round is done, it waits for that round like any other member.
"""

import math
from enum import Enum
from typing import NamedTuple

from polyrhythm.sync.policy import Policy
from polyrhythm.sync.protocol import Abort, Assign, Commit, Skip
from polyrhythm.sync.timeouts import LearnedTimeout
from polyrhythm.types import Group, Seconds, Worker


class MemberStatus(Enum):
    ABSENT = "has not joined yet"
    ACTIVE = "is alive"
    LEFT = "has left"
    DEAD = "is dead"


class StagePolicy(NamedTuple):
    """The policy that forms groups at a stage, or its global average, with learned timeouts."""

    policy: Policy
    average_timeout: LearnedTimeout  # of an average
    ready_timeout: LearnedTimeout  # of an assigned group, for members that still compute
    wait_timeout: LearnedTimeout | None  # of a ready member without a group; None for no limit
    takes_requests: bool
    is_average_all: bool
    timer: int  # index of its timer in the list of all timers

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


class GroupRound:
    """One round of a group: queued, then open, then averaging."""

    __slots__ = (
        "assign",
        "deadline",
        "gid",
        "group",
        "is_open",
        "members",
        "opened",
        "pending",
        "stage_policy",
        "started",
        "unready",
    )

    def __init__(
        self, gid: int, group: Group, members: "list[MemberState]", stage_policy: StagePolicy
    ) -> None:
        self.gid, self.group, self.members, self.stage_policy = gid, group, members, stage_policy
        self.is_open = False  # it is first in the queue of each member
        self.assign: Assign | None = None  # sent when it opened
        self.unready: set[Worker] = set()  # members with a request that still compute
        self.pending = set(group.members)  # members that have not sent Done
        self.opened: Seconds = 0.0
        self.started: Seconds = 0.0  # when `unready` became empty
        self.deadline: Seconds = 0.0


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
        self.aborted_gid = -1  # the group aborted before its Done, which may still arrive
        self.queue: list[GroupRound] = []  # its groups, in the order of their ids
        self.has_early_ready = self.has_early_request = False  # received before the step ended
        self.is_stopping = False  # AverageAll came early, or it leaves: no more groups open for it
        self.end_step()

    def end_step(self) -> None:
        self.has_requested = self.is_ready = False
        self.solo_group: Group | None = None  # a group of one, sent as Skip when it is ready
        self.num_failures = 0  # failed groups in this step

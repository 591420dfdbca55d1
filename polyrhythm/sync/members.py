"""What the scheduler knows of one worker, of one group on its way, and of who forms groups.

A worker goes through its step: it may ask ahead, it becomes ready, and the end of a group, or being
told to go on alone, ends the step. A group goes through the lines of its members: it waits in line,
it is open once it comes first in all of them, it averages once those who have asked are ready. A
member that has not asked by the time it opens is passive: it answers while it computes. If it is
ready before the group is done, that is the group it waits for, like any other.
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
    ALIVE = "is here"
    LEFT = "has left"
    DEAD = "is dead"


class StagePolicy(NamedTuple):
    """Who forms groups for a worker: the policy of its stage, or the gathering of its stage."""

    policy: Policy
    average_timeout: LearnedTimeout  # of averages
    ready_timeout: (
        LearnedTimeout  # of members that have asked, and compute when their group is assigned
    )
    wait_timeout: LearnedTimeout | None  # of members that are ready; None if it has no end
    asks_ahead: bool
    is_average_all: bool
    timer: int  # the place of its timer among all

    def record_step(self, duration: Seconds) -> None:
        """A worker took so long for a step."""
        if self.asks_ahead:  # else no group is assigned before all that are waited for are ready
            self.ready_timeout.record(duration)
        if self.wait_timeout is not None:
            self.wait_timeout.record(duration)

    def max_ready_wait(self) -> Seconds:
        """Of an assigned group, for those of its members that compute."""
        wait = self.ready_timeout.current
        return wait if self.wait_timeout is None else min(wait, self.wait_timeout.current)


class GroupRound:
    """A group on its way: in the lines of its members, then open, then averaging."""

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
        self.is_open = False  # it comes first in the line of each of its members
        self.assign: Assign | None = None  # what they were told then
        self.unready: set[Worker] = set()  # those who have asked, and are still computing
        self.pending = set(group.members)  # those who have not said Done
        self.opened: Seconds = 0.0
        self.started: Seconds = 0.0  # when nobody was unready any more
        self.deadline: Seconds = 0.0


class MemberState:
    """What is known of one worker, and where it stands in its step."""

    __slots__ = (
        "aborted_gid",
        "average_all_clock",
        "began",
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
        "worker",
    )

    stage_policy: StagePolicy  # its policy; its gathering, from Gather to the end of that

    def __init__(self, worker: Worker) -> None:
        self.worker, self.node = worker, ""
        self.status, self.incarnation, self.is_active = MemberStatus.ABSENT, -1, False
        self.start_over(-1)
        self.has_joined = False  # the policy and the gathering of its stage know it
        self.is_idle = False  # it has left the policy, until it has something to do

    def start_over(self, clock: int) -> None:
        """Nothing is under way; its model is that of step `clock`."""
        self.clock = clock
        self.reported_clock = self.requested_clock = (
            clock  # the last step it has said Ready, or Request, for
        )
        self.began: Seconds = math.inf  # when it began to compute; inf if that is not known
        self.average_all_clock = -1  # the last one that it has said Gather at
        # To be told again, if it repeats what it has said: what ended its last step, or None from
        # its Ready or Gather to that end; and what ended the last group that it was in.
        self.step_end: Commit | Skip | None = None
        self.group_end: Commit | Abort | None = None
        self.aborted_gid = -1  # the group that was given up before its Done, which may come yet
        self.queue: list[GroupRound] = []  # its groups, in the order of their ids
        self.has_early_ready = self.has_early_request = (
            False  # Ready, or Request, of the next step came early
        )
        self.is_stopping = (
            False  # Gather came early; or it leaves: no more groups are opened for it
        )
        self.end_step()

    def end_step(self) -> None:
        self.has_requested = self.is_ready = False
        self.solo_group: Group | None = None  # a group of one, to be told when it is ready
        self.num_failures = 0  # of its groups, in this step

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

from polyrhythm.sync.deadlines import Deadlines
from polyrhythm.sync.messages import Abort, Assign, Commit, Skip
from polyrhythm.sync.policy import Policy
from polyrhythm.types import Group, Seconds, Worker


class Life(Enum):
    ABSENT = "has not joined yet"
    ALIVE = "is here"
    LEFT = "has left"
    DEAD = "is dead"


class Decider(NamedTuple):
    """Who forms groups for a worker: the policy of its stage, or the gathering of its stage."""

    policy: Policy
    deadlines: Deadlines  # of averages
    readiness: Deadlines  # of members that have asked, and compute when their group is assigned
    patience: Deadlines | None  # of members that are ready; None if it has no end
    asks_ahead: bool
    is_gathering: bool
    timer: int  # the place of its timer among all

    def stepped(self, duration: Seconds) -> None:
        """A worker took so long for a step."""
        if self.asks_ahead:  # else no group is assigned before all that are waited for are ready
            self.readiness.made(duration)
        if self.patience is not None:
            self.patience.made(duration)

    def longest_wait(self) -> Seconds:
        """Of an assigned group, for those of its members that compute."""
        wait = self.readiness.current
        return wait if self.patience is None else min(wait, self.patience.current)


class Assigned:
    """A group on its way: in the lines of its members, then open, then averaging."""

    __slots__ = (
        "assign",
        "decider",
        "due",
        "gid",
        "group",
        "is_open",
        "members",
        "opened",
        "pending",
        "started",
        "unready",
    )

    def __init__(self, gid: int, group: Group, members: "list[Member]", decider: Decider) -> None:
        self.gid, self.group, self.members, self.decider = gid, group, members, decider
        self.is_open = False  # it comes first in the line of each of its members
        self.assign: Assign | None = None  # what they were told then
        self.unready: set[Worker] = set()  # those who have asked, and are still computing
        self.pending = set(group.members)  # those who have not said Done
        self.opened: Seconds = 0.0
        self.started: Seconds = 0.0  # when nobody was unready any more
        self.due: Seconds = 0.0


class Member:
    """What is known of one worker, and where it stands in its step."""

    __slots__ = (
        "active",
        "ahead",
        "alone",
        "asked",
        "began",
        "clock",
        "crosses",
        "decider",
        "failures",
        "gathered",
        "group_end",
        "has_asked",
        "has_entered",
        "heard",
        "incarnation",
        "is_ready",
        "life",
        "line",
        "node",
        "rests",
        "step_end",
        "stops",
        "wants",
        "worker",
    )

    decider: Decider  # its policy; its gathering, from Gather to the end of that

    def __init__(self, worker: Worker) -> None:
        self.worker, self.node = worker, ""
        self.life, self.incarnation, self.active = Life.ABSENT, -1, False
        self.start_over(-1)
        self.has_entered = False  # the policy and the gathering of its stage know it
        self.rests = False  # it has left the policy, until it has something to do

    def start_over(self, clock: int) -> None:
        """Nothing is under way; its model is that of step `clock`."""
        self.clock = clock
        self.heard = self.asked = clock  # the last step it has said Ready, or Request, for
        self.began: Seconds = math.inf  # when it began to compute; inf if that is not known
        self.gathered = -1  # the last one that it has said Gather at
        # To be told again, if it repeats what it has said: what ended its last step, or None from
        # its Ready or Gather to that end; and what ended the last group that it was in.
        self.step_end: Commit | Skip | None = None
        self.group_end: Commit | Abort | None = None
        self.crosses = -1  # the group that was given up before its Done, which may come yet
        self.line: list[Assigned] = []  # its groups, in the order of their ids
        self.ahead = self.wants = False  # Ready, or Request, of the next step came early
        self.stops = False  # Gather came early; or it leaves: no more groups are opened for it
        self.end_step()

    def end_step(self) -> None:
        self.has_asked = self.is_ready = False
        self.alone: Group | None = None  # a group of one, to be told when it is ready
        self.failures = 0  # of its groups, in this step

"""What the scheduler knows of one worker, and of one group on its way.

A worker goes through its step: it may ask ahead, it becomes ready, and the end of a group, or being
told to go on alone, ends the step. A group goes through the lines of its members: it waits in line,
it is open once it comes first in all of them, it averages once those who have asked are ready. A
member that has not asked by the time it opens is passive: it answers while it computes. If it is
ready before the group is done, that is the group it waits for, like any other.
"""

from enum import Enum

from polyrhythm.sync.messages import Command
from polyrhythm.types import Group, Seconds, Worker


class Life(Enum):
    ABSENT = "has not joined yet"
    ALIVE = "is here"
    LEFT = "has left"
    DEAD = "is dead"


class Assigned:
    """A group on its way: in the lines of its members, then open, then averaging."""

    __slots__ = (
        "due",
        "gid",
        "group",
        "is_open",
        "members",
        "pending",
        "stage",
        "started",
        "unready",
    )

    def __init__(self, gid: int, group: Group, members: "list[Member]") -> None:
        self.gid, self.group, self.members = gid, group, members
        self.stage = group.members[0].stage
        self.is_open = False  # it comes first in the line of each of its members
        self.unready: set[Worker] = set()  # those who have asked, and are still computing
        self.pending = set(group.members)  # those who have not said Done
        self.started: Seconds = 0.0  # when nobody was unready any more
        self.due: Seconds = 0.0


class Member:
    """What is known of one worker, and where it stands in its step."""

    __slots__ = (
        "active",
        "ahead",
        "alone",
        "answer",
        "asked",
        "clock",
        "failures",
        "has_asked",
        "heard",
        "incarnation",
        "is_ready",
        "life",
        "line",
        "node",
        "wants",
        "worker",
    )

    def __init__(self, worker: Worker) -> None:
        self.worker, self.node = worker, ""
        self.life, self.incarnation, self.active = Life.ABSENT, -1, False
        self.start_over(-1)

    def start_over(self, clock: int) -> None:
        """Nothing is under way; its model is that of step `clock`."""
        self.clock = clock
        self.heard = self.asked = clock  # the last step it has said Ready, or Request, for
        self.answer: Command | None = None  # the last command for it, to repeat
        self.line: list[Assigned] = []  # its groups, in the order of their ids
        self.ahead = self.wants = False  # Ready, or Request, of the next step came early
        self.end_step()

    def end_step(self) -> None:
        self.has_asked = self.is_ready = False
        self.alone: Group | None = None  # a group of one, to be told when it is ready
        self.failures = 0  # of its groups, in this step

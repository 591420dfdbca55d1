"""What the scheduler is told and what it answers: one record per event and per command.

These travel on the wire as they are (MessagePack arrays with a tag) and into the log. Whoever
receives an event sets `now`, on the clock of the scheduler; a worker's own clock is a count of
steps. Every message names the incarnation of its sender, which grows each time the worker starts
anew, so that what an earlier life has sent is told apart from what this one sends.
"""

from typing import Annotated

import msgspec

from polyrhythm.sync.dispatch import Ranges, SamplerState
from polyrhythm.types import Seconds, Worker

Count = Annotated[int, msgspec.Meta(ge=0)]  # checked when a message comes off the wire
MAX_CHUNK_SIZE = 1 << 40  # so that sums with positions stay whole numbers of 64 bits
MAX_POSITION = 1 << 62
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_SIZE)]
Position = Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITION)]
Name = Annotated[str, msgspec.Meta(max_length=255)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Neither part of a cycle, nor changed once made."""


class Join(_Message, frozen=True):
    """A worker takes part from now on; its model is that of step `clock`, 0 if it has none.

    A group it was in, or waited for, in an earlier life or under an earlier scheduler, is void.
    """

    worker: Worker
    node: Name  # the machine it runs on
    clock: Count
    incarnation: Count = 0
    now: Seconds = 0.0


class Request(_Message, frozen=True):
    """A worker begins the step after which its clock will be `clock`; it will want a group then."""

    worker: Worker
    clock: Count
    incarnation: Count = 0
    now: Seconds = 0.0


class Ready(_Message, frozen=True):
    """A worker has made the local update of the step that ends with `clock`."""

    worker: Worker
    clock: Count
    incarnation: Count = 0
    now: Seconds = 0.0


class AverageAll(_Message, frozen=True):
    """A worker has stopped training, and waits for an average of all workers of its stage."""

    worker: Worker
    clock: Count
    incarnation: Count = 0
    now: Seconds = 0.0


class Done(_Message, frozen=True):
    """A worker has the average of a group, not applied yet; or it failed to get it."""

    worker: Worker
    gid: Count
    ok: bool
    incarnation: Count = 0
    now: Seconds = 0.0


class Acquire(_Message, frozen=True):
    """A worker wants to know its pipeline's chunk `number`: `count` positions before `until`.

    All stages of a pipeline ask by the same numbers, from 0 in each of its lives, in order.
    """

    worker: Worker
    number: Count
    count: Size
    until: Position | None = None  # None for where training ends
    incarnation: Count = 0
    now: Seconds = 0.0


class Acknowledge(_Message, frozen=True):
    """A worker has made its updates with all chunks up to `number`."""

    worker: Worker
    number: Count
    incarnation: Count = 0
    now: Seconds = 0.0


class QueryProgress(_Message, frozen=True):
    """A worker wants to know which positions were used; `number` is for it to know the answer.

    With `batch`, no more are dealt beyond the end of the batch, of so many, that is being dealt.
    """

    worker: Worker
    number: Count
    incarnation: Count = 0
    now: Seconds = 0.0
    batch: Size | None = None


class Timer(_Message, frozen=True):
    """`Scheduler.next_timer` has come."""

    now: Seconds = 0.0


class Dead(_Message, frozen=True):
    """A worker is taken to be dead: its process has ended, or it was silent for too long."""

    worker: Worker
    incarnation: Count = 0
    now: Seconds = 0.0


class Leave(_Message, frozen=True):
    """A worker has finished, or is about to be taken away."""

    worker: Worker
    incarnation: Count = 0
    now: Seconds = 0.0


class Assign(_Message, frozen=True):
    """These average with these weights, in the order of `gid`, and say Done within `timeout`."""

    gid: int
    epoch: int  # of the membership that the group was formed under
    members: tuple[Worker, ...]  # sorted; all of one stage
    weights: tuple[float, ...]
    incarnations: tuple[int, ...]  # of each member; one that has started anew needs new connections
    timeout: Seconds  # how long it may take, once all members are ready
    why: str


class Commit(_Message, frozen=True):
    """All have the average: apply it."""

    gid: int
    members: tuple[Worker, ...]
    end_clocks: tuple[int, ...]  # the step of each member that ends with it, by clock; -1 for none


class Abort(_Message, frozen=True):
    """Drop the average, and keep the weights as they were; what comes next is another message."""

    gid: int
    members: tuple[Worker, ...]  # those who were assigned, also the lost ones
    reason: str


class Skip(_Message, frozen=True):
    """A worker that was ready at `clock` goes on without an average."""

    worker: Worker
    clock: int
    why: str
    failed: bool = False  # there should have been one; else it is in a group of one


class Acquired(_Message, frozen=True):
    """The positions of a pipeline's chunk; if there are none, all before `until` were used."""

    worker: Worker
    number: int
    until: int | None  # as it was asked for
    ranges: Ranges
    why: str = ""  # if it says something, there should have been some, and there are none


class SampleProgress(_Message, frozen=True):
    """Which positions were used when `number` was asked."""

    worker: Worker
    number: int
    sampler_state: SamplerState


class CopyFrom(_Message, frozen=True):
    """A worker takes over model and optimizer state of `source` before its next step.

    With a `clock`, what the source has when it has ended that step, which is then the worker's
    clock, too: it is the same at all stages of a pipeline, and the source makes no further update
    before the worker takes part. Without, whatever it has; the worker's clock becomes the later one
    of both, so that it never goes back.
    """

    worker: Worker
    source: Worker
    why: str
    clock: int = -1


class Refuse(_Message, frozen=True):
    """What a worker said cannot be right, such as a clock that goes backwards.

    It should stop, if `clock` is the one it has sent last.
    """

    worker: Worker
    clock: int
    why: str


Event = (
    Join
    | Request
    | Ready
    | AverageAll
    | Done
    | Acquire
    | Acknowledge
    | QueryProgress
    | Timer
    | Dead
    | Leave
)
Command = Assign | Commit | Abort | Skip | Acquired | SampleProgress | CopyFrom | Refuse

"""The messages of the scheduler: one record per event (input) and per command (output).

Messages are sent on the wire as they are (MessagePack arrays with a tag) and written to the
decision log. The receiver of an event sets `now` from the scheduler's clock; a worker's own clock
is a count of steps. Every event names the incarnation of its sender, which grows each time the
worker restarts, so that messages of an earlier incarnation can be recognized.
"""

from typing import Annotated, get_args

import msgspec

from polyrhythm.sync.dispatch import Ranges, SamplerState
from polyrhythm.sync.snapshot import register_state
from polyrhythm.types import Group, Seconds, Worker

Count = Annotated[int, msgspec.Meta(ge=0)]  # checked when a message is decoded
MAX_CHUNK_SIZE = 1 << 40  # so that a position plus a size fits into 64 bits
MAX_POSITION = 1 << 62
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_SIZE)]
Position = Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITION)]
Name = Annotated[str, msgspec.Meta(max_length=255)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages: immutable, and never part of a reference cycle (gc=False)."""


class Join(_Message, frozen=True):
    """A worker joins; its model is that of step `clock`, 0 if it has no trained model.

    All groups of its earlier incarnations, or of an earlier scheduler, are void.
    """

    worker: Worker
    node: Name  # the machine the worker runs on
    clock: Count
    incarnation: Count = 0
    now: Seconds = 0.0


class _StepMessage(_Message, frozen=True):
    """Base of the messages about the step of a worker that ends with `clock`."""

    worker: Worker
    clock: Count
    incarnation: Count = 0
    now: Seconds = 0.0


class Request(_StepMessage, frozen=True):
    """A worker starts the step that ends with `clock`, and will need a group at its end."""


class Ready(_StepMessage, frozen=True):
    """A worker has finished the local update of the step that ends with `clock`."""


class AverageAll(_StepMessage, frozen=True):
    """A worker pauses training and waits for the global average of its stage."""


class Done(_Message, frozen=True):
    """A worker has computed the average of a group, not applied yet; or `ok` is False.

    `lost`: members with which this worker could not exchange messages. After the end of a group it
    may be sent again with others. `slow`: those whose messages had not all arrived soon after it.
    """

    worker: Worker
    gid: Count
    ok: bool
    incarnation: Count = 0
    now: Seconds = 0.0
    lost: tuple[Worker, ...] = ()
    slow: tuple[Worker, ...] = ()


class Acquire(_Message, frozen=True):
    """A worker requests chunk `number` of its pipeline: `count` positions before `until`.

    All stages of a pipeline use the same numbers, in order, from 0 in each incarnation.
    """

    worker: Worker
    number: Count
    count: Size
    until: Position | None = None  # None for the end of training
    incarnation: Count = 0
    now: Seconds = 0.0


class Acknowledge(_Message, frozen=True):
    """A worker has finished its updates with all chunks up to `number`."""

    worker: Worker
    number: Count
    incarnation: Count = 0
    now: Seconds = 0.0


class QueryProgress(_Message, frozen=True):
    """A worker asks which positions were used; `number` identifies the answer.

    With `batch`, dispatching ends with the current batch of that many positions.
    """

    worker: Worker
    number: Count
    incarnation: Count = 0
    now: Seconds = 0.0
    batch: Size | None = None


class Timer(_Message, frozen=True):
    """The time `Scheduler.next_timer` is reached."""

    now: Seconds = 0.0


class Dead(_Message, frozen=True):
    """A worker is considered dead: its process ended, or its heartbeat timed out."""

    worker: Worker
    incarnation: Count = 0
    now: Seconds = 0.0


class Leave(_Message, frozen=True):
    """A worker has finished, or is about to be preempted."""

    worker: Worker
    incarnation: Count = 0
    now: Seconds = 0.0


class Assign(_Message, frozen=True):
    """The members average with equal weights, in `gid` order, and send Done within `timeout`.

    The two members of each pair of `apart` exchange nothing directly: their link is broken.
    """

    gid: int
    epoch: int  # of the membership when the group was formed
    members: tuple[Worker, ...]  # sorted; all of one stage
    incarnations: tuple[int, ...]  # of each member; a restarted member needs new connections
    timeout: Seconds  # of the average, once all members are ready
    why: str
    apart: tuple[tuple[Worker, Worker], ...] = ()


class Commit(_Message, frozen=True):
    """All members have computed the average: apply it."""

    gid: int
    members: tuple[Worker, ...]
    end_clocks: tuple[int, ...]  # clock of each member's step that ends with it; -1 for none


class Abort(_Message, frozen=True):
    """Discard the average and keep the weights; a further message says how each member goes on."""

    gid: int
    members: tuple[Worker, ...]  # all assigned members, including lost ones
    reason: str
    is_late: bool = False  # it took longer than its timeout


class Skip(_Message, frozen=True):
    """A worker that is ready at `clock` continues without an average."""

    worker: Worker
    clock: int
    why: str
    failed: bool = False  # True if an average was due; False for a group of one


class Acquired(_Message, frozen=True):
    """The positions of a pipeline's chunk; empty if all positions before `until` were used."""

    worker: Worker
    number: int
    until: int | None  # as in the request
    ranges: Ranges
    why: str = ""  # not empty: the request failed for this reason


class SampleProgress(_Message, frozen=True):
    """The sampler state, in answer to QueryProgress `number`."""

    worker: Worker
    number: int
    sampler_state: SamplerState


class CopyFrom(_Message, frozen=True):
    """A worker copies model and optimizer state of `source` before its next step.

    With a `clock`, it copies the state after that step of the source, and its own clock becomes
    the same: `clock` is equal at all stages of a pipeline, and the source makes no further update
    before the worker takes part. Without, it copies the current state; its clock becomes the
    maximum of both clocks, so that it never decreases.
    """

    worker: Worker
    source: Worker
    why: str
    clock: int = -1


class Refuse(_Message, frozen=True):
    """A message is invalid, for example its clock goes backwards.

    The worker should stop if `clock` is the last one it sent.
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

register_state(Worker, Group, *get_args(Event), *get_args(Command))

"""Messages between a worker and the coordinator: the scheduler's, and a few for connections.

All messages are MessagePack, decoded into known types with known limits; nothing is executed. A
worker sends Hello first and receives Accepted, then Welcome once all workers have joined; or
Refuse. Both sides send heartbeats when they have nothing else to send. After a reconnect the worker
sends Hello again, and receives the last commands again.
"""

from typing import Annotated

import msgspec

from polyrhythm.sync.protocol import (
    Abort,
    Acknowledge,
    Acquire,
    Acquired,
    Assign,
    AverageAll,
    Commit,
    CopyFrom,
    Count,
    Done,
    Leave,
    Name,
    QueryProgress,
    Ready,
    Refuse,
    Request,
    SampleProgress,
    Skip,
)
from polyrhythm.types import Seconds, Worker

PROTOCOL = 3
HEARTBEATS_PER_TIMEOUT = 5  # so that some may be late or lost
FATAL = -1  # the clock of a Refuse that removes the worker from the job
MAX_HELLO_BYTES = 1 << 20  # of a Hello, which names all tensors
MAX_MESSAGE_BYTES = 1 << 10  # of any other message of a worker
MAX_DIMENSIONS = 32

Sizes = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
TensorShapes = tuple[tuple[Name, Sizes], ...]  # name and sizes of each averaged tensor


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker's first message; its model is that of step `clock`, 0 if it has none.

    The first two fields are the same in every protocol, so that versions can refuse each other.
    """

    protocol: int
    worker: Worker
    node: Name
    clock: Count
    incarnation: Count
    policy: Annotated[str, msgspec.Meta(max_length=4096)]  # as in the worker's configuration
    shape: TensorShapes


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Shows that the sender is alive; the coordinator returns it."""

    worker: Worker
    incarnation: Count = 0


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The Hello is accepted: a worker that then sends nothing for `heartbeat_timeout` is dead.

    `coordinator` identifies one run of a coordinator; a restarted one has another name.
    """

    coordinator: Name
    heartbeat_timeout: Seconds


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All expected workers have joined: start training."""

    num_present: int


FromWorker = (
    Hello
    | Heartbeat
    | Request
    | Ready
    | Done
    | AverageAll
    | Acquire
    | Acknowledge
    | QueryProgress
    | Leave
)
ToWorker = (
    Accepted
    | Welcome
    | Heartbeat
    | Assign
    | Commit
    | Abort
    | Skip
    | Acquired
    | SampleProgress
    | CopyFrom
    | Refuse
)

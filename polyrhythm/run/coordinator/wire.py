"""What a worker and the coordinator say to each other: the scheduler's messages, and a few more.

Everything is MessagePack, decoded into known types with known limits; nothing is ever executed. A
worker says Hello first, and hears Accepted, and Welcome once all are there; or Refuse. Whoever has
nothing to say beats, so that both know that the other is alive. When a connection broke and is
there again, the worker says Hello again, and hears once more what it was told last.
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
HEARTBEATS_PER_TIMEOUT = (
    5  # within the time in which silence means death; so some may be late, or lost
)
FATAL = -1  # the clock of a Refuse that ends a worker's part in the job, whatever it has said
MAX_HELLO_BYTES = 1 << 20  # of a Hello, which names all tensors
MAX_MESSAGE_BYTES = 1 << 10  # of anything else that a worker says
MAX_DIMENSIONS = 32

Sizes = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
TensorShapes = tuple[tuple[Name, Sizes], ...]  # what is averaged: each tensor's name and sizes


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker's first words; its model is that of step `clock`, 0 if it has none.

    In any protocol the first two fields are these, so that versions can refuse each other.
    """

    protocol: int
    worker: Worker
    node: Name
    clock: Count
    incarnation: Count
    policy: Annotated[str, msgspec.Meta(max_length=4096)]  # as in the worker's configuration
    shape: TensorShapes


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """I am here; the coordinator beats back."""

    worker: Worker
    incarnation: Count = 0


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The Hello is in order: from now on, whoever is silent for `heartbeat_timeout` is taken to be dead.

    `coordinator` is a name that a coordinator has until it ends, and the next one has not.
    """

    coordinator: Name
    heartbeat_timeout: Seconds


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All have joined that are to be expected: begin."""

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

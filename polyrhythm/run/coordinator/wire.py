"""What a worker and the coordinator say to each other: the scheduler's messages, and a few more.

Everything is MessagePack, decoded into known types with known limits; nothing is ever executed. A
worker says Hello first, and hears Accepted, and Welcome once all are there; or Refuse. Whoever has
nothing to say beats, so that both know that the other is alive. When a connection broke and is
there again, the worker says Hello again, and hears once more what it was told last.
"""

from typing import Annotated

import msgspec

from polyrhythm.sync.messages import (
    Abort,
    Assign,
    Commit,
    Count,
    Dealt,
    Done,
    Gather,
    Heal,
    Leave,
    Name,
    Ready,
    Refuse,
    Request,
    Skip,
    Take,
    Tallied,
    Tally,
    Used,
)
from polyrhythm.types import Seconds, Worker

PROTOCOL = 2
BEATS = 5  # within the time in which silence means death; so some may be late, or lost
OUT = -1  # the clock of a Refuse that ends a worker's part in the job, whatever it has said
MOST_BYTES = 1 << 20  # of a Hello, which names all tensors
MOST_OTHER_BYTES = 1 << 10  # of anything else that a worker says
MOST_DIMENSIONS = 32

Sizes = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_DIMENSIONS)]
Shape = tuple[tuple[Name, Sizes], ...]  # what is averaged: each tensor's name and sizes


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
    shape: Shape


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """I am here; the coordinator beats back."""

    worker: Worker
    incarnation: Count = 0


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The Hello is in order: from now on, whoever is silent for `silence` is taken to be dead.

    `coordinator` is a name that a coordinator has until it ends, and the next one has not.
    """

    coordinator: Name
    silence: Seconds


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All have joined that are to be expected: begin."""

    num_present: int


FromWorker = Hello | Beat | Request | Ready | Done | Gather | Take | Used | Tally | Leave
ToWorker = (
    Accepted | Welcome | Beat | Assign | Commit | Abort | Skip | Dealt | Tallied | Heal | Refuse
)

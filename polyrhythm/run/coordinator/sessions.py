"""Sessions between workers and the coordinator: their messages, and who owns which session.

All messages are MessagePack, decoded into known types with known limits; nothing is executed. A
worker sends Hello first and receives Accepted, then Welcome once all workers have joined; or
Refuse. Both sides send heartbeats when they have nothing else to send. After a reconnect the worker
sends Hello again, and receives the last commands again.

There is one session per worker of the plan, owned by the connection that sent its Hello. A Hello is
refused, with a reason that names both sides, for: another protocol, a worker outside the plan,
another policy, other tensor shapes than the first worker of the stage, or an incarnation that is
not newer than the session's.
"""

import math
from collections import deque
from collections.abc import Iterator
from itertools import zip_longest
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

PROTOCOL = 5
HEARTBEATS_PER_TIMEOUT = 5  # so that some may be late or lost
FATAL = -1  # the clock of a Refuse that removes the worker from the job
MAX_HELLO_BYTES = 1 << 20  # of a Hello, which names all tensors
MAX_MESSAGE_BYTES = 1 << 10  # of any other message of a worker
MAX_DIMENSIONS = 32
NUM_RECENT = 16  # commands to repeat; a worker that answers none of them times out long before

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


class Session:
    """The session of one worker of the plan."""

    __slots__ = ("end_reason", "incarnation", "is_active", "node", "recent", "routing_id", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker, self.node, self.incarnation = worker, "", -1
        self.is_active, self.end_reason = False, "has not joined yet"
        self.routing_id = b""  # of its connection; empty while there is none
        self.recent: deque[bytes] = deque(maxlen=NUM_RECENT)  # commands to repeat on a reconnect


class Connection:
    """A client's connection, with all sessions it has sent Hello for, including lost ones."""

    __slots__ = ("fd", "last_received_at", "routing_id", "sessions")

    def __init__(self, routing_id: bytes) -> None:
        self.routing_id = routing_id
        self.sessions: dict[Worker, Session] = {}
        self.last_received_at: Seconds = -math.inf
        self.fd = -1  # of its socket, at its last Hello


class SessionTable:
    def __init__(self, num_stages: int, num_pipelines: int, policy: str) -> None:
        self.num_stages, self.num_pipelines, self.policy = num_stages, num_pipelines, policy
        self.by_worker = {
            worker: Session(worker)
            for worker in (Worker(s, p) for s in range(num_stages) for p in range(num_pipelines))
        }
        self.connections: dict[bytes, Connection] = {}  # by routing id
        self.num_active = 0
        self._shapes: dict[int, tuple[Worker, TensorShapes]] = {}  # of each stage's first worker

    def active(self) -> Iterator[Session]:
        return (session for session in self.by_worker.values() if session.is_active)

    def is_same_session(self, routing_id: bytes, hello: Hello) -> bool:
        """Whether this connection and incarnation own the worker's session already."""
        session = self.by_worker.get(hello.worker)
        return (
            session is not None
            and session.is_active
            and (session.routing_id, session.incarnation) == (routing_id, hello.incarnation)
        )

    def refusal(self, routing_id: bytes, hello: Hello) -> tuple[str, str] | None:
        """Return why a Hello is refused, as (counter key, text), or None."""
        worker, (stages, pipelines) = hello.worker, (self.num_stages, self.num_pipelines)
        if hello.protocol != PROTOCOL:
            return "hello_protocol", protocol_mismatch(worker, hello.protocol)
        if worker not in self.by_worker:
            return "hello_outside", (
                f"{worker} is not in the plan: the coordinator expects {stages} stages x "
                f"{pipelines} pipelines, s0p0 to s{stages - 1}p{pipelines - 1}"
            )
        if hello.policy != self.policy:
            return "hello_policy", (
                f"{worker} is configured for {hello.policy!r}, the coordinator for {self.policy!r}"
            )
        first, shape = self._shapes.setdefault(worker.stage, (worker, hello.shape))
        if shape != hello.shape:
            return "hello_shape", shape_mismatch(worker, hello.shape, first, shape)
        session = self.by_worker[worker]
        if hello.incarnation <= session.incarnation and not self.is_same_session(routing_id, hello):
            return "hello_incarnation", (
                f"{worker} joins from {hello.node!r} as incarnation {hello.incarnation}, but is "
                f"active on {session.node!r} as incarnation {session.incarnation}: "
                "two processes for one worker?"
                if session.is_active
                else f"{worker} joins as incarnation {hello.incarnation}, but incarnation "
                f"{session.incarnation} {session.end_reason}: it needs a higher incarnation"
            )
        return None

    def open_session(self, routing_id: bytes, hello: Hello) -> Connection:
        """Give a worker's session to this connection, in a new incarnation or the same one."""
        session = self.by_worker[hello.worker]
        connection = self.connections.setdefault(routing_id, Connection(routing_id))
        connection.sessions[session.worker] = session
        if hello.incarnation != session.incarnation:
            session.recent.clear()
        session.routing_id, session.node = routing_id, hello.node
        session.incarnation = hello.incarnation
        self.num_active += not session.is_active
        session.is_active = True
        return connection

    def end_session(self, session: Session, why: str) -> None:
        """End the session of a worker that has left or died; nothing is sent to it any more."""
        self.num_active -= session.is_active
        session.is_active, session.end_reason, session.routing_id = False, why, b""


def protocol_mismatch(worker: Worker, protocol: int) -> str:
    return (
        f"{worker} uses protocol {protocol}, the coordinator protocol {PROTOCOL}: "
        "install the same version of polyrhythm on all machines"
    )


def shape_mismatch(
    worker: Worker, shape: TensorShapes, first: Worker, first_shape: TensorShapes
) -> str:
    """Describe the first tensor that differs, and both totals."""
    index, (own, other) = next(
        (index, pair)
        for index, pair in enumerate(zip_longest(shape, first_shape))
        if pair[0] != pair[1]
    )
    return (
        f"{worker} averages other tensors than {first}: number {index} is {_tensor(own)} in "
        f"{worker} and {_tensor(other)} in {first}; in total, {_total(shape)} and "
        f"{_total(first_shape)}"
    )


def _tensor(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]!r} of shape {tuple(tensor[1])}"


def _total(shape: TensorShapes) -> str:
    return f"{len(shape):,} tensors with {sum(math.prod(s) for _, s in shape):,} numbers"

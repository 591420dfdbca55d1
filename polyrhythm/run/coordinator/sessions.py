"""Who sits where: each worker of the plan has a seat, taken by the connection that said Hello.

A worker that greets is turned away, with a reason that says both sides, if it cannot take part:
another protocol, a place outside of the plan, another policy, tensors of another shape than the
first worker of its stage has, or a life that is not newer than the one that the seat has seen.
"""

import math
from collections import deque
from collections.abc import Iterator
from itertools import zip_longest

from polyrhythm.run.coordinator.wire import PROTOCOL, Hello, TensorShapes
from polyrhythm.types import Seconds, Worker

NUM_RECENT = 16  # commands; a worker that answers none of them is given up long before


class Session:
    """Of one worker of the plan."""

    __slots__ = ("end_reason", "incarnation", "is_active", "node", "recent", "routing_id", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker, self.node, self.incarnation = worker, "", -1
        self.is_active, self.end_reason = False, "has not joined yet"
        self.routing_id = b""  # of its connection; empty while there is none to send to
        self.recent: deque[bytes] = deque(
            maxlen=NUM_RECENT
        )  # told last, for one that connects again


class Connection:
    """Knows the seats it has said Hello for, also those that are not its own any more."""

    __slots__ = ("fd", "last_received_at", "routing_id", "sessions")

    def __init__(self, routing_id: bytes) -> None:
        self.routing_id = routing_id
        self.sessions: dict[Worker, Session] = {}
        self.last_received_at: Seconds = -math.inf  # when it said something last
        self.fd = -1  # of its socket, when it said Hello last


class SessionTable:
    def __init__(self, num_stages: int, num_pipelines: int, policy: str) -> None:
        self.num_stages, self.num_pipelines, self.policy = num_stages, num_pipelines, policy
        self.of = {
            worker: Session(worker)
            for worker in (Worker(s, p) for s in range(num_stages) for p in range(num_pipelines))
        }
        self.connections: dict[bytes, Connection] = {}  # by name
        self.num_active = 0
        self._shapes: dict[int, tuple[Worker, TensorShapes]] = {}  # the first of each stage

    def active(self) -> Iterator[Session]:
        return (session for session in self.of.values() if session.is_active)

    def is_same_session(self, routing_id: bytes, hello: Hello) -> bool:
        """Whether that very connection, in that very life, has its seat already."""
        session = self.of.get(hello.worker)
        return (
            session is not None
            and session.is_active
            and (session.routing_id, session.incarnation) == (routing_id, hello.incarnation)
        )

    def refusal(self, routing_id: bytes, hello: Hello) -> tuple[str, str] | None:
        """Why a worker cannot take its seat: the kind of reason, and the reason."""
        worker, (stages, pipelines) = hello.worker, (self.num_stages, self.num_pipelines)
        if hello.protocol != PROTOCOL:
            return "hello_protocol", protocol_mismatch(worker, hello.protocol)
        if worker not in self.of:
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
        session = self.of[worker]
        if hello.incarnation <= session.incarnation and not self.is_same_session(routing_id, hello):
            return "hello_incarnation", (
                f"{worker} comes from {hello.node!r} in its life {hello.incarnation}, but is here "
                f"from {session.node!r} in its life {session.incarnation}: two processes for one worker?"
                if session.is_active
                else f"{worker} comes in its life {hello.incarnation}, but life "
                f"{session.incarnation} is over, as it {session.end_reason}: it needs a higher number"
            )
        return None

    def open_session(self, routing_id: bytes, hello: Hello) -> Connection:
        """A worker sits down, in a new life or on the seat that it has."""
        session = self.of[hello.worker]
        connection = self.connections.setdefault(routing_id, Connection(routing_id))
        connection.sessions[session.worker] = session
        if hello.incarnation != session.incarnation:
            session.recent.clear()
        session.routing_id, session.node, session.incarnation = (
            routing_id,
            hello.node,
            hello.incarnation,
        )
        self.num_active += not session.is_active
        session.is_active = True
        return connection

    def end_session(self, session: Session, why: str) -> None:
        """A worker is gone; nothing is sent to it any more."""
        self.num_active -= session.is_active
        session.is_active, session.end_reason, session.routing_id = False, why, b""


def protocol_mismatch(worker: Worker, protocol: int) -> str:
    return (
        f"{worker} speaks protocol {protocol}, the coordinator protocol {PROTOCOL}: "
        "install the same version of polyrhythm on all machines"
    )


def shape_mismatch(worker: Worker, shape: TensorShapes, first: Worker, known: TensorShapes) -> str:
    """Says the first tensor that differs, and how much there is in all."""
    place, (ours, theirs) = next(
        (place, pair) for place, pair in enumerate(zip_longest(shape, known)) if pair[0] != pair[1]
    )
    return (
        f"{worker} averages other tensors than {first}: number {place} is {_tensor(ours)} in "
        f"{worker} and {_tensor(theirs)} in {first}; in all, {_total(shape)} against "
        f"{_total(known)}"
    )


def _tensor(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]!r} of shape {tuple(tensor[1])}"


def _total(shape: TensorShapes) -> str:
    return f"{len(shape):,} tensors with {sum(math.prod(s) for _, s in shape):,} numbers"

"""Who sits where: each worker of the plan has a seat, taken by the connection that said Hello.

A worker that greets is turned away, with a reason that says both sides, if it cannot take part:
another protocol, a place outside of the plan, another policy, tensors of another shape than the
first worker of its stage has, or a life that is not newer than the one that the seat has seen.
"""

import math
from collections import deque
from collections.abc import Iterator
from itertools import zip_longest

from polyrhythm.run.coordinator.wire import PROTOCOL, Hello, Shape
from polyrhythm.types import Seconds, Worker

RECENT = 16  # commands; a worker that answers none of them is given up long before


class Seat:
    """Of one worker of the plan."""

    __slots__ = ("incarnation", "is_taken", "name", "node", "recent", "why_empty", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker, self.node, self.incarnation = worker, "", -1
        self.is_taken, self.why_empty = False, "has not joined yet"
        self.name = b""  # of its connection; empty while there is none to send to
        self.recent: deque[bytes] = deque(maxlen=RECENT)  # told last, for one that connects again


class Connection:
    """Knows the seats it has said Hello for, also those that are not its own any more."""

    __slots__ = ("descriptor", "heard", "name", "seats")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.seats: dict[Worker, Seat] = {}
        self.heard: Seconds = -math.inf  # when it said something last
        self.descriptor = -1  # of its socket, when it said Hello last


class Seats:
    def __init__(self, num_stages: int, num_pipelines: int, policy: str) -> None:
        self.num_stages, self.num_pipelines, self.policy = num_stages, num_pipelines, policy
        self.of = {
            worker: Seat(worker)
            for worker in (Worker(s, p) for s in range(num_stages) for p in range(num_pipelines))
        }
        self.connections: dict[bytes, Connection] = {}  # by name
        self.num_taken = 0
        self._shapes: dict[int, tuple[Worker, Shape]] = {}  # the first of each stage

    def taken(self) -> Iterator[Seat]:
        return (seat for seat in self.of.values() if seat.is_taken)

    def has(self, name: bytes, hello: Hello) -> bool:
        """Whether that very connection, in that very life, has its seat already."""
        seat = self.of.get(hello.worker)
        return (
            seat is not None
            and seat.is_taken
            and (seat.name, seat.incarnation) == (name, hello.incarnation)
        )

    def refusal(self, name: bytes, hello: Hello) -> tuple[str, str] | None:
        """Why a worker cannot take its seat: the kind of reason, and the reason."""
        worker, (stages, pipelines) = hello.worker, (self.num_stages, self.num_pipelines)
        if hello.protocol != PROTOCOL:
            return "hello_protocol", other_protocol(worker, hello.protocol)
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
            return "hello_shape", shapes_differ(worker, hello.shape, first, shape)
        seat = self.of[worker]
        if hello.incarnation <= seat.incarnation and not self.has(name, hello):
            return "hello_incarnation", (
                f"{worker} comes from {hello.node!r} in its life {hello.incarnation}, but is here "
                f"from {seat.node!r} in its life {seat.incarnation}: two processes for one worker?"
                if seat.is_taken
                else f"{worker} comes in its life {hello.incarnation}, but life "
                f"{seat.incarnation} is over, as it {seat.why_empty}: it needs a higher number"
            )
        return None

    def take(self, name: bytes, hello: Hello) -> Connection:
        """A worker sits down, in a new life or on the seat that it has."""
        seat = self.of[hello.worker]
        connection = self.connections.setdefault(name, Connection(name))
        connection.seats[seat.worker] = seat
        if hello.incarnation != seat.incarnation:
            seat.recent.clear()
        seat.name, seat.node, seat.incarnation = name, hello.node, hello.incarnation
        self.num_taken += not seat.is_taken
        seat.is_taken = True
        return connection

    def empty(self, seat: Seat, why: str) -> None:
        """A worker is gone; nothing is sent to it any more."""
        self.num_taken -= seat.is_taken
        seat.is_taken, seat.why_empty, seat.name = False, why, b""


def other_protocol(worker: Worker, protocol: int) -> str:
    return (
        f"{worker} speaks protocol {protocol}, the coordinator protocol {PROTOCOL}: "
        "install the same version of polyrhythm on all machines"
    )


def shapes_differ(worker: Worker, shape: Shape, first: Worker, known: Shape) -> str:
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


def _total(shape: Shape) -> str:
    return f"{len(shape):,} tensors with {sum(math.prod(s) for _, s in shape):,} numbers"

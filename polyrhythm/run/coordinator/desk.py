"""The coordinator's desk: what is heard goes to the scheduler, what it answers to whom it concerns.

Nothing is decided here but who may speak. What cannot be read, or comes from somebody who has not
said Hello, is counted and changes nothing. A worker is dead when it was silent for too long; or
sooner, when its connection has closed and is not there again after a moment.
"""

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import zmq

from polyrhythm.run.coordinator.door import Door
from polyrhythm.run.coordinator.seats import Connection, Seat, Seats, other_protocol
from polyrhythm.run.coordinator.wire import (
    BEATS,
    MOST_OTHER_BYTES,
    OUT,
    PROTOCOL,
    Accepted,
    Beat,
    FromWorker,
    Hello,
    Welcome,
)
from polyrhythm.sync.decision_log import DecisionLog
from polyrhythm.sync.messages import (
    Command,
    Dead,
    Dealt,
    Event,
    Heal,
    Join,
    Leave,
    Refuse,
    Skip,
    Tallied,
    Timer,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Seconds, Worker

GRACE: Seconds = 1.0  # at least, for a closed connection to be there again: it is tried after 0.1 s
BATCH = 256  # messages between two looks at timers
LONGEST_POLL: Seconds = 0.1  # until it sees that it is to stop
_TO_ONE = (Skip, Dealt, Tallied, Heal, Refuse)
_ASKED_FOR_AGAIN = (Dealt, Tallied)  # by whoever has not heard them: no need to keep them


class _AnyHello(msgspec.Struct, frozen=True, array_like=True, tag="Hello"):
    """Of any protocol: more may follow."""

    protocol: int
    worker: Worker


class Desk:
    """Used by one thread at a time. `counters`: what was refused or odd, by kind."""

    def __init__(
        self,
        scheduler: Scheduler,
        seats: Seats,
        door: Door,
        log: DecisionLog | None,
        *,
        silence: Seconds,
        startup: Seconds,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self.seats = seats
        self.counters: Counter[str] = Counter()
        self.last_word: Seconds = -math.inf  # when a worker said something else than that it lives
        self._scheduler, self._door, self._log = scheduler, door, log
        self._silence, self._startup = silence, startup
        self._say, self._warn = say, warn
        self._grace = max(GRACE, silence / 15)  # longer where signs of life may be
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromWorker).decode
        self._accepted = self._encode(Accepted(secrets.token_hex(8), silence))
        self._beat = self._encode(Beat(Worker(0, 0)))
        self._begins_at = math.inf  # when workers are welcomed that are here; -inf once they were
        self._silent_at = math.inf  # when somebody may have been silent for too long
        self._lost: dict[bytes, Seconds] = {}  # connections that may be gone, and until when
        self._last_turn = time.monotonic()

    @property
    def has_begun(self) -> bool:
        """Whether workers were welcomed."""
        return self._begins_at == -math.inf

    def turn(self) -> None:
        """Wait for something to happen, for a moment at the most, and see to it."""
        due = min(self._scheduler.next_timer(), self._next_chore())
        self._door.wait(min(due - time.monotonic(), LONGEST_POLL))
        received = self._door.receive(BATCH)
        for name, frame in received:
            self._hear(name, frame, time.monotonic())
        now = time.monotonic()
        if self._scheduler.next_timer() <= now:
            self._step(Timer(now))
        if self._door.closed:
            self._suspect(now)
        self._forgive(now - self._last_turn)
        self._last_turn = now
        if self._next_chore() <= now and len(received) < BATCH:  # nobody waits to be heard
            self._look_after(now)
        if self._log is not None:
            self._log.flush()

    def farewell(self, why: str) -> None:
        """The last words to those who are still here."""
        for seat in self.seats.taken():
            self._door.send(seat.name, self._encode(Refuse(seat.worker, OUT, why)))
        if self._log is not None:
            self._log.close()

    def _hear(self, name: bytes, frame: zmq.Frame, now: Seconds) -> None:
        data = frame.bytes
        try:
            message = self._decode(data)
        except Exception:  # whatever a decoder has to say of bytes from elsewhere
            self._not_understood(name, data)
            return
        if isinstance(message, Hello):
            self._greet(name, frame, message, now)
            return
        connection = self.seats.connections.get(name)
        if connection is None or len(data) > MOST_OTHER_BYTES:
            # No answer: one that has found a new coordinator says Hello in a moment.
            self.counters["oversized" if connection else "stranger"] += 1
            return
        connection.heard = now
        seat = connection.seats.get(message.worker)
        if seat is None or seat.name != name:
            self._turn_away(name, message.worker, seat)
        elif isinstance(message, Beat):
            self._send(name, data)
        else:
            self.last_word = now
            msgspec.structs.force_setattr(message, "now", now)  # it is ours, and nobody else's yet
            self._step(message)
            if isinstance(message, Leave) and message.incarnation == seat.incarnation:
                self.seats.empty(seat, "has left")
                self._say(f"{seat.worker} has left, {self.seats.num_taken} are here")

    def _greet(self, name: bytes, frame: zmq.Frame, hello: Hello, now: Seconds) -> None:
        refusal = self.seats.refusal(name, hello)
        if refusal is not None:
            kind, why = refusal
            self.counters[kind] += 1
            self._warn(f"refused: {why}")
            self._send(name, self._encode(Refuse(hello.worker, hello.clock, why)))
            return
        is_back = self.seats.has(name, hello)
        connection = self.seats.take(name, hello)
        connection.heard, connection.descriptor = now, frame.get(zmq.SRCFD)
        self._silent_at = min(self._silent_at, now + self._silence)
        self._send(name, self._accepted)
        worker, num_taken = hello.worker, self.seats.num_taken
        if is_back:
            self.counters["reconnected"] += 1
            for data in self.seats.of[worker].recent:
                self._send(name, data)
        else:
            self._say(f"{worker} has joined from {hello.node}, {num_taken} are here")
        self._step(Join(worker, hello.node, hello.clock, hello.incarnation, now))
        if self.has_begun:
            self._send(name, self._encode(Welcome(num_taken)))
        elif num_taken == len(self.seats.of):
            self._welcome()
        else:
            self._begins_at = min(self._begins_at, now + self._startup)

    def _welcome(self) -> None:
        self._begins_at = -math.inf
        num_taken, num_seats = self.seats.num_taken, len(self.seats.of)
        self._say(f"{num_taken} of {num_seats} workers have joined: they begin")
        welcome = self._encode(Welcome(num_taken))
        for name in dict.fromkeys(seat.name for seat in self.seats.taken()):
            self._send(name, welcome)

    def _not_understood(self, name: bytes, data: bytes) -> None:
        try:
            hello = msgspec.msgpack.decode(data, type=_AnyHello)
            is_other = hello.protocol != PROTOCOL
        except Exception:
            is_other = False
        self.counters["hello_protocol" if is_other else "malformed"] += 1
        if is_other:
            why = other_protocol(hello.worker, hello.protocol)
            self._warn(f"refused: {why}")
            self._send(name, self._encode(Refuse(hello.worker, OUT, why)))

    def _turn_away(self, name: bytes, worker: Worker, seat: Seat | None) -> None:
        """Somebody speaks for a worker that is not, or not any more, its own."""
        if seat is None:
            self.counters["stranger"] += 1
            why = f"this connection has not said Hello for {worker}"
        else:
            self.counters["late"] += 1
            why = f"{worker} {seat.why_empty}"
            if seat.is_taken:
                why = f"{worker} has started anew, in its life {seat.incarnation}"
        self._send(name, self._encode(Refuse(worker, OUT, why)))

    def _step(self, event: Event) -> None:
        commands: list[Command] = []
        try:
            commands = self._scheduler.step(event)
        finally:  # a log that ends with a defect shows it again
            if self._log is not None:
                self._log.add(event, commands)
        for command in commands:
            self._tell(command)

    def _tell(self, command: Command) -> None:
        """Once to each connection of those whom it concerns."""
        data = self._encode(command)
        workers = (command.worker,) if isinstance(command, _TO_ONE) else command.members
        names: dict[bytes, None] = {}
        for worker in workers:
            seat = self.seats.of[worker]
            if not isinstance(command, _ASKED_FOR_AGAIN):
                seat.recent.append(data)
            names[seat.name] = None
        for name in names:
            if name:
                self._send(name, data)

    def _send(self, name: bytes, data: bytes) -> None:
        if not self._door.send(name, data) and name not in self._lost:
            self._lost[name] = time.monotonic() + self._grace

    def _forgive(self, gap: Seconds) -> None:
        """Nobody was silent while this process was stopped, or starved, and did not listen."""
        if gap > self._silence / BEATS:
            for connection in self.seats.connections.values():
                connection.heard += gap
            self.counters["stalled"] += 1

    def _suspect(self, now: Seconds) -> None:
        """Connections have closed; a descriptor tells whose, but may be another's by now.

        So they are only asked, after a moment, whether they are there.
        """
        closed = set(self._door.closed)
        self._door.closed.clear()
        for connection in self.seats.connections.values():
            if connection.descriptor in closed:
                self._lost.setdefault(connection.name, now + self._grace)

    def _next_chore(self) -> Seconds:
        begins = self._begins_at if self._begins_at > -math.inf else math.inf
        return min(begins, self._silent_at, *self._lost.values())

    def _look_after(self, now: Seconds) -> None:
        if -math.inf < self._begins_at <= now:
            self._welcome()
        connections = self.seats.connections
        for name in [name for name, until in self._lost.items() if until <= now]:
            del self._lost[name]
            if not self._door.send(name, self._beat):
                connection = connections.pop(name, None)
                if connection is not None:
                    self._lose(connection, "is dead: its connection has closed", now)
        if self._silent_at <= now:
            for connection in connections.values():
                silent = now - connection.heard
                if silent >= self._silence:
                    self._lose(connection, f"is dead: it was silent for {silent:.1f} s", now)
            heard = [connections[seat.name].heard for seat in self.seats.taken()]
            self._silent_at = min(heard, default=math.inf) + self._silence

    def _lose(self, connection: Connection, why: str, now: Seconds) -> None:
        for seat in connection.seats.values():
            if seat.name == connection.name:
                self.seats.empty(seat, why)
                self._warn(f"{seat.worker} {why}; {self.seats.num_taken} are here")
                self._step(Dead(seat.worker, seat.incarnation, now))

"""Pass messages of workers to the scheduler, and its commands to the workers they concern.

The server only decides which messages are accepted. A message that cannot be decoded, or comes from
a client that has sent no Hello, is counted and changes nothing. A worker is dead when it has sent
nothing for the heartbeat timeout, or when its connection has closed and it does not reconnect.
"""

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import zmq

from polyrhythm.run.coordinator.sessions import Connection, Session, SessionTable, protocol_mismatch
from polyrhythm.run.coordinator.sockets import RouterSocket
from polyrhythm.run.coordinator.wire import (
    FATAL,
    HEARTBEATS_PER_TIMEOUT,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Accepted,
    FromWorker,
    Heartbeat,
    Hello,
    Welcome,
)
from polyrhythm.sync.decision_log import DecisionLog
from polyrhythm.sync.protocol import (
    Acquired,
    Command,
    CopyFrom,
    Dead,
    Event,
    Join,
    Leave,
    Refuse,
    SampleProgress,
    Skip,
    Timer,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Seconds, Worker

RECONNECT_TIMEOUT: Seconds = 1.0  # at least; a client tries to reconnect after 0.1 s
MAX_BATCH = 256  # messages between two checks of timers
LONGEST_POLL: Seconds = 0.1  # until the stop event is checked
_TO_ONE = (Skip, Acquired, SampleProgress, CopyFrom, Refuse)
_RETRIED_BY_WORKER = (Acquired, SampleProgress)  # the worker requests them again


class _AnyHello(msgspec.Struct, frozen=True, array_like=True, tag="Hello"):
    """The first fields of a Hello of any protocol version."""

    protocol: int
    worker: Worker


class CoordinatorServer:
    """Used by one thread at a time. `counters`: refused and unusual messages by kind."""

    def __init__(
        self,
        scheduler: Scheduler,
        sessions: SessionTable,
        socket: RouterSocket,
        log: DecisionLog | None,
        *,
        heartbeat_timeout: Seconds,
        startup_timeout: Seconds,
        log_info: Callable[[str], None],
        log_warning: Callable[[str], None],
    ) -> None:
        self.sessions = sessions
        self.counters: Counter[str] = Counter()
        self.last_message_at: Seconds = -math.inf  # without heartbeats
        self._scheduler, self._socket, self._log = scheduler, socket, log
        self._heartbeat_timeout, self._startup_timeout = heartbeat_timeout, startup_timeout
        self._log_info, self._log_warning = log_info, log_warning
        self._reconnect_timeout = max(RECONNECT_TIMEOUT, heartbeat_timeout / 15)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromWorker).decode
        self._accepted = self._encode(Accepted(secrets.token_hex(8), heartbeat_timeout))
        self._heartbeat = self._encode(Heartbeat(Worker(0, 0)))
        self._start_at = math.inf  # when to start without missing workers; -inf once started
        self._heartbeat_check_at = math.inf  # when the next heartbeat timeout can occur
        self._suspects: dict[bytes, Seconds] = {}  # possibly closed connections, and when to check
        self._last_run_at = time.monotonic()

    @property
    def has_started(self) -> bool:
        """Whether Welcome has been sent."""
        return self._start_at == -math.inf

    def run_once(self) -> None:
        """Wait for messages or timers, up to `LONGEST_POLL`, and handle them."""
        due = min(self._scheduler.next_timer(), self._next_check_at())
        self._socket.wait(min(due - time.monotonic(), LONGEST_POLL))
        received = self._socket.receive(MAX_BATCH)
        for routing_id, frame in received:
            self._on_message(routing_id, frame, time.monotonic())
        now = time.monotonic()
        if self._scheduler.next_timer() <= now:
            self._step(Timer(now))
        if self._socket.closed_fds:
            self._suspect_closed(now)
        self._extend_after_stall(now - self._last_run_at)
        self._last_run_at = now
        if self._next_check_at() <= now and len(received) < MAX_BATCH:  # no message is queued
            self._check_connections(now)
        if self._log is not None:
            self._log.flush()

    def notify_shutdown(self, why: str) -> None:
        """Send a fatal Refuse to all active workers, and close the log."""
        for session in self.sessions.active():
            self._socket.send(session.routing_id, self._encode(Refuse(session.worker, FATAL, why)))
        if self._log is not None:
            self._log.close()

    def _on_message(self, routing_id: bytes, frame: zmq.Frame, now: Seconds) -> None:
        data = frame.bytes
        try:
            message = self._decode(data)
        except Exception:  # any error of the decoder: the bytes are not trusted
            self._on_undecodable(routing_id, data)
            return
        if isinstance(message, Hello):
            self._on_hello(routing_id, frame, message, now)
            return
        connection = self.sessions.connections.get(routing_id)
        if connection is None or len(data) > MAX_MESSAGE_BYTES:
            # No answer: a client that has reached a new coordinator sends Hello next.
            self.counters["oversized" if connection else "unknown_worker"] += 1
            return
        connection.last_received_at = now
        session = connection.sessions.get(message.worker)
        if session is None or session.routing_id != routing_id:
            self._refuse_sender(routing_id, message.worker, session)
        elif isinstance(message, Heartbeat):
            self._send(routing_id, data)
        else:
            self.last_message_at = now
            msgspec.structs.force_setattr(message, "now", now)  # frozen, but not shared yet
            self._step(message)
            if isinstance(message, Leave) and message.incarnation == session.incarnation:
                self.sessions.end_session(session, "has left")
                self._log_info(f"{session.worker} has left, {self.sessions.num_active} are active")

    def _on_hello(self, routing_id: bytes, frame: zmq.Frame, hello: Hello, now: Seconds) -> None:
        refusal = self.sessions.refusal(routing_id, hello)
        if refusal is not None:
            kind, why = refusal
            self.counters[kind] += 1
            self._log_warning(f"refused: {why}")
            self._send(routing_id, self._encode(Refuse(hello.worker, hello.clock, why)))
            return
        is_reconnect = self.sessions.is_same_session(routing_id, hello)
        connection = self.sessions.open_session(routing_id, hello)
        connection.last_received_at, connection.fd = now, frame.get(zmq.SRCFD)
        self._heartbeat_check_at = min(self._heartbeat_check_at, now + self._heartbeat_timeout)
        self._send(routing_id, self._accepted)
        worker, num_active = hello.worker, self.sessions.num_active
        if is_reconnect:
            self.counters["reconnected"] += 1
            for data in self.sessions.by_worker[worker].recent:
                self._send(routing_id, data)
        else:
            self._log_info(f"{worker} has joined from {hello.node}, {num_active} are active")
        self._step(Join(worker, hello.node, hello.clock, hello.incarnation, now))
        if self.has_started:
            self._send(routing_id, self._encode(Welcome(num_active)))
        elif num_active == len(self.sessions.by_worker):
            self._send_welcome()
        else:
            self._start_at = min(self._start_at, now + self._startup_timeout)

    def _send_welcome(self) -> None:
        self._start_at = -math.inf
        num_active, num_sessions = self.sessions.num_active, len(self.sessions.by_worker)
        self._log_info(f"{num_active} of {num_sessions} workers have joined: they start")
        welcome = self._encode(Welcome(num_active))
        for routing_id in dict.fromkeys(session.routing_id for session in self.sessions.active()):
            self._send(routing_id, welcome)

    def _on_undecodable(self, routing_id: bytes, data: bytes) -> None:
        try:
            hello = msgspec.msgpack.decode(data, type=_AnyHello)
            is_other = hello.protocol != PROTOCOL
        except Exception:
            is_other = False
        self.counters["hello_protocol" if is_other else "malformed"] += 1
        if is_other:
            why = protocol_mismatch(hello.worker, hello.protocol)
            self._log_warning(f"refused: {why}")
            self._send(routing_id, self._encode(Refuse(hello.worker, FATAL, why)))

    def _refuse_sender(self, routing_id: bytes, worker: Worker, session: Session | None) -> None:
        """Refuse a message from a connection that does not own the worker's session."""
        if session is None:
            self.counters["unknown_worker"] += 1
            why = f"this connection has sent no Hello for {worker}"
        else:
            self.counters["late"] += 1
            why = f"{worker} {session.end_reason}"
            if session.is_active:
                why = f"{worker} has restarted, as incarnation {session.incarnation}"
        self._send(routing_id, self._encode(Refuse(worker, FATAL, why)))

    def _step(self, event: Event) -> None:
        commands: list[Command] = []
        try:
            commands = self._scheduler.step(event)
        finally:  # a replay of the log then reproduces the defect
            if self._log is not None:
                self._log.add(event, commands)
        for command in commands:
            self._send_command(command)

    def _send_command(self, command: Command) -> None:
        """Send a command once to each connection of the workers it concerns."""
        data = self._encode(command)
        workers = (command.worker,) if isinstance(command, _TO_ONE) else command.members
        is_repeated = not isinstance(command, _RETRIED_BY_WORKER)
        routing_ids: dict[bytes, None] = {}
        for worker in workers:
            session = self.sessions.by_worker[worker]
            if is_repeated:
                session.recent.append(data)
            routing_ids[session.routing_id] = None
        for routing_id in routing_ids:
            if routing_id:
                self._send(routing_id, data)

    def _send(self, routing_id: bytes, data: bytes) -> None:
        if not self._socket.send(routing_id, data) and routing_id not in self._suspects:
            self._suspects[routing_id] = time.monotonic() + self._reconnect_timeout

    def _extend_after_stall(self, gap: Seconds) -> None:
        """Extend heartbeats by a time in which this process was stopped or starved."""
        if gap > self._heartbeat_timeout / HEARTBEATS_PER_TIMEOUT:
            for connection in self.sessions.connections.values():
                connection.last_received_at += gap
            self.counters["stalled"] += 1

    def _suspect_closed(self, now: Seconds) -> None:
        """Schedule a check of the connections whose file descriptors have closed.

        A descriptor may belong to another connection by now, so this alone proves nothing.
        """
        closed = set(self._socket.closed_fds)
        self._socket.closed_fds.clear()
        for connection in self.sessions.connections.values():
            if connection.fd in closed:
                self._suspects.setdefault(connection.routing_id, now + self._reconnect_timeout)

    def _next_check_at(self) -> Seconds:
        start_at = self._start_at if self._start_at > -math.inf else math.inf
        return min(start_at, self._heartbeat_check_at, *self._suspects.values())

    def _check_connections(self, now: Seconds) -> None:
        if -math.inf < self._start_at <= now:
            self._send_welcome()
        connections = self.sessions.connections
        for routing_id in [
            routing_id for routing_id, deadline in self._suspects.items() if deadline <= now
        ]:
            del self._suspects[routing_id]
            if not self._socket.send(routing_id, self._heartbeat):
                connection = connections.pop(routing_id, None)
                if connection is not None:
                    self._mark_dead(connection, "is dead: its connection has closed", now)
        if self._heartbeat_check_at <= now:
            for connection in connections.values():
                silent_for = now - connection.last_received_at
                if silent_for >= self._heartbeat_timeout:
                    why = f"is dead: no heartbeat for {silent_for:.1f} s"
                    self._mark_dead(connection, why, now)
            last_received_at = [
                connections[session.routing_id].last_received_at
                for session in self.sessions.active()
            ]
            self._heartbeat_check_at = (
                min(last_received_at, default=math.inf) + self._heartbeat_timeout
            )

    def _mark_dead(self, connection: Connection, why: str, now: Seconds) -> None:
        for session in connection.sessions.values():
            if session.routing_id == connection.routing_id:
                self.sessions.end_session(session, why)
                self._log_warning(f"{session.worker} {why}; {self.sessions.num_active} are active")
                self._step(Dead(session.worker, session.incarnation, now))

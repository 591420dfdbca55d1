"""The coordinator: the scheduler (`sync/scheduler.py`) as a network service for workers.

One thread receives messages, passes them to the scheduler, and sends its commands to the workers
they concern. It only decides which messages are accepted: one that cannot be decoded, or comes from
a client that has sent no Hello, is counted and changes nothing. A worker is dead when it has sent
nothing for the heartbeat timeout, or when its connection has closed and it does not reconnect. A
defect of ours ends the service, with a message to all workers, so that none of them waits for it.

    with Coordinator(setup, bind="tcp://10.0.0.1:0", keys=keys) as coordinator:
        ...  # workers connect to coordinator.address
"""

import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec
import zmq

from polyrhythm.errors import PolicyError
from polyrhythm.run.coordinator.keys import ServerKeys
from polyrhythm.run.coordinator.sessions import (
    FATAL,
    HEARTBEATS_PER_TIMEOUT,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Accepted,
    Connection,
    FromWorker,
    Heartbeat,
    Hello,
    Session,
    SessionTable,
    Welcome,
    protocol_mismatch,
)
from polyrhythm.run.coordinator.sockets import RouterSocket
from polyrhythm.sync.decision_log import DecisionLog, clock
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
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

CLOSE_TIMEOUT: Seconds = 5.0  # for the thread to end
RECONNECT_TIMEOUT: Seconds = 1.0  # at least; a client tries to reconnect after 0.1 s
MAX_BATCH = 256  # messages between two checks of timers
LONGEST_POLL: Seconds = 0.1  # until the stop event is checked
_TO_ONE = (Skip, Acquired, SampleProgress, CopyFrom, Refuse)
_RETRIED_BY_WORKER = (Acquired, SampleProgress)  # the worker requests them again


class _AnyHello(msgspec.Struct, frozen=True, array_like=True, tag="Hello"):
    """The first fields of a Hello of any protocol version."""

    protocol: int
    worker: Worker


def _ignore(line: str) -> None:
    """Drop a log line."""


class Coordinator:
    """Binds its address at once; runs in `serve`, in a thread (`start`), or in a `with` block."""

    def __init__(
        self,
        setup: Setup,
        *,
        bind: str,
        keys: ServerKeys,
        log: Path | None = None,
        heartbeat_timeout: Seconds = 15.0,
        startup_timeout: Seconds = 60.0,
        log_info: Callable[[str], None] = _ignore,
        log_warning: Callable[[str], None] | None = None,
    ) -> None:
        """No message for `heartbeat_timeout`: the worker is dead.

        Workers start together once all have joined, or `startup_timeout` after the first. The
        serving thread calls `log_info` when a worker joins or leaves, `log_warning` (default:
        `log_info`) when one is lost or refused.
        """
        _check_times(heartbeat_timeout, startup_timeout)
        self.scheduler = setup.scheduler()
        # Bind before opening the log: another coordinator may have the address, and this log.
        self._socket = RouterSocket(bind, keys, num_peers=len(setup.workers))
        self.address = self._socket.address
        try:
            self._log: DecisionLog[Scheduler] | None = None
            if log is not None:
                job = keys.pair.public
                self._log = DecisionLog(log, setup, self.scheduler, job=job, in_background=True)
        except OSError:
            self._socket.close()
            raise
        self._sessions = SessionTable(setup.num_stages, setup.num_pipelines, setup.text)
        self._counters: Counter[str] = Counter()  # refused and unusual messages by kind
        self._last_message_at: Seconds = -math.inf  # without heartbeats
        self._heartbeat_timeout, self._startup_timeout = heartbeat_timeout, startup_timeout
        self._log_info, self._log_warning = log_info, log_warning or log_info
        self._reconnect_timeout = max(RECONNECT_TIMEOUT, heartbeat_timeout / 15)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromWorker).decode
        self._accepted = self._encode(Accepted(secrets.token_hex(8), heartbeat_timeout))
        self._heartbeat = self._encode(Heartbeat(Worker(0, 0)))
        self._start_at = math.inf  # when to start without missing workers; -inf once started
        self._heartbeat_check_at = math.inf  # when the next heartbeat timeout can occur
        self._num_since_due = 0  # messages since the check of connections was due
        self._suspects: dict[bytes, Seconds] = {}  # possibly closed connections, and when to check
        self._last_run_at = time.monotonic()
        self._reported_dead: deque[Worker] = deque()
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def counters(self) -> Counter[str]:
        """Count groups by how they ended, and refused, ignored or lost messages by kind."""
        total: Counter[str] = Counter()
        for counters in (self.scheduler.counters, self._socket.counters, self._counters):
            total.update(dict(counters))  # an atomic copy: another thread may be counting
        return total

    @property
    def present(self) -> list[Worker]:
        """The workers that are active now."""
        return [session.worker for session in self._sessions.active()]

    @property
    def is_over(self) -> bool:
        """Whether workers had started, and all of them are gone."""
        return self._has_started and self._sessions.num_active == 0

    def report_dead(self, worker: Worker) -> None:
        """Report that the process of a worker has ended. Any thread may call this."""
        self._reported_dead.append(worker)

    def serve(self, stop_event: threading.Event) -> None:
        """Serve until `stop_event` is set; notify all workers of a defect, then raise it."""
        why = "the coordinator has ended"
        try:
            while not stop_event.is_set():
                self._run_once()
        except BaseException as error:
            why = f"the coordinator has failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._end(why)

    def start(self) -> Self:
        """Serve in a thread of this process, until `close`."""
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()
        return self

    def wait(self, timeout: Seconds) -> bool:
        """Return whether the service ends within `timeout`; `close` raises its error."""
        # Not Thread.join: if Ctrl-C interrupts that, Python marks the thread as ended.
        return self._ended.wait(timeout)

    def close(self, timeout: Seconds = 0.0) -> None:
        """End once all workers have left, and raise the error of the service, if any.

        Ends earlier if for `timeout` the workers have sent nothing but heartbeats.
        """
        if self._thread is not None:
            start = time.monotonic()
            while self.present and not self.wait(0.02):
                if time.monotonic() - max(start, self._last_message_at) >= timeout:
                    break
            self._stop.set()
            assert self.wait(CLOSE_TIMEOUT), (
                f"the coordinator does not end within {CLOSE_TIMEOUT:g} s"
            )
            self._thread.join()
        elif not self._ended.is_set():
            self._end("the coordinator has ended")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self.serve(self._stop)
        except BaseException as error:  # raised by `close`
            self._error = error

    def _end(self, why: str) -> None:
        try:
            self._notify_shutdown(why)
            self._socket.close()
        finally:
            self._ended.set()

    @property
    def _has_started(self) -> bool:
        """Whether Welcome has been sent."""
        return self._start_at == -math.inf

    def _run_once(self) -> None:
        """Wait for messages or timers, up to `LONGEST_POLL`, and handle them."""
        due = min(self.scheduler.next_timer(), self._next_check_at())
        self._socket.wait(min(due - time.monotonic(), LONGEST_POLL))
        received = self._socket.receive(MAX_BATCH)
        for routing_id, frame in received:
            self._on_message(routing_id, frame, clock())
        now = clock()
        if self.scheduler.next_timer() <= now:
            self._step(Timer(now))
        while self._reported_dead:
            self._on_reported_dead(self._reported_dead.popleft(), now)
        if self._socket.closed_fds:
            self._suspect_closed(now)
        self._extend_after_stall(now - self._last_run_at)
        self._last_run_at = now
        if self._next_check_at() <= now:
            # Check once no queued message can show that a client is alive. The socket takes turns
            # between clients: one message for each of them is enough while others send without end.
            self._num_since_due += len(received)
            if len(received) < MAX_BATCH or self._num_since_due >= len(self._sessions.connections):
                self._num_since_due = 0
                self._check_connections(now)
        if self._log is not None:
            self._log.flush()

    def _notify_shutdown(self, why: str) -> None:
        """Send a fatal Refuse to all active workers, and close the log."""
        for session in self._sessions.active():
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
        connection = self._sessions.connections.get(routing_id)
        if connection is None or len(data) > MAX_MESSAGE_BYTES:
            # No answer: a client that has reached a new coordinator sends Hello next.
            self._counters["oversized" if connection else "unknown_worker"] += 1
            return
        connection.last_received_at = now
        session = connection.sessions.get(message.worker)
        if session is None or session.routing_id != routing_id:
            self._refuse_sender(routing_id, message.worker, session)
        elif isinstance(message, Heartbeat):
            self._send(routing_id, data)
        else:
            self._last_message_at = now
            msgspec.structs.force_setattr(message, "now", now)  # frozen, but not shared yet
            self._step(message)
            if isinstance(message, Leave) and message.incarnation == session.incarnation:
                self._sessions.end_session(session, "has left")
                self._log_info(f"{session.worker} has left, {self._sessions.num_active} are active")

    def _on_hello(self, routing_id: bytes, frame: zmq.Frame, hello: Hello, now: Seconds) -> None:
        refusal = self._sessions.refusal(routing_id, hello)
        if refusal is not None:
            kind, why = refusal
            self._counters[kind] += 1
            self._log_warning(f"refused: {why}")
            self._send(routing_id, self._encode(Refuse(hello.worker, hello.clock, why)))
            return
        is_reconnect = self._sessions.is_same_session(routing_id, hello)
        connection = self._sessions.open_session(routing_id, hello)
        connection.last_received_at, connection.fd = now, frame.get(zmq.SRCFD)
        self._heartbeat_check_at = min(self._heartbeat_check_at, now + self._heartbeat_timeout)
        self._send(routing_id, self._accepted)
        worker, num_active = hello.worker, self._sessions.num_active
        if is_reconnect:
            self._counters["reconnected"] += 1
            for data in self._sessions.by_worker[worker].recent:
                self._send(routing_id, data)
        else:
            self._log_info(f"{worker} has joined from {hello.node}, {num_active} are active")
        self._step(Join(worker, hello.node, hello.clock, hello.incarnation, now))
        if self._has_started:
            self._send(routing_id, self._encode(Welcome(num_active)))
        elif num_active == len(self._sessions.by_worker):
            self._send_welcome()
        else:
            self._start_at = min(self._start_at, now + self._startup_timeout)

    def _send_welcome(self) -> None:
        self._start_at = -math.inf
        num_active, num_sessions = self._sessions.num_active, len(self._sessions.by_worker)
        self._log_info(f"{num_active} of {num_sessions} workers have joined: they start")
        welcome = self._encode(Welcome(num_active))
        for routing_id in dict.fromkeys(session.routing_id for session in self._sessions.active()):
            self._send(routing_id, welcome)

    def _on_undecodable(self, routing_id: bytes, data: bytes) -> None:
        try:
            hello = msgspec.msgpack.decode(data, type=_AnyHello)
            is_other = hello.protocol != PROTOCOL
        except Exception:
            is_other = False
        self._counters["hello_protocol" if is_other else "malformed"] += 1
        if is_other:
            why = protocol_mismatch(hello.worker, hello.protocol)
            self._log_warning(f"refused: {why}")
            self._send(routing_id, self._encode(Refuse(hello.worker, FATAL, why)))

    def _refuse_sender(self, routing_id: bytes, worker: Worker, session: Session | None) -> None:
        """Refuse a message from a connection that does not own the worker's session."""
        if session is None:
            self._counters["unknown_worker"] += 1
            why = f"this connection has sent no Hello for {worker}"
        else:
            self._counters["late"] += 1
            why = f"{worker} {session.end_reason}"
            if session.is_active:
                why = f"{worker} has restarted, as incarnation {session.incarnation}"
        self._send(routing_id, self._encode(Refuse(worker, FATAL, why)))

    def _step(self, event: Event) -> None:
        commands: list[Command] = []
        try:
            commands = self.scheduler.step(event)
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
            session = self._sessions.by_worker[worker]
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
            for connection in self._sessions.connections.values():
                connection.last_received_at += gap
            self._counters["stalled"] += 1

    def _suspect_closed(self, now: Seconds) -> None:
        """Schedule a check of the connections whose file descriptors have closed.

        A descriptor may belong to another connection by now, so this alone proves nothing.
        """
        closed = set(self._socket.closed_fds)
        self._socket.closed_fds.clear()
        for connection in self._sessions.connections.values():
            if connection.fd in closed:
                self._suspects.setdefault(connection.routing_id, now + self._reconnect_timeout)

    def _next_check_at(self) -> Seconds:
        start_at = self._start_at if self._start_at > -math.inf else math.inf
        return min(start_at, self._heartbeat_check_at, *self._suspects.values())

    def _check_connections(self, now: Seconds) -> None:
        if -math.inf < self._start_at <= now:
            self._send_welcome()
        connections = self._sessions.connections
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
                for session in self._sessions.active()
            ]
            self._heartbeat_check_at = (
                min(last_received_at, default=math.inf) + self._heartbeat_timeout
            )

    def _on_reported_dead(self, worker: Worker, now: Seconds) -> None:
        session = self._sessions.by_worker[worker]
        connection = self._sessions.connections.get(session.routing_id)
        if session.is_active and connection is not None:
            self._mark_dead(connection, "is dead: its process has ended", now)

    def _mark_dead(self, connection: Connection, why: str, now: Seconds) -> None:
        for session in connection.sessions.values():
            if session.routing_id == connection.routing_id:
                self._sessions.end_session(session, why)
                self._log_warning(f"{session.worker} {why}; {self._sessions.num_active} are active")
                self._step(Dead(session.worker, session.incarnation, now))


def _check_times(heartbeat_timeout: Seconds, startup_timeout: Seconds) -> None:
    min_timeout = 2 * HEARTBEATS_PER_TIMEOUT * LONGEST_POLL
    if not (min_timeout <= heartbeat_timeout < math.inf and 0 <= startup_timeout < math.inf):
        raise PolicyError(
            f"heartbeat_timeout={heartbeat_timeout:g} startup_timeout={startup_timeout:g}",
            expected=f"a heartbeat timeout of at least {min_timeout:g} s, in which a worker sends "
            f"{HEARTBEATS_PER_TIMEOUT} heartbeats and the coordinator polls more often; "
            "and a startup timeout of at least 0 s",
            fix="omit them for 15 s and 60 s",
        )

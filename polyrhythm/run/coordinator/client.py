"""A worker's client of the coordinator: sends the worker's messages and receives its commands.

One thread owns the connection. Any thread may call `send`, which never blocks. The thread calls
`on_command` once for each command, in order, which should return quickly, and `on_failure` once,
with the error after which no command follows. Any thread may request sample positions and wait for
them.

After a reconnect the client sends Hello again, then all unanswered messages. Both sides send
heartbeats; a coordinator that sends nothing for longer than the heartbeat timeout is lost.
"""

import atexit
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

import msgspec

from polyrhythm.errors import LaunchError, PeerError, PolicyError
from polyrhythm.run.coordinator.keys import ClientKeys
from polyrhythm.run.coordinator.sessions import (
    FATAL,
    HEARTBEATS_PER_TIMEOUT,
    MAX_HELLO_BYTES,
    Accepted,
    FromWorker,
    Heartbeat,
    Hello,
    ToWorker,
    Welcome,
)
from polyrhythm.run.coordinator.sockets import ConnectionEvent, DealerSocket
from polyrhythm.sync.dispatch import Ranges, SamplerState
from polyrhythm.sync.protocol import (
    Abort,
    Acknowledge,
    Acquire,
    Acquired,
    Assign,
    AverageAll,
    Commit,
    Done,
    Leave,
    QueryProgress,
    Ready,
    Refuse,
    Request,
    SampleProgress,
    Skip,
)
from polyrhythm.types import Seconds, Worker

T = TypeVar("T")
_Key = tuple[type, int, int | None]  # of a request and its answer
# For a closed connection that is refused since: the coordinator's process has exited.
RECONNECT_TIMEOUT: Seconds = 2.0
CLOSE_TIMEOUT: Seconds = 1.0  # for the last messages, and again for the thread to end
_CHECK_INTERVAL: Seconds = 0.1  # of `join`
_MAX_BATCH = 256  # messages between two checks of timers
_PROBLEMS = {
    ConnectionEvent.CONNECTED: "it sends nothing",
    ConnectionEvent.HANDSHAKE_CLOSED: "it closes connections at once: are the keys of its job?",
    ConnectionEvent.PROTOCOL_ERROR: "another service answers at this address",
    ConnectionEvent.CLOSED: "its connection has closed: its process has exited",
}


@dataclass(slots=True)
class PendingMessages:
    """A worker's messages that are not answered yet, and the last commands it has received.

    A broken connection loses messages in both directions. So both sides repeat what is not
    confirmed and ignore duplicates. A worker repeats Ready or Done until it is answered. The
    coordinator repeats its last commands when a worker reconnects; a worker has one group at a
    time, in the order of group ids, so it can tell which commands are new.
    """

    worker: Worker
    clock: int  # of the last Ready or AverageAll; before that, of the Hello
    requested_clock: int = field(default=-1, init=False)  # the clock of the last Request
    waiting_since: Seconds = field(default=math.inf, init=False)  # inf: no answer is expected
    _ready: Ready | AverageAll | None = field(default=None, init=False)  # until its step has ended
    _done: Done | None = field(default=None, init=False)  # until its group has ended
    _assigned: int = field(default=-1, init=False)  # the last assigned group
    _ended: int = field(default=-1, init=False)  # the last committed or aborted group
    _skip: Skip | None = field(default=None, init=False)

    def on_send(self, message: FromWorker, now: Seconds) -> None:
        """Record a message that the worker sends for the first time."""
        if isinstance(message, Ready | AverageAll):
            self.clock, self._ready = message.clock, message  # a group may still be open
            self.waiting_since = now
        elif isinstance(message, Done) and message.gid > self._ended:
            self._done = message
            self.waiting_since = now
        elif isinstance(message, Request):
            self.requested_clock = message.clock

    def unanswered(self) -> list[FromWorker]:
        """Return the messages to repeat, in an order that is valid whichever were lost."""
        if self.waiting_since == math.inf:
            return []
        return [message for message in (self._ready, self._done) if message is not None]

    def on_receive(self, command: ToWorker, now: Seconds) -> bool:
        """Record a command; return False for a duplicate."""
        if isinstance(command, Assign):
            if command.gid <= self._assigned:
                return False
            self._assigned, self.waiting_since = command.gid, math.inf
        elif isinstance(command, Commit | Abort):
            if command.gid <= self._ended:
                return False
            self._ended, self._done = command.gid, None
            if isinstance(command, Commit):
                self._end_step(command.end_clocks[command.members.index(self.worker)])
            self.waiting_since = math.inf if self._ready is None else now
        elif isinstance(command, Skip):
            # An AverageAll may have the clock of the last step: both may be skipped.
            last = self._skip
            if last is not None and (command.clock < last.clock or command == last):
                return False
            self._skip = command
            self._end_step(command.clock)
            if self._ready is None:
                self.waiting_since = math.inf
        return True

    def _end_step(self, clock: int) -> None:
        if self._ready is not None and self._ready.clock == clock:
            self._ready = None


class SampleFuture(Generic[T]):
    """The answer to one request. Any thread may wait for it, any number of times."""

    def __init__(self, request: Acquire | QueryProgress, timeout: Seconds) -> None:
        self.request, self._timeout = request, timeout
        self.future: Future[T] = Future()

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self.future.done()

    def wait(self, timeout: Seconds | None = None) -> T:
        """Return the answer; raises PeerError after `timeout`, by default the GroupSync's."""
        start = time.monotonic()
        try:
            return self.future.result(self._timeout if timeout is None else timeout)
        except FutureTimeoutError:
            peer, cause = "other pipelines", "they have not acknowledged the last positions"
            if isinstance(self.request, QueryProgress):
                peer, cause = "the coordinator", "it is alive but has not answered"
            waited = time.monotonic() - start
            raise PeerError(
                peer, action="waiting for positions", waited=waited, cause=cause
            ) from None


class SampleRequests:
    """A worker's requests for sample positions: any thread submits, the client's thread resolves.

    Unanswered requests are repeated, since request or answer may be lost with a connection. The
    last acknowledgement is repeated as well: it covers all earlier ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[_Key, SampleFuture[Any]] = {}
        self._waiting_since: Seconds = math.inf
        self._last_ack: Acknowledge | None = None
        self._error: Exception | None = None

    def submit(self, request: Acquire | QueryProgress, timeout: Seconds) -> SampleFuture[Any]:
        """Add a request; an equal one that is still pending returns the same future."""
        key = _key(request)
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._pending:
                self._waiting_since = time.monotonic()
            return self._pending.setdefault(key, SampleFuture(request, timeout))

    def acknowledge(self, ack: Acknowledge) -> None:
        with self._lock:
            self._last_ack = ack

    def on_receive(self, command: Acquired | SampleProgress) -> None:
        """Resolve the pending request; ignore duplicates."""
        with self._lock:
            future = self._pending.pop(_key(command), None)
        if future is None:
            return
        value: Ranges | SamplerState
        value = command.ranges if isinstance(command, Acquired) else command.sampler_state
        if isinstance(command, Acquired) and command.why:
            pipeline, action = f"pipeline {command.worker.pipeline}", "requesting positions"
            error = PeerError(pipeline, action=action, waited=0.0, cause=command.why)
            future.future.set_exception(error)
        else:
            future.future.set_result(value)

    def fail(self, error: Exception) -> None:
        """Make all pending and later requests raise `error`."""
        with self._lock:
            self._error = self._error or error
            expected, self._pending = self._pending, {}
        for future in expected.values():
            future.future.set_exception(error)

    def waiting_since(self) -> Seconds:
        """Return when the oldest request was sent or last repeated; inf if none is pending."""
        with self._lock:
            return self._waiting_since if self._pending else math.inf

    def unanswered(self, now: Seconds) -> list[Acquire | QueryProgress]:
        """Return the requests to repeat now."""
        with self._lock:
            self._waiting_since = now
            return [future.request for future in self._pending.values()]

    def last_acks(self) -> list[Acknowledge]:
        """Return the acknowledgements to repeat after a reconnect."""
        with self._lock:
            return [] if self._last_ack is None else [self._last_ack]


def _key(message: Acquire | Acquired | QueryProgress | SampleProgress) -> _Key:
    if isinstance(message, Acquire | Acquired):
        return Acquire, message.number, message.until
    return QueryProgress, message.number, None


class CoordinatorClient:
    """The client of one worker. Connects at once; `join` waits until all workers have joined."""

    def __init__(
        self,
        address: str,
        keys: ClientKeys,
        hello: Hello,
        *,
        on_command: Callable[[ToWorker], None],
        on_failure: Callable[[Exception], None],
        heartbeat_timeout: Seconds = 15.0,
        served_by: str = "",
    ) -> None:
        """`served_by` names the host of the coordinator in error messages."""
        _check(hello, heartbeat_timeout)
        self._name = f"coordinator at {address}" + (f" (in {served_by})" if served_by else "")
        self.address, self._hello, self._heartbeat_timeout = address, hello, heartbeat_timeout
        self._on_command, self._on_failure = on_command, on_failure
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToWorker).decode
        self._outgoing: deque[FromWorker] = deque([hello])
        self._pending = PendingMessages(hello.worker, hello.clock)
        self._sample_requests, self._query_numbers = SampleRequests(), count(1)
        self.num_requested = 0  # chunks of samples
        self._coordinator: str | None = None  # its name, once it has accepted the Hello
        self._heartbeat_interval = heartbeat_timeout / HEARTBEATS_PER_TIMEOUT
        self._problem = "nothing answers at this address"
        self._is_connected, self._closed_at = False, math.inf
        self._last_sent_at = self._last_received_at = self._last_run_at = time.monotonic()
        self._changed = threading.Condition()
        self._welcome: Welcome | None = None
        self._error: Exception | None = None
        self._is_closing = False
        self._process = os.getpid()
        self._socket = DealerSocket(address, keys)
        self._thread = threading.Thread(target=self._run, name="coordinator-client", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)

    def send(self, message: FromWorker) -> None:
        """Queue a message; after a failure or `close` it is dropped."""
        self._outgoing.append(message)
        self._socket.wake()

    def acquire(
        self, number: int, count: int, until: int | None, timeout: Seconds
    ) -> SampleFuture[Ranges]:
        """Request a chunk of positions; `timeout` bounds `wait` of the returned future."""
        self.num_requested = max(self.num_requested, number + 1)
        request = Acquire(self._hello.worker, number, count, until, self._hello.incarnation)
        return self._submit(request, timeout)

    def query_progress(
        self, timeout: Seconds, batch: int | None = None
    ) -> SampleFuture[SamplerState]:
        """Ask which positions are used; `batch` is the size of the last batch to hand out."""
        worker, incarnation = self._hello.worker, self._hello.incarnation
        query = QueryProgress(worker, next(self._query_numbers), incarnation, batch=batch)
        return self._submit(query, timeout)

    def acknowledge(self, number: int) -> None:
        """Report that this worker's updates include all chunks up to `number`."""
        ack = Acknowledge(self._hello.worker, number, self._hello.incarnation)
        self._sample_requests.acknowledge(ack)
        self.send(ack)

    def join(self, timeout: Seconds, check: Callable[[], None] | None = None) -> Welcome:
        """Wait until all workers have joined; raises the error if this worker was refused.

        `check` is called repeatedly during the wait, and may raise an error to end it.
        """
        start = time.monotonic()
        while (remaining := start + timeout - time.monotonic()) > 0:
            with self._changed:
                is_over = self._changed.wait_for(
                    lambda: self._welcome or self._error or self._is_closing,
                    min(remaining, _CHECK_INTERVAL),
                )
            if self._error is not None:
                raise self._error
            if self._welcome is not None:
                return self._welcome
            if is_over:
                break
            if check is not None:
                check()
        cause = "other workers have not joined" if self._coordinator else self._problem
        raise PeerError(self._name, action="joining", waited=time.monotonic() - start, cause=cause)

    def close(self, leave: bool = True) -> None:
        """Close; with `leave` the worker has finished, without it the worker counts as lost."""
        with self._changed:
            was_closing, self._is_closing = self._is_closing, True
            self._changed.notify_all()
        if was_closing or os.getpid() != self._process:
            return
        atexit.unregister(self._close_at_exit)
        self._sample_requests.fail(
            PolicyError(
                f"{self._hello.worker} closes its client while it waits for positions",
                expected="close() after all requested positions have arrived",
                fix="wait() for the futures of acquire() before close()",
            )
        )
        if leave:
            self._outgoing.append(Leave(self._hello.worker, self._hello.incarnation))
        self._socket.wake()
        if threading.current_thread() is not self._thread:  # `on_command` may call close()
            self._thread.join(2 * CLOSE_TIMEOUT)

    def _close_at_exit(self) -> None:
        # A program that exits without close() has not finished its training.
        self.close(leave=False)

    def _submit(self, request: Acquire | QueryProgress, timeout: Seconds) -> SampleFuture[Any]:
        future = self._sample_requests.submit(request, timeout)
        self.send(request)
        return future

    def _run(self) -> None:
        try:
            while self._error is None and not self._is_closing:
                self._run_once()
            if self._error is None:
                self._send_queued()
        except Exception as error:  # a defect, possibly of `on_command`: it would be lost here
            self._fail(error)
        finally:
            self._socket.close(CLOSE_TIMEOUT if self._is_connected and self._error is None else 0.0)

    def _run_once(self) -> None:
        due = min(
            self._last_sent_at + self._heartbeat_interval,
            self._resend_at(),
            self._last_received_at + self._heartbeat_timeout,
        )
        self._socket.wait(min(due - time.monotonic(), self._heartbeat_interval))
        self._receive()
        self._handle_connection_events()
        self._send_queued()
        now = time.monotonic()
        gap, self._last_run_at = now - self._last_run_at, now
        if gap > 2 * self._heartbeat_interval:
            # This process was stopped or starved, and received nothing for that reason: wait again.
            self._last_received_at, self._last_sent_at = now, now - self._heartbeat_interval
        elif now - self._last_received_at >= self._heartbeat_timeout:
            self._fail(self._lost_error(now - self._last_received_at, self._problem))
        elif self._resend_at() <= now:
            self._resend(now)
        elif now - self._last_sent_at >= self._heartbeat_interval:
            self._send_now(Heartbeat(self._hello.worker, self._hello.incarnation), now)

    def _receive(self) -> None:
        for _ in range(_MAX_BATCH):
            if self._error is not None or (data := self._socket.receive()) is None:
                return
            self._last_received_at = time.monotonic()
            try:
                message = self._decode(data)
            except msgspec.MsgspecError as error:
                self._fail(self._lost_error(0.0, f"it sent a message of another version: {error}"))
            else:
                self._handle(message)

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, Accepted):
            if self._coordinator not in (None, message.coordinator):
                self._fail(
                    self._lost_error(0.0, "it was restarted, and has lost the state of the job")
                )
            self._coordinator = message.coordinator
            self._heartbeat_interval = (
                min(self._heartbeat_timeout, message.heartbeat_timeout) / HEARTBEATS_PER_TIMEOUT
            )
        elif isinstance(message, Welcome):
            with self._changed:
                self._welcome = self._welcome or message
                self._changed.notify_all()
        elif isinstance(message, Refuse) and self._is_fatal(message):
            self._fail(self._refusal_error(message))
        elif isinstance(message, Acquired | SampleProgress):
            self._sample_requests.on_receive(message)
        elif self._pending.on_receive(message, self._last_received_at):
            self._on_command(message)

    def _is_fatal(self, refuse: Refuse) -> bool:
        """Whether the refusal is about the latest message; older ones have been corrected."""
        last = (FATAL, self._pending.clock, self._pending.requested_clock)
        return self._coordinator is None or refuse.clock in last

    def _handle_connection_events(self) -> None:
        """Handle connects, disconnects and refused keys."""
        now = time.monotonic()
        for event in self._socket.connection_events():
            if event is ConnectionEvent.CLOSED and not self._is_connected:
                continue  # it was never open: an earlier event has the reason
            self._problem = _PROBLEMS.get(event, self._problem)
            if event is ConnectionEvent.CLOSED:
                self._closed_at = min(self._closed_at, now)
            elif (
                event is ConnectionEvent.CONNECT_RETRIED
                and now - self._closed_at >= RECONNECT_TIMEOUT
            ):
                self._fail(self._lost_error(now - self._closed_at, self._problem))
            elif event is ConnectionEvent.CONNECTED:
                self._closed_at = math.inf
                if self._is_connected:  # a reconnect
                    self._send_now(
                        msgspec.structs.replace(self._hello, clock=self._pending.clock), now
                    )
                    for ack in self._sample_requests.last_acks():
                        self._send_now(ack, now)
                    self._resend(now)
                self._is_connected = True
            elif event is ConnectionEvent.KEY_REFUSED:
                self._fail(
                    LaunchError(
                        f"coordinator {self.address} refuses the key of {self._hello.worker}",
                        expected="the keys of the coordinator's job",
                        fix="copy the key file from the coordinator's machine",
                    )
                )

    def _send_queued(self) -> None:
        while self._outgoing:
            message, now = self._outgoing.popleft(), time.monotonic()
            self._pending.on_send(message, now)
            self._send_now(message, now)

    def _send_now(self, message: FromWorker, now: Seconds) -> None:
        self._socket.send(self._encode(message))
        self._last_sent_at = now

    def _resend_at(self) -> Seconds:
        return (
            min(self._pending.waiting_since, self._sample_requests.waiting_since())
            + self._heartbeat_timeout / 3
        )

    def _resend(self, now: Seconds) -> None:
        for message in self._pending.unanswered():
            self._send_now(message, now)
            self._pending.waiting_since = now
        for request in self._sample_requests.unanswered(now):
            self._send_now(request, now)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            self._changed.notify_all()
        self._sample_requests.fail(error)
        self._on_failure(error)

    def _lost_error(self, waited: Seconds, cause: str) -> PeerError:
        is_waiting = self._sample_requests.waiting_since() < math.inf
        action = "waiting for positions" if is_waiting else "training"
        action = "waiting for a group" if self._pending.unanswered() else action
        action = action if self._welcome else "joining"
        return PeerError(self._name, action=action, waited=waited, cause=cause)

    def _refusal_error(self, refuse: Refuse) -> Exception:
        if self._coordinator is not None and refuse.clock == FATAL:
            return self._lost_error(0.0, f"it refuses this worker: {refuse.why}")
        wrong = f"the coordinator at {self.address} refuses {self._hello.worker}: {refuse.why}"
        if self._coordinator is None:
            return LaunchError(
                wrong,
                expected="the same job and the same configuration in all workers",
                fix="change what differs, and start this worker again",
            )
        return PolicyError(
            wrong,
            expected="steps reported in order, once each",
            fix="stop the job, and start it again from its last checkpoint",
        )


def _check(hello: Hello, heartbeat_timeout: Seconds) -> None:
    """Refuse a Hello that the coordinator could not decode, and so would not answer."""
    if not 0 < heartbeat_timeout < math.inf:
        raise LaunchError(
            f"heartbeat_timeout={heartbeat_timeout:g}",
            expected="more than 0 seconds",
            fix="omit it for 15 s",
        )
    data = msgspec.msgpack.encode(hello)
    try:
        msgspec.msgpack.decode(data, type=Hello)
        problem = f"{len(data):,} bytes" if len(data) > MAX_HELLO_BYTES else None
    except msgspec.ValidationError as error:
        problem = str(error)
    if problem is not None:
        raise LaunchError(
            f"the Hello of {hello.worker} is invalid: {problem}",
            expected=f"names of up to 255 characters, and {MAX_HELLO_BYTES:,} bytes in all",
            fix="shorten the names of its tensors or of its machine",
        )

"""A worker's side of the coordinator: says what the worker says, and hears what it is told.

One thread owns the connection. `send` may be called from any thread and never is_waiting; `on_command` is
called by that thread for each command, in order and once, and should not take long; `on_failure` is
called once, when nothing more will come, with the reason. Positions are asked for, and waited for,
by whoever needs them (`deals.py`).

When the connection broke and is there again, the worker says Hello again, and whatever was not
answered yet. Signs of life go both ways; a coordinator that is silent for too long is lost.
"""

import atexit
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from polyrhythm.errors import LaunchError, PeerError, PolicyError
from polyrhythm.run.coordinator.dealer_socket import ConnectionEvent, DealerSocket
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.pending_messages import PendingMessages
from polyrhythm.run.coordinator.sample_requests import SampleFuture, SampleRequests
from polyrhythm.run.coordinator.wire import (
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
from polyrhythm.sync.dispatch import Ranges, SamplerState
from polyrhythm.sync.protocol import (
    Acknowledge,
    Acquire,
    Acquired,
    Leave,
    QueryProgress,
    Refuse,
    SampleProgress,
)
from polyrhythm.types import Seconds

# A connection that has closed, and is refused since: the process is gone, or has given us up.
RECONNECT_TIMEOUT: Seconds = 2.0
CLOSE_TIMEOUT: Seconds = 1.0  # for the last words, and as long again for the thread to end
_PROBLEMS = {
    ConnectionEvent.CONNECTED: "nothing was heard from it",
    ConnectionEvent.HANDSHAKE_CLOSED: "it ends connections at once: are the keys those of its job?",
    ConnectionEvent.PROTOCOL_ERROR: "something else answers there",
    ConnectionEvent.CLOSED: "its connection has closed: its process has ended",
}


class CoordinatorClient:
    """Of one worker. Connects at once; `join` waits until all workers are there."""

    def __init__(
        self,
        address: str,
        keys: JobKeys,
        hello: Hello,
        *,
        on_command: Callable[[ToWorker], None],
        on_failure: Callable[[Exception], None],
        heartbeat_timeout: Seconds = 15.0,
        served_by: str = "",
    ) -> None:
        """`served_by` says where the coordinator is, for messages."""
        _check(hello, heartbeat_timeout)
        self._name = f"coordinator at {address}" + (f" (in {served_by})" if served_by else "")
        self.address, self._hello, self._heartbeat_timeout = address, hello, heartbeat_timeout
        self._on_command, self._on_failure = on_command, on_failure
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToWorker).decode
        self._outgoing: deque[FromWorker] = deque([hello])
        self._pending, self._sample_requests = (
            PendingMessages(hello.worker, hello.clock),
            SampleRequests(),
        )
        self._coordinator: str | None = None  # its name, since it has accepted us
        self._heartbeat_interval = heartbeat_timeout / HEARTBEATS_PER_TIMEOUT
        self._problem = "nobody answers there"
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
        """On its way as soon as possible; after a failure, or `close`, nobody hears it."""
        self._outgoing.append(message)
        self._socket.wake()

    def acquire(
        self, number: int, count: int, until: int | None, timeout: Seconds
    ) -> SampleFuture[Ranges]:
        """Ask for a chunk of positions; `timeout` is for whoever waits for them."""
        request = Acquire(self._hello.worker, number, count, until, self._hello.incarnation)
        return self._submit(request, timeout)

    def query_progress(
        self, number: int, timeout: Seconds, batch: int | None = None
    ) -> SampleFuture[SamplerState]:
        """Ask which positions were used, each time with another number; `batch`: the last one."""
        worker, incarnation = self._hello.worker, self._hello.incarnation
        return self._submit(QueryProgress(worker, number, incarnation, batch=batch), timeout)

    def acknowledge(self, number: int) -> None:
        """Say that this worker has made its updates with all chunks up to that one."""
        ack = Acknowledge(self._hello.worker, number, self._hello.incarnation)
        self._sample_requests.acknowledge(ack)
        self.send(ack)

    @property
    def has_joined(self) -> bool:
        """Whether all workers are there; raises why this one cannot take part."""
        if self._error is not None:
            raise self._error
        return self._welcome is not None

    def missing(self) -> tuple[str, str]:
        """Who keeps us waiting before all have joined, and why."""
        is_known = self._coordinator is not None
        return self._name, "others have yet to join" if is_known else self._problem

    def join(self, timeout: Seconds) -> Welcome:
        """Wait until all workers are there; raises why this one cannot take part."""
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: self._welcome or self._error or self._is_closing, timeout
            )
            if self.has_joined:
                assert self._welcome is not None, "it has joined"
                return self._welcome
        who, cause = self.missing()
        raise PeerError(who, action="joining", waited=time.monotonic() - began, cause=cause)

    def close(self, leave: bool = True) -> None:
        """End; with `leave` the worker has finished, without it is lost."""
        with self._changed:
            was_closing, self._is_closing = self._is_closing, True
            self._changed.notify_all()
        if was_closing or os.getpid() != self._process:
            return
        atexit.unregister(self._close_at_exit)
        self._sample_requests.fail(
            PolicyError(
                f"{self._hello.worker} waits for positions that it will not hear of",
                expected="close() when nobody waits for positions any more",
                fix="wait for them, or drop them, first",
            )
        )
        if leave:
            self._outgoing.append(Leave(self._hello.worker, self._hello.incarnation))
        self._socket.wake()
        if (
            threading.current_thread() is not self._thread
        ):  # as it is in `on_command` and `on_failure`
            self._thread.join(2 * CLOSE_TIMEOUT)

    def _close_at_exit(self) -> None:
        # A program that ends without closing has not finished, as far as anybody knows.
        self.close(leave=False)

    def _submit(self, request: Acquire | QueryProgress, timeout: Seconds) -> SampleFuture[Any]:
        answer = self._sample_requests.submit(request, timeout)
        self.send(request)
        return answer

    def _run(self) -> None:
        try:
            while self._error is None and not self._is_closing:
                self._run_once()
            if self._error is None:
                self._send_queued()
        except Exception as error:  # a defect, perhaps of `on_command`: nobody would know otherwise
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
        self._receive_all()
        self._handle_connection_events()
        self._send_queued()
        now = time.monotonic()
        gap, self._last_run_at = now - self._last_run_at, now
        if gap > 2 * self._heartbeat_interval:
            # This process was stopped, or starved, and heard nothing for that reason: ask again.
            self._last_received_at, self._last_sent_at = now, now - self._heartbeat_interval
        elif now - self._last_received_at >= self._heartbeat_timeout:
            self._fail(self._lost_error(now - self._last_received_at, self._problem))
        elif self._resend_at() <= now:
            self._resend(now)
        elif now - self._last_sent_at >= self._heartbeat_interval:
            self._send_now(Heartbeat(self._hello.worker, self._hello.incarnation), now)

    def _receive_all(self) -> None:
        while self._error is None and (data := self._socket.receive()) is not None:
            self._last_received_at = time.monotonic()
            try:
                message = self._decode(data)
            except msgspec.MsgspecError as error:
                self._fail(
                    self._lost_error(0.0, f"it said what this version does not know: {error}")
                )
            else:
                self._handle(message)

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, Accepted):
            if self._coordinator not in (None, message.coordinator):
                self._fail(
                    self._lost_error(0.0, "it was started anew, and knows nothing of before")
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
        """Whether it is about what was said last; not if that was put right meanwhile."""
        last = (FATAL, self._pending.clock, self._pending.requested_clock)
        return self._coordinator is None or refuse.clock in last

    def _handle_connection_events(self) -> None:
        """What has become of the connection."""
        now = time.monotonic()
        for event in self._socket.connection_events():
            if event is ConnectionEvent.CLOSED and not self._is_connected:
                continue  # never was: the reason has been told
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
                if self._is_connected:  # again
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
                        f"coordinator {self.address} does not know the key of {self._hello.worker}",
                        expected="the keys of its own job",
                        fix="copy the key file from where the coordinator runs",
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
            return self._lost_error(0.0, f"it says: {refuse.why}")
        wrong = f"the coordinator at {self.address} refuses {self._hello.worker}: {refuse.why}"
        if self._coordinator is None:
            return LaunchError(
                wrong,
                expected="the same job and the same configuration everywhere",
                fix="change what differs, and start this worker again",
            )
        return PolicyError(
            wrong,
            expected="steps that are told in order, once each",
            fix="start this worker anew; it then joins in a new life",
        )


def _check(hello: Hello, heartbeat_timeout: Seconds) -> None:
    """What the coordinator would not read, and so could not answer."""
    if not 0 < heartbeat_timeout < math.inf:
        raise LaunchError(
            f"silence={heartbeat_timeout:g}",
            expected="more than 0 seconds",
            fix="leave it out for 15 s",
        )
    data = msgspec.msgpack.encode(hello)
    try:
        msgspec.msgpack.decode(data, type=Hello)
        problem = f"{len(data):,} bytes" if len(data) > MAX_HELLO_BYTES else None
    except msgspec.ValidationError as error:
        problem = str(error)
    if problem is not None:
        raise LaunchError(
            f"{hello.worker} cannot introduce itself: {problem}",
            expected=f"names of up to 255 characters, and {MAX_HELLO_BYTES:,} bytes for all tensors",
            fix="shorten the names of its tensors, or of its machine",
        )

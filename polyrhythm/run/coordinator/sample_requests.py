"""A worker's requests for sample positions, until the coordinator answers them.

A request never blocks; the caller waits for the answer, up to a timeout. Unanswered requests are
repeated, since request or answer may be lost with a connection. The last acknowledgement is
repeated as well: it covers all earlier ones.
"""

import math
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Generic, TypeVar

from polyrhythm.errors import PeerError
from polyrhythm.sync.dispatch import Ranges, SamplerState
from polyrhythm.sync.protocol import Acknowledge, Acquire, Acquired, QueryProgress, SampleProgress
from polyrhythm.types import Seconds

T = TypeVar("T")
_Key = tuple[type, int, int | None]  # of a request and its answer


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
    """The requests of one worker: any thread submits, the connection's thread resolves."""

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

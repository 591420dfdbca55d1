"""Positions that a worker has asked for, until the coordinator deals them.

To ask never waits; whoever needs the answer waits for it, until a deadline. What was not answered
is asked again, as the question or the answer may be lost with a connection. The last word about
what was used is said again, too: it speaks for all before it.
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
_Key = tuple[type, int, int | None]  # of a question and its answer


class SampleFuture(Generic[T]):
    """To one question. Any thread may wait for it, and as often as it likes."""

    def __init__(self, request: Acquire | QueryProgress, timeout: Seconds) -> None:
        self.request, self._timeout = request, timeout
        self.future: Future[T] = Future()

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self.future.done()

    def wait(self, timeout: Seconds | None = None) -> T:
        """Raises what went wrong; PeerError after `timeout`, by default that of its GroupSync."""
        began = time.monotonic()
        try:
            return self.future.result(self._timeout if timeout is None else timeout)
        except FutureTimeoutError:
            who, cause = "other pipelines", "they have the last ones, and have not used them"
            if isinstance(self.request, QueryProgress):
                who, cause = "the coordinator", "it is there, but has not answered"
            waited = time.monotonic() - began
            raise PeerError(
                who, action="waiting for positions", waited=waited, cause=cause
            ) from None


class SampleRequests:
    """Of one worker: any thread asks, the thread that owns the connection answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[_Key, SampleFuture[Any]] = {}
        self._since: Seconds = math.inf
        self._last_ack: Acknowledge | None = None
        self._error: Exception | None = None

    def submit(self, request: Acquire | QueryProgress, timeout: Seconds) -> SampleFuture[Any]:
        """The same answer again, if it has not come yet."""
        key = _key(request)
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._pending:
                self._since = time.monotonic()
            return self._pending.setdefault(key, SampleFuture(request, timeout))

    def acknowledge(self, ack: Acknowledge) -> None:
        with self._lock:
            self._last_ack = ack

    def on_receive(self, command: Acquired | SampleProgress) -> None:
        """An answer; once more is no news."""
        with self._lock:
            answer = self._pending.pop(_key(command), None)
        if answer is None:
            return
        found: Ranges | SamplerState
        found = command.ranges if isinstance(command, Acquired) else command.sampler_state
        if isinstance(command, Acquired) and command.why:
            pipeline, action = f"pipeline {command.worker.pipeline}", "asking for positions"
            error = PeerError(pipeline, action=action, waited=0.0, cause=command.why)
            answer.future.set_exception(error)
        else:
            answer.future.set_result(found)

    def fail(self, error: Exception) -> None:
        """There will be no more answers."""
        with self._lock:
            self._error = self._error or error
            expected, self._pending = self._pending, {}
        for answer in expected.values():
            answer.future.set_exception(error)

    def waiting_since(self) -> Seconds:
        """Since when an answer is expected, or was asked for again; inf if none is."""
        with self._lock:
            return self._since if self._pending else math.inf

    def unanswered(self, now: Seconds) -> list[Acquire | QueryProgress]:
        """What to ask again, now."""
        with self._lock:
            self._since = now
            return [answer.request for answer in self._pending.values()]

    def last_acks(self) -> list[Acknowledge]:
        """What to say again when the connection broke, and is there again."""
        with self._lock:
            return [] if self._last_ack is None else [self._last_ack]


def _key(message: Acquire | Acquired | QueryProgress | SampleProgress) -> _Key:
    if isinstance(message, Acquire | Acquired):
        return Acquire, message.number, message.until
    return QueryProgress, message.number, None

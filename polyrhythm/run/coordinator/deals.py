"""Positions that a worker has asked for, until the coordinator deals them.

To ask never waits; whoever needs the answer waits for it, until a deadline. What was not answered
is asked again, as the question or the answer may be lost with a connection. The last word about
what was used is said again, too: it speaks for all before it.
"""

import math
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from typing import Any, Generic, TypeVar

from polyrhythm.errors import PeerError
from polyrhythm.sync.dispenser import Ranges, Supply
from polyrhythm.sync.messages import Dealt, Take, Tallied, Tally, Used
from polyrhythm.types import Seconds

T = TypeVar("T")
_Key = tuple[type, int, int | None]  # of a question and its answer


class Answer(Generic[T]):
    """To one question. Any thread may wait for it, and as often as it likes."""

    def __init__(self, question: Take | Tally, timeout: Seconds) -> None:
        self.question, self._timeout = question, timeout
        self.future: Future[T] = Future()

    @property
    def is_here(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self.future.done()

    def wait(self, timeout: Seconds | None = None) -> T:
        """Raises what went wrong; PeerError after `timeout`, by default that of its GroupSync."""
        began = time.monotonic()
        try:
            return self.future.result(self._timeout if timeout is None else timeout)
        except TookTooLong:
            who, cause = "other pipelines", "they have the last ones, and have not used them"
            if isinstance(self.question, Tally):
                who, cause = "the coordinator", "it is there, but has not answered"
            waited = time.monotonic() - began
            raise PeerError(
                who, action="waiting for positions", waited=waited, cause=cause
            ) from None


class Deals:
    """Of one worker: any thread asks, the thread that owns the connection answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[_Key, Answer[Any]] = {}
        self._since: Seconds = math.inf
        self._used: Used | None = None
        self._error: Exception | None = None

    def ask(self, question: Take | Tally, timeout: Seconds) -> Answer[Any]:
        """The same answer again, if it has not come yet."""
        key = _key(question)
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._expected:
                self._since = time.monotonic()
            return self._expected.setdefault(key, Answer(question, timeout))

    def use(self, used: Used) -> None:
        with self._lock:
            self._used = used

    def hear(self, command: Dealt | Tallied) -> None:
        """An answer; once more is no news."""
        with self._lock:
            answer = self._expected.pop(_key(command), None)
        if answer is None:
            return
        found: Ranges | Supply
        found = command.ranges if isinstance(command, Dealt) else command.supply
        if isinstance(command, Dealt) and command.why:
            pipeline, action = f"pipeline {command.worker.pipeline}", "asking for positions"
            error = PeerError(pipeline, action=action, waited=0.0, cause=command.why)
            answer.future.set_exception(error)
        else:
            answer.future.set_result(found)

    def fail(self, error: Exception) -> None:
        """There will be no more answers."""
        with self._lock:
            self._error = self._error or error
            expected, self._expected = self._expected, {}
        for answer in expected.values():
            answer.future.set_exception(error)

    def waits_since(self) -> Seconds:
        """Since when an answer is expected, or was asked for again; inf if none is."""
        with self._lock:
            return self._since if self._expected else math.inf

    def unanswered(self, now: Seconds) -> list[Take | Tally]:
        """What to ask again, now."""
        with self._lock:
            self._since = now
            return [answer.question for answer in self._expected.values()]

    def last_used(self) -> list[Used]:
        """What to say again when the connection broke, and is there again."""
        with self._lock:
            return [] if self._used is None else [self._used]


def _key(message: Take | Dealt | Tally | Tallied) -> _Key:
    if isinstance(message, Take | Dealt):
        return Take, message.number, message.until
    return Tally, message.number, None

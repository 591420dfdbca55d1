"""A worker's side of the coordinator: says what the worker says, and hears what it is told.

One thread owns the connection. `send` may be called from any thread and never waits; `hear` is
called by that thread for each command, in order and once, and should not take long; `fail` is
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
from polyrhythm.run.coordinator.deals import Answer, Deals
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.line import Line, News
from polyrhythm.run.coordinator.talk import Talk
from polyrhythm.run.coordinator.wire import (
    BEATS,
    MOST_BYTES,
    OUT,
    Accepted,
    Beat,
    FromWorker,
    Hello,
    ToWorker,
    Welcome,
)
from polyrhythm.sync.dispenser import Ranges, Supply
from polyrhythm.sync.messages import Dealt, Leave, Refuse, Take, Tallied, Tally, Used
from polyrhythm.types import Seconds

# A connection that has closed, and is refused since: the process is gone, or has given us up.
GONE: Seconds = 2.0
CLOSING: Seconds = 1.0  # for the last words, and as long again for the thread to end
_TROUBLE = {
    News.CONNECTED: "nothing was heard from it",
    News.CUT_OFF: "it ends connections at once: are the keys those of its job?",
    News.NOT_UNDERSTOOD: "something else answers there",
    News.CLOSED: "its connection has closed: its process has ended",
}


class CoordinatorClient:
    """Of one worker. Connects at once; `join` waits until all workers are there."""

    def __init__(
        self,
        address: str,
        keys: JobKeys,
        hello: Hello,
        *,
        hear: Callable[[ToWorker], None],
        fail: Callable[[Exception], None],
        silence: Seconds = 15.0,
        served_by: str = "",
    ) -> None:
        """`served_by` says where the coordinator is, for messages."""
        _check(hello, silence)
        self._name = f"coordinator at {address}" + (f" (in {served_by})" if served_by else "")
        self.address, self._hello, self._silence = address, hello, silence
        self._tell, self._tell_failure = hear, fail
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToWorker).decode
        self._outgoing: deque[FromWorker] = deque([hello])
        self._talk, self._deals = Talk(hello.worker, hello.clock), Deals()
        self._coordinator: str | None = None  # its name, since it has accepted us
        self._beat_after = silence / BEATS
        self._trouble = "nobody answers there"
        self._is_connected, self._closed = False, math.inf
        self._spoke = self._heard = self._last_turn = time.monotonic()
        self._changed = threading.Condition()
        self._welcome: Welcome | None = None
        self._error: Exception | None = None
        self._is_closing = False
        self._process = os.getpid()
        self._line = Line(address, keys)
        self._thread = threading.Thread(target=self._run, name="coordinator-client", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)

    def send(self, message: FromWorker) -> None:
        """On its way as soon as possible; after a failure, or `close`, nobody hears it."""
        self._outgoing.append(message)
        self._line.ring()

    def take(self, number: int, count: int, until: int | None, timeout: Seconds) -> Answer[Ranges]:
        """Ask for a chunk of positions; `timeout` is for whoever waits for them."""
        take = Take(self._hello.worker, number, count, until, self._hello.incarnation)
        return self._ask(take, timeout)

    def tally(self, number: int, timeout: Seconds, batch: int | None = None) -> Answer[Supply]:
        """Ask which positions were used, each time with another number; `batch`: the last one."""
        worker, life = self._hello.worker, self._hello.incarnation
        return self._ask(Tally(worker, number, life, batch=batch), timeout)

    def use(self, number: int) -> None:
        """Say that this worker has made its updates with all chunks up to that one."""
        used = Used(self._hello.worker, number, self._hello.incarnation)
        self._deals.use(used)
        self.send(used)

    @property
    def has_joined(self) -> bool:
        """Whether all workers are there; raises why this one cannot take part."""
        if self._error is not None:
            raise self._error
        return self._welcome is not None

    def missing(self) -> tuple[str, str]:
        """Who keeps us waiting before all have joined, and why."""
        is_known = self._coordinator is not None
        return self._name, "others have yet to join" if is_known else self._trouble

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
        self._deals.fail(
            PolicyError(
                f"{self._hello.worker} waits for positions that it will not hear of",
                expected="close() when nobody waits for positions any more",
                fix="wait for them, or drop them, first",
            )
        )
        if leave:
            self._outgoing.append(Leave(self._hello.worker, self._hello.incarnation))
        self._line.ring()
        if threading.current_thread() is not self._thread:  # as it is in `hear` and `fail`
            self._thread.join(2 * CLOSING)

    def _close_at_exit(self) -> None:
        # A program that ends without closing has not finished, as far as anybody knows.
        self.close(leave=False)

    def _ask(self, question: Take | Tally, timeout: Seconds) -> Answer[Any]:
        answer = self._deals.ask(question, timeout)
        self.send(question)
        return answer

    def _run(self) -> None:
        try:
            while self._error is None and not self._is_closing:
                self._turn()
            if self._error is None:
                self._speak()
        except Exception as error:  # a defect, perhaps of `hear`: nobody would know otherwise
            self._fail(error)
        finally:
            self._line.close(CLOSING if self._is_connected and self._error is None else 0.0)

    def _turn(self) -> None:
        due = min(self._spoke + self._beat_after, self._repeat_at(), self._heard + self._silence)
        self._line.wait(min(due - time.monotonic(), self._beat_after))
        self._listen()
        self._look()
        self._speak()
        now = time.monotonic()
        gap, self._last_turn = now - self._last_turn, now
        if gap > 2 * self._beat_after:
            # This process was stopped, or starved, and heard nothing for that reason: ask again.
            self._heard, self._spoke = now, now - self._beat_after
        elif now - self._heard >= self._silence:
            self._fail(self._lost(now - self._heard, self._trouble))
        elif self._repeat_at() <= now:
            self._say_again(now)
        elif now - self._spoke >= self._beat_after:
            self._put(Beat(self._hello.worker, self._hello.incarnation), now)

    def _listen(self) -> None:
        while self._error is None and (data := self._line.receive()) is not None:
            self._heard = time.monotonic()
            try:
                message = self._decode(data)
            except msgspec.MsgspecError as error:
                self._fail(self._lost(0.0, f"it said what this version does not know: {error}"))
            else:
                self._understand(message)

    def _understand(self, message: ToWorker) -> None:
        if isinstance(message, Beat):
            return
        if isinstance(message, Accepted):
            if self._coordinator not in (None, message.coordinator):
                self._fail(self._lost(0.0, "it was started anew, and knows nothing of before"))
            self._coordinator = message.coordinator
            self._beat_after = min(self._silence, message.silence) / BEATS
        elif isinstance(message, Welcome):
            with self._changed:
                self._welcome = self._welcome or message
                self._changed.notify_all()
        elif isinstance(message, Refuse) and self._ends(message):
            self._fail(self._refused(message))
        elif isinstance(message, Dealt | Tallied):
            self._deals.hear(message)
        elif self._talk.hear(message, self._heard):
            self._tell(message)

    def _ends(self, refuse: Refuse) -> bool:
        """Whether it is about what was said last; not if that was put right meanwhile."""
        last = (OUT, self._talk.clock, self._talk.asked)
        return self._coordinator is None or refuse.clock in last

    def _look(self) -> None:
        """What has become of the connection."""
        now = time.monotonic()
        for news in self._line.news():
            if news is News.CLOSED and not self._is_connected:
                continue  # never was: the reason has been told
            self._trouble = _TROUBLE.get(news, self._trouble)
            if news is News.CLOSED:
                self._closed = min(self._closed, now)
            elif news is News.NOT_THERE and now - self._closed >= GONE:
                self._fail(self._lost(now - self._closed, self._trouble))
            elif news is News.CONNECTED:
                self._closed = math.inf
                if self._is_connected:  # again
                    self._put(msgspec.structs.replace(self._hello, clock=self._talk.clock), now)
                    for used in self._deals.last_used():
                        self._put(used, now)
                    self._say_again(now)
                self._is_connected = True
            elif news is News.KEY_REFUSED:
                self._fail(
                    LaunchError(
                        f"coordinator {self.address} does not know the key of {self._hello.worker}",
                        expected="the keys of its own job",
                        fix="copy the key file from where the coordinator runs",
                    )
                )

    def _speak(self) -> None:
        while self._outgoing:
            message, now = self._outgoing.popleft(), time.monotonic()
            self._talk.say(message, now)
            self._put(message, now)

    def _put(self, message: FromWorker, now: Seconds) -> None:
        self._line.send(self._encode(message))
        self._spoke = now

    def _repeat_at(self) -> Seconds:
        return min(self._talk.waits_since, self._deals.waits_since()) + self._silence / 3

    def _say_again(self, now: Seconds) -> None:
        for message in self._talk.unanswered():
            self._put(message, now)
            self._talk.waits_since = now
        for question in self._deals.unanswered(now):
            self._put(question, now)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            self._changed.notify_all()
        self._deals.fail(error)
        self._tell_failure(error)

    def _lost(self, waited: Seconds, cause: str) -> PeerError:
        waits = self._deals.waits_since() < math.inf
        action = "waiting for positions" if waits else "training"
        action = "waiting for a group" if self._talk.unanswered() else action
        action = action if self._welcome else "joining"
        return PeerError(self._name, action=action, waited=waited, cause=cause)

    def _refused(self, refuse: Refuse) -> Exception:
        if self._coordinator is not None and refuse.clock == OUT:
            return self._lost(0.0, f"it says: {refuse.why}")
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


def _check(hello: Hello, silence: Seconds) -> None:
    """What the coordinator would not read, and so could not answer."""
    if not 0 < silence < math.inf:
        raise LaunchError(
            f"silence={silence:g}", expected="more than 0 seconds", fix="leave it out for 15 s"
        )
    data = msgspec.msgpack.encode(hello)
    try:
        msgspec.msgpack.decode(data, type=Hello)
        problem = f"{len(data):,} bytes" if len(data) > MOST_BYTES else None
    except msgspec.ValidationError as error:
        problem = str(error)
    if problem is not None:
        raise LaunchError(
            f"{hello.worker} cannot introduce itself: {problem}",
            expected=f"names of up to 255 characters, and {MOST_BYTES:,} bytes for all tensors",
            fix="shorten the names of its tensors, or of its machine",
        )

"""A spot notice: SIGTERM to any process of a job means that all stop, save, and leave in good time.

A thread hears the signal even while training waits in gloo, and tells the others through the job's
store. In lockstep all pipelines must stop after the same step: the first stage of each says how
many it has begun, and begins no other before it has heard of the largest number, which is the one
that all stop after. In groups the first worker ends the supply of samples instead.

Who is not gone after the grace time ends at once: what waits then would be killed anyway.
"""

import os
import select
import signal
import socket
import sys
import threading
import weakref
from typing import Any

from torch.distributed.distributed_c10d import Store

from polyrhythm.errors import PeerError
from polyrhythm.processes import TOLD_TO_END
from polyrhythm.run.trainer.telling import FIRST
from polyrhythm.run.trainer.turns import store_of
from polyrhythm.types import Seconds, Worker

_LOOK: Seconds = 0.5  # how often to look whether another process has had one
_CLOSING: Seconds = 5.0
_GIVEN, _STOP = "given", "stop"


class Notice:
    """Of one worker, from when it is made until `close`; `is_given` once the job was told."""

    def __init__(
        self, name: str, worker: Worker, num_pipelines: int, *, grace: Seconds, deadline: Seconds
    ) -> None:
        self._worker, self._num_pipelines = worker, num_pipelines
        self._grace, self._deadline = grace, deadline
        self._changed = threading.Condition()
        self._last_moment: threading.Timer | None = None  # to be gone
        self.why = ""
        self._num_begun, self._has_said, self._stop = 0, False, -1
        self._closing = threading.Event()
        self._catch: _Catch | None = None
        if threading.current_thread() is threading.main_thread():
            self._catch = _Catch.new()
        # Two: one that waits for the store, which may not answer, hears no signal meanwhile.
        self._threads = [
            threading.Thread(target=work, name="notice", daemon=True, args=given)
            for work, given in ((self._hear, ()), (self._tell, (store_of(name, deadline),)))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_given(self) -> bool:
        return self._last_moment is not None

    def may_begin(self, step: int) -> bool:
        """In lockstep, the first stage of a pipeline: whether to begin that step, from 0."""
        with self._changed:
            if self._has_said and not self._changed.wait_for(
                lambda: self._stop >= 0, self._deadline
            ):
                raise PeerError(
                    "another pipeline",
                    action="agreeing after which step to stop",
                    waited=self._deadline,
                    cause="it has not said how many steps it has begun",
                )
            if 0 <= self._stop <= step:
                return False
            self._num_begun = step + 1
            return True

    def close(self) -> None:
        self._closing.set()
        if self._last_moment is not None:
            self._last_moment.cancel()
        if self._catch is not None:
            self._catch.end()
        for thread in self._threads:
            thread.join(_CLOSING)
        if self._catch is not None and not self._threads[0].is_alive():
            self._catch.close()

    def _hear(self) -> None:
        while self._catch is not None and not self._closing.is_set():
            if self._catch.wait(_LOOK) and not self.is_given:
                self._give(f"{self._worker} on {socket.gethostname()} got SIGTERM")

    def _tell(self, store: Store) -> None:
        has_told = False
        try:
            while not self._closing.is_set():
                if self.is_given and not has_told:
                    store.set(_GIVEN, self.why)
                    has_told = True
                if self._worker.stage == 0:
                    self._look(store)
                self._closing.wait(_LOOK)
        except RuntimeError:  # the store is gone: training finds out by itself
            pass

    def _look(self, store: Store) -> None:
        """On first stages."""
        if not self.is_given and store.check([_GIVEN]):
            self._give(store.get(_GIVEN).decode())
        if self.is_given and self._stop < 0:
            self._agree(store)

    def _give(self, why: str) -> None:
        self.why = why
        self._last_moment = threading.Timer(self._grace, self._end_at_once)
        self._last_moment.daemon = True
        self._last_moment.start()

    def _agree(self, store: Store) -> None:
        with self._changed:  # not while the store is asked: training waits for the lock
            is_new, self._has_said = not self._has_said, True
            num_begun = self._num_begun
        if is_new:
            store.set(f"begun/{self._worker.pipeline}", str(num_begun))
        keys = [f"begun/{pipeline}" for pipeline in range(self._num_pipelines)]
        if self._worker == FIRST and store.check(keys):
            store.set(_STOP, str(max(int(store.get(key)) for key in keys)))
        if store.check([_STOP]):
            stop = int(store.get(_STOP))
            with self._changed:
                self._stop = stop
                self._changed.notify_all()

    def _end_at_once(self) -> None:
        print(f"{self.why}, and is not gone after {self._grace:g} s: ends", file=sys.stderr)
        sys.stderr.flush()
        os._exit(TOLD_TO_END)


class _Catch:
    """SIGTERM becomes a byte that any thread can read, whatever the main one waits for."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        theirs.setblocking(False)
        self._theirs = theirs
        self._handler: Any = signal.signal(signal.SIGTERM, lambda *_: None)
        self._before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        _catching.add(self)

    @classmethod
    def new(cls) -> "_Catch | None":
        """None where the script has a handler of its own, which comes first."""
        return cls() if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else None

    def wait(self, timeout: Seconds) -> bool:
        """Whether the signal has come."""
        if not select.select([self._ours], [], [], timeout)[0]:
            return False
        return signal.SIGTERM in self._ours.recv(64)

    def end(self) -> None:
        """Whoever waits is woken. Signals are the main thread's alone, and their bytes go here."""
        if threading.current_thread() is threading.main_thread():
            self.forget()
            self._theirs.close()

    def close(self) -> None:
        self._ours.close()

    def forget(self) -> None:
        signal.set_wakeup_fd(self._before)
        signal.signal(signal.SIGTERM, self._handler)
        _catching.discard(self)


_catching: "weakref.WeakSet[_Catch]" = weakref.WeakSet()
_held = threading.local()  # what was blocked before a fork, by thread


def _hold() -> None:
    if _catching:
        _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_go() -> None:
    if (mask := _held.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_all() -> None:
    """In a process that a script forks, to load data, say: its end is nobody else's."""
    for catch in list(_catching):
        catch.forget()
    _let_go()


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_forget_all)

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
import time
import weakref
from typing import Any

from torch.distributed.distributed_c10d import Store

from polyrhythm.errors import PeerError
from polyrhythm.processes import TOLD_TO_END
from polyrhythm.run.trainer.turns import FIRST, store_of
from polyrhythm.types import Seconds, Worker

_LOOK: Seconds = 0.5  # how often to look whether another process has had one
_CLOSING: Seconds = 5.0
_GIVEN, _STOP = "given", "stop"


class Notice:
    """Of one worker, from when it is made until `close`; `is_given` once the job was told."""

    def __init__(
        self, worker: Worker, num_pipelines: int, *, grace: Seconds, deadline: Seconds
    ) -> None:
        self._worker, self._num_pipelines = worker, num_pipelines
        self._grace, self._deadline = grace, deadline
        self._changed = threading.Condition()
        self._given_at: Seconds | None = None
        self.why = ""
        self._num_begun, self._has_said, self._stop = 0, False, -1
        self._is_closed = False
        self._catch: _Catch | None = None
        if threading.current_thread() is threading.main_thread():
            self._catch = _Catch.new()
        self._thread = threading.Thread(
            target=self._run, args=(store_of("polyrhythm/notice"),), name="notice", daemon=True
        )
        self._thread.start()

    @property
    def is_given(self) -> bool:
        return self._given_at is not None

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
        self._is_closed = True
        if self._catch is not None:
            self._catch.end()
        self._thread.join(_CLOSING)
        if self._catch is not None and not self._thread.is_alive():
            self._catch.close()

    def _run(self, store: Store) -> None:
        try:
            while not self._is_closed:
                self._look(store)
        except RuntimeError:  # the store is gone: training finds out by itself
            pass
        while not self._is_closed and self.is_given:
            time.sleep(_LOOK)
            self._end_if_late()

    def _look(self, store: Store) -> None:
        if self._is_signalled() and not self.is_given:
            self._give(f"{self._worker} on {socket.gethostname()} got SIGTERM")
            store.set(_GIVEN, self.why)
        self._end_if_late()
        if self._worker.stage == 0:
            if not self.is_given and store.check([_GIVEN]):
                self._give(store.get(_GIVEN).decode())
            if self.is_given and self._stop < 0:
                self._agree(store)

    def _give(self, why: str) -> None:
        self.why, self._given_at = why, time.monotonic()

    def _agree(self, store: Store) -> None:
        """On first stages."""
        with self._changed:
            if not self._has_said:
                self._has_said = True
                store.set(f"begun/{self._worker.pipeline}", str(self._num_begun))
        keys = [f"begun/{pipeline}" for pipeline in range(self._num_pipelines)]
        if self._worker == FIRST and store.check(keys):
            store.set(_STOP, str(max(int(store.get(key)) for key in keys)))
        if store.check([_STOP]):
            with self._changed:
                self._stop = int(store.get(_STOP))
                self._changed.notify_all()

    def _is_signalled(self) -> bool:
        if self._catch is None:
            time.sleep(_LOOK)
            return False
        return self._catch.wait(_LOOK)

    def _end_if_late(self) -> None:
        if self._given_at is not None and time.monotonic() - self._given_at > self._grace:
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
        """Whoever waits is woken."""
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

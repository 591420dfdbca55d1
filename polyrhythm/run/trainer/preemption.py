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
from polyrhythm.processes import TERMINATED
from polyrhythm.run.trainer.store import LEADER
from polyrhythm.run.trainer.sync_decision import prefix_store
from polyrhythm.types import Seconds, Worker

_POLL_INTERVAL: Seconds = 0.5  # how often to look whether another process has had one
_CLOSE_TIMEOUT: Seconds = 5.0
_REQUESTED, _STOP = "given", "stop"


class PreemptionHandler:
    """Of one worker, from when it is made until `close`; `is_stop_requested` once the job was told."""

    def __init__(
        self,
        name: str,
        worker: Worker,
        num_pipelines: int,
        *,
        grace_period: Seconds,
        timeout: Seconds,
    ) -> None:
        self._worker, self._num_pipelines = worker, num_pipelines
        self._grace_period, self._timeout = grace_period, timeout
        self._changed = threading.Condition()
        self._exit_timer: threading.Timer | None = None  # to be gone
        self.why = ""
        self._num_begun, self._has_reported, self._stop_step = 0, False, -1
        self._closing = threading.Event()
        self._catcher: _SigtermCatcher | None = None
        if threading.current_thread() is threading.main_thread():
            self._catcher = _SigtermCatcher.new()
        # Two: one that waits for the store, which may not answer, hears no signal meanwhile.
        self._threads = [
            threading.Thread(target=work, name="preemption", daemon=True, args=given)
            for work, given in (
                (self._watch_signal, ()),
                (self._watch_store, (prefix_store(name, timeout),)),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_stop_requested(self) -> bool:
        return self._exit_timer is not None

    def may_start_step(self, step: int) -> bool:
        """In lockstep, the first stage of a pipeline: whether to begin that step, from 0."""
        with self._changed:
            if self._has_reported and not self._changed.wait_for(
                lambda: self._stop_step >= 0, self._timeout
            ):
                raise PeerError(
                    "another pipeline",
                    action="agreeing after which step to stop",
                    waited=self._timeout,
                    cause="it has not said how many steps it has begun",
                )
            if 0 <= self._stop_step <= step:
                return False
            self._num_begun = step + 1
            return True

    def close(self) -> None:
        self._closing.set()
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        if self._catcher is not None:
            self._catcher.end()
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT)
        if self._catcher is not None and not self._threads[0].is_alive():
            self._catcher.close()

    def _watch_signal(self) -> None:
        while self._catcher is not None and not self._closing.is_set():
            if self._catcher.wait(_POLL_INTERVAL) and not self.is_stop_requested:
                self._request_stop(f"{self._worker} on {socket.gethostname()} got SIGTERM")

    def _watch_store(self, store: Store) -> None:
        has_published = False
        try:
            while not self._closing.is_set():
                if self.is_stop_requested and not has_published:
                    store.set(_REQUESTED, self.why)
                    has_published = True
                if self._worker.stage == 0:
                    self._poll_store(store)
                self._closing.wait(_POLL_INTERVAL)
        except RuntimeError:  # the store is gone: training finds out by itself
            pass

    def _poll_store(self, store: Store) -> None:
        """On first stages."""
        if not self.is_stop_requested and store.check([_REQUESTED]):
            self._request_stop(store.get(_REQUESTED).decode())
        if self.is_stop_requested and self._stop_step < 0:
            self._agree_on_stop_step(store)

    def _request_stop(self, why: str) -> None:
        self.why = why
        self._exit_timer = threading.Timer(self._grace_period, self._exit_now)
        self._exit_timer.daemon = True
        self._exit_timer.start()

    def _agree_on_stop_step(self, store: Store) -> None:
        with self._changed:  # not while the store is asked: training waits for the lock
            is_new, self._has_reported = not self._has_reported, True
            num_begun = self._num_begun
        if is_new:
            store.set(f"begun/{self._worker.pipeline}", str(num_begun))
        keys = [f"begun/{pipeline}" for pipeline in range(self._num_pipelines)]
        if self._worker == LEADER and store.check(keys):
            store.set(_STOP, str(max(int(store.get(key)) for key in keys)))
        if store.check([_STOP]):
            stop = int(store.get(_STOP))
            with self._changed:
                self._stop_step = stop
                self._changed.notify_all()

    def _exit_now(self) -> None:
        print(f"{self.why}, and is not gone after {self._grace_period:g} s: ends", file=sys.stderr)
        sys.stderr.flush()
        os._exit(TERMINATED)


class _SigtermCatcher:
    """SIGTERM becomes a byte that any thread can read, whatever the main one waits for."""

    def __init__(self) -> None:
        self._reader, writer = socket.socketpair()
        self._reader.setblocking(False)
        writer.setblocking(False)
        self._writer = writer
        self._handler: Any = signal.signal(signal.SIGTERM, lambda *_: None)
        self._before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        _installed.add(self)

    @classmethod
    def new(cls) -> "_SigtermCatcher | None":
        """None where the script has a handler of its own, which comes first."""
        return cls() if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else None

    def wait(self, timeout: Seconds) -> bool:
        """Whether the signal has come."""
        if not select.select([self._reader], [], [], timeout)[0]:
            return False
        return signal.SIGTERM in self._reader.recv(64)

    def end(self) -> None:
        """Whoever waits is woken. Signals are the main thread's alone, and their bytes go here."""
        if threading.current_thread() is threading.main_thread():
            self.uninstall()
            self._writer.close()

    def close(self) -> None:
        self._reader.close()

    def uninstall(self) -> None:
        signal.set_wakeup_fd(self._before)
        signal.signal(signal.SIGTERM, self._handler)
        _installed.discard(self)


_installed: "weakref.WeakSet[_SigtermCatcher]" = weakref.WeakSet()
_saved = threading.local()  # what was blocked before a fork, by thread


def _block_sigterm() -> None:
    if _installed:
        _saved.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_sigterm() -> None:
    if (mask := _saved.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _reset_in_child() -> None:
    """In a process that a script forks, to load data, say: its end is nobody else's."""
    for catch in list(_installed):
        catch.uninstall()
    _unblock_sigterm()


os.register_at_fork(
    before=_block_sigterm, after_in_parent=_unblock_sigterm, after_in_child=_reset_in_child
)

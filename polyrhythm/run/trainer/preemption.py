"""Preemption notices: after SIGTERM to any process of a job, all processes stop, save and exit.

Where the others can train on, the process that gets it asks the coordinator to leave instead
(`elastic.py`). A notice that the cloud gives its machine is the same (`preemption_notice.py`).

Ctrl-C during a fit that can save is such a notice, too, without a grace period; a second one ends
the process at once. A thread receives the signal even while training waits in gloo, and publishes
it in the job's store. In lockstep all pipelines must stop after the same step: the first stage of
each publishes how many steps it has started, and starts no other before it knows the largest
number, after which all stop. In groups rank 0 ends the samples instead.

Processes that are still alive after the grace period exit at once.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from polyrhythm.errors import PeerError, UserError
from polyrhythm.preemption_notice import NOTICE_VARIABLE, NoticeWatch
from polyrhythm.processes import INTERRUPTED, TERMINATED
from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.types import Seconds
from polyrhythm.worker_registry import RunningWorker

_POLL_INTERVAL: Seconds = 0.5  # for a notice to another process
_CLOSE_TIMEOUT: Seconds = 5.0
_NOTICE = "a preemption notice"

_logger = logging.getLogger(__name__)


class PreemptionHandler:
    """Handles preemption notices to the job on one worker, from construction until `close`."""

    def __init__(
        self,
        store: JobStore,
        members: Members,
        first_stages: Members,
        *,
        grace_period: Seconds,
        depart: Callable[[str], None] | None = None,
    ) -> None:
        """`store`: of this object alone, a thread of which uses it; `first_stages`: by pipeline.

        `depart`: if this worker can leave while the others train on, how it asks to after SIGTERM.
        """
        store.check = self._check_open  # ends a wait for other first stages
        self._store, self._members, self.first_stages = store, members, first_stages
        self._grace_period, self._depart = grace_period, depart
        self._changed = threading.Condition()
        self._exit_timer: threading.Timer | None = None  # set by SIGTERM
        self.why, self.status = "", 0  # of the exit, set by the notice
        self._num_started, self._has_reported = 0, False
        self._is_agreed = False  # all workers know the last step
        self._stop_step: int | None = None
        self._closing = threading.Event()
        self._stack = ExitStack()
        wanted = os.environ.get(NOTICE_VARIABLE)
        watch = NoticeWatch(wanted) if wanted else None
        is_second = bool(_installed)  # of this process: the first one handles SIGTERM
        self._catcher: _SignalCatcher | None = None
        if threading.current_thread() is threading.main_thread():
            self._catcher = _SignalCatcher.new()
        if not is_second:
            self._accept_sigterm(watch)
        # Two threads: one that waits for a store that does not answer would miss the signal.
        self._threads = [
            threading.Thread(target=work, name="preemption", daemon=True)
            for work in (self._watch_signal, self._watch_store)
        ]
        for thread in self._threads:
            thread.start()

    def _accept_sigterm(self, watch: NoticeWatch | None) -> None:
        """Let `polyrhythm leave` and `watch` send SIGTERM, now that something handles it."""
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            worker = RunningWorker.here(self._store.name_of(self._store.rank))
            self._stack.enter_context(worker.registered())
            if watch is not None:
                watch.start(_act_as_sigterm, _logger.warning)
                self._stack.callback(watch.close)
        elif watch is not None:
            why = "nothing handles SIGTERM, as this is not the main thread"
            _logger.warning("%s has no effect: %s", NOTICE_VARIABLE, why)

    @property
    def is_stop_requested(self) -> bool:
        return self.status != 0

    @contextmanager
    def catch_interrupt(self) -> Iterator[None]:
        """Let Ctrl-C be a notice in this block, instead of a KeyboardInterrupt.

        Not if the script has its own handler, or in another thread.
        """
        is_main = threading.current_thread() is threading.main_thread()
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._catcher is None or not (is_main and is_default):
            yield
            return
        self._catcher.catches_interrupt = True
        signal.signal(signal.SIGINT, lambda *_: None)
        try:
            yield
        finally:
            self._catcher.catches_interrupt = False
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def may_start_step(self, step: int) -> bool:
        """In lockstep, on the first stage of a pipeline: whether to start `step` (from 0)."""
        with self._changed:
            if self._has_reported and not self._changed.wait_for(
                lambda: self._stop_step is not None, self._store.timeout
            ):
                raise PeerError(
                    "another pipeline",
                    action="agreeing on the last step",
                    waited=self._store.timeout,
                    cause="it has not published how many steps it has started",
                )
            if self._stop_step is not None and self._stop_step <= step:
                return False
            self._num_started = step + 1
            return True

    def close(self) -> None:
        self._closing.set()
        self._stack.close()
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        if self._catcher is not None:
            self._catcher.end()
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT)
        if self._catcher is not None and not self._threads[0].is_alive():
            self._catcher.close()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise RuntimeError("training is over")

    def _watch_signal(self) -> None:
        me = f"{self._store.name_of(self._store.rank)} on {socket.gethostname()}"
        is_interrupted = False  # here
        while self._catcher is not None and not self._closing.is_set():
            for number in self._catcher.wait(_POLL_INTERVAL):
                if number == signal.SIGTERM:
                    self._request_stop(f"{me} received SIGTERM", TERMINATED)
                elif is_interrupted:
                    text = f"interrupted again: {me} exits now, without saving"
                    self._exit_now(text, INTERRUPTED)
                else:
                    is_interrupted = True
                    self._request_stop(f"{me} was interrupted", INTERRUPTED)

    def _watch_store(self) -> None:
        store, has_announced = self._store, False
        try:
            while not (self._closing.is_set() or self._is_agreed):
                if self.is_stop_requested and not has_announced:
                    store.set_once(_NOTICE, [self.why, self.status], self._members)
                    has_announced = True
                if store.rank in self.first_stages.ranks:
                    notice = store.peek(_NOTICE, self._members)
                    if notice is not None:
                        self._request_stop(*notice)
                    # Not before the others can know of it: a signal may have come since above.
                    if (has_announced or notice is not None) and self._stop_step is None:
                        self._agree_on_stop_step()
                self._closing.wait(_POLL_INTERVAL)
        except (RuntimeError, UserError):  # the store or a peer is lost: training fails by itself
            pass

    def _request_stop(self, why: str, status: int) -> None:
        """Take the first notice; SIGTERM after Ctrl-C still limits the time that is left."""
        if status == TERMINATED and self._exit_timer is None:
            text = f"{why}: still running after {self._grace_period:g} s, exits now"
            self._exit_timer = threading.Timer(
                self._grace_period, self._exit_now, [text, TERMINATED]
            )
            self._exit_timer.daemon = True
            self._exit_timer.start()
        if status == TERMINATED and self._depart is not None:
            self._depart(why)
        elif not self.is_stop_requested:
            self.why, self.status = why, status

    def stop(self, why: str) -> None:
        """Let the job end after the current step, which all workers know to be the last."""
        self._is_agreed, self.why, self.status = True, why, TERMINATED

    def _agree_on_stop_step(self) -> None:
        """On first stages: stop after the last step that any pipeline has started."""
        with self._changed:  # not while waiting for the store: training needs the lock
            self._has_reported, num_started = True, self._num_started
        name = "the number of started steps"
        started = self._store.all_gather_object(name, num_started, self.first_stages)
        with self._changed:
            self._stop_step = max(started)
            self._changed.notify_all()

    def _exit_now(self, text: str, status: int) -> None:
        print(text, file=sys.stderr, flush=True)
        os._exit(self.status or status)


def _act_as_sigterm(notice: str) -> None:
    """Let this process do what it does after SIGTERM, whoever handles that."""
    _logger.warning("a preemption notice for this machine: %s", notice)
    os.kill(os.getpid(), signal.SIGTERM)


class InterruptDelay:
    """Delays Ctrl-C until the end of a block, so that it is complete; the second one is at once.

    Installed once for many blocks: to set a handler in each costs 0.1 ms.
    """

    def __init__(self) -> None:
        self._is_delaying = self._is_received = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Not if the script has its own handler, or in another thread, which gets no Ctrl-C."""
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not is_default or threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) == self._on_interrupt:  # not a callback's own
                signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextmanager
    def delayed(self) -> Iterator[None]:
        self._is_received, self._is_delaying = False, True
        try:
            yield
        except Exception as error:
            if self._is_received:  # a script that handles the error must not go on after Ctrl-C
                raise KeyboardInterrupt from error
            raise
        finally:
            self._is_delaying = False
        if self._is_received:
            raise KeyboardInterrupt

    def _on_interrupt(self, number: int, frame: Any) -> None:
        if self._is_delaying and not self._is_received:
            self._is_received = True
        else:
            signal.default_int_handler(number, frame)


class _SignalCatcher:
    """Turns SIGTERM into a byte that any thread can read while the main thread is blocked.

    With `catches_interrupt` SIGINT, too.
    """

    catches_interrupt = False

    def __init__(self) -> None:
        self._reader, writer = socket.socketpair()
        self._reader.setblocking(False)
        writer.setblocking(False)
        self._writer = writer
        self._previous_handler: Any = signal.signal(signal.SIGTERM, lambda *_: None)
        self._previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        _installed.add(self)

    @classmethod
    def new(cls) -> "_SignalCatcher | None":
        """Install the handler; None if the script has its own, which has precedence."""
        return cls() if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else None

    def wait(self, timeout: Seconds) -> list[int]:
        """Return the signals that arrive within `timeout`."""
        if not select.select([self._reader], [], [], timeout)[0]:
            return []
        caught = [signal.SIGTERM, *([signal.SIGINT] if self.catches_interrupt else [])]
        return [number for number in self._reader.recv(64) if number in caught]

    def end(self) -> None:
        """Restore the previous handler and wake `wait`; only the main thread may do so."""
        if threading.current_thread() is threading.main_thread():
            self.uninstall()
            self._writer.close()

    def close(self) -> None:
        self._reader.close()

    def uninstall(self) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        signal.signal(signal.SIGTERM, self._previous_handler)
        if self.catches_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _installed.discard(self)


_installed: "weakref.WeakSet[_SignalCatcher]" = weakref.WeakSet()
_saved = threading.local()  # the signal mask before a fork, per thread


def _block_sigterm() -> None:
    if _installed:
        _saved.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_sigterm() -> None:
    if (mask := _saved.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _reset_in_child() -> None:
    """In a process that the script forks, such as a data loader, SIGTERM ends that process only."""
    for catcher in list(_installed):
        catcher.uninstall()
    _unblock_sigterm()


os.register_at_fork(
    before=_block_sigterm, after_in_parent=_unblock_sigterm, after_in_child=_reset_in_child
)

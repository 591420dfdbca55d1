"""The epoch that this process is in: when it ends, all waits of the process for others end.

In a job whose workers may be lost, training waits in gloo, NCCL or the store for a worker that is
gone, or for one that waits for that worker itself. Another thread learns of the loss: `end` then
aborts all process groups of the epoch, and every wait in the store raises. What the process makes
afterwards belongs to the next epoch. Outside of such jobs there is one epoch, which never ends.

A broken connection of gloo wakes who waits for a message that has not begun, but not who waits for
one in transfer: large messages over slow networks nearly always are. So gloo is waited for in a
thread of its own (`wait`), which is left alone when the epoch ends; it ends after its timeout.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from polyrhythm.errors import PeerError
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

# To connect, all members of an epoch come at once: one that does not is lost. So long gloo waits
# for its address, and five times as long for the connection.
_CONNECT_TIMEOUT: Seconds = 20.0
_EXIT_TIMEOUT: Seconds = 2.0
_T = TypeVar("_T")


class GroupHosting(NamedTuple):
    """A host for schedulers of groups that the loss of no worker ends."""

    # Takes the name of the GroupSync, its setup, the path of the decision log, and how long to wait
    # for missing workers; returns the address.
    start: Callable[[str, Setup, Path | None, Seconds], str]
    public_key: str


class Epoch:
    """The connections of one epoch; any thread may call `end`."""

    def __init__(
        self, *, connects_at_once: bool = False, group_hosting: GroupHosting | None = None
    ) -> None:
        """`connects_at_once`: all members make their connections at the same time.

        `group_hosting`: None if the first worker hosts the schedulers of groups.
        """
        self.connects_at_once, self.group_hosting = connects_at_once, group_hosting
        self._lock = threading.Lock()
        self._error: PeerError | None = None
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._kept: list[dist.ProcessGroup] = []
        self._on_end: list[weakref.WeakMethod[Callable[[PeerError], None]]] = []
        self._waits: set[Future[Any]] = set()
        self._on_unreachable: list[weakref.WeakMethod[Callable[[Collection[Worker]], None]]] = []

    def connect_timeout(self, timeout: Seconds) -> Seconds:
        """Return the longest wait for the other members of a new group."""
        return min(timeout, _CONNECT_TIMEOUT) if self.connects_at_once else timeout

    def add(self, group: dist.ProcessGroup, *, keeps: bool = False) -> None:
        """Abort a group when the epoch ends; raises the error if it has ended.

        `keeps`: also if nothing else refers to this object, as to one that torch makes on request.
        """
        with self._lock:
            self._groups.add(group)
            self._kept += [group] * keeps
        self.check()

    def on_end(self, function: Callable[[PeerError], None]) -> None:
        """Call a method with the error when the epoch ends, in the thread that ends it.

        Not if its object is gone by then. Raises the error if the epoch has ended already.
        """
        if self.connects_at_once:  # other epochs do not end
            with self._lock:
                self._on_end.append(weakref.WeakMethod(function))
            self.check()

    def on_unreachable(self, function: Callable[[Collection[Worker]], None]) -> None:
        """Call a method with workers that this one does not reach, as long as this is so."""
        if self.connects_at_once:
            with self._lock:
                self._on_unreachable.append(weakref.WeakMethod(function))

    def report_unreachable(self, workers: Collection[Worker]) -> None:
        """Let averages go around these workers; any thread."""
        with self._lock:
            functions = [method() for method in self._on_unreachable]
        for function in functions:
            if function is not None:
                function(workers)

    def wait(self, function: Callable[[], _T]) -> _T:
        """Return what `function` returns, which waits in gloo; raise the error if the epoch ends.

        What it receives into must not be used again after that error.
        """
        if not self.connects_at_once:  # other epochs do not end
            return function()
        over = Future[_T]()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                _settle(over.set_exception, error)
            else:
                _settle(over.set_result, result)

        with self._lock:
            self._waits.add(over)
        try:
            self.check()
            start_thread(run, name="gloo")
            return over.result()
        finally:
            with self._lock:
                self._waits.discard(over)

    def check(self) -> None:
        """Raise the error of the epoch if it has ended."""
        if self._error is not None:
            raise _copy_of(self._error)

    def end(self, error: PeerError, abort: Callable[[dist.ProcessGroup], None]) -> None:
        """End all waits of this epoch with an error; `abort` ends those in a group."""
        with self._lock:
            self._error = self._error or error
            groups, functions = list(self._groups), [method() for method in self._on_end]
            waits = list(self._waits)
        for function in functions:
            if function is not None:
                function(error)
        for group in groups:
            abort(group)
        for wait in waits:  # nothing is received any more
            _settle(wait.set_exception, _copy_of(self._error))


def _copy_of(error: PeerError) -> PeerError:
    """Return the error without its traceback, whose frames would keep sockets open."""
    return PeerError(error.peer, action=error.action, waited=error.waited, cause=error.cause)


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of `start_thread`


def start_thread(function: Callable[[], None], *, name: str) -> None:
    """Run a function that waits in gloo or NCCL, perhaps for long after anybody waits for it."""
    thread = threading.Thread(target=function, name=name, daemon=True)
    _threads.add(thread)
    thread.start()


def _wait_for_threads() -> None:
    """Wait for threads that were left alone: one that ends during the exit would abort it.

    The end of a job wakes most of them, as its store ends and connections close.
    """
    deadline = time.monotonic() + _EXIT_TIMEOUT
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


weakref.finalize(start_thread, _wait_for_threads)  # at exit, after finalizers that are made later


def _settle(settle: Callable[[_T], None], outcome: _T) -> None:
    """Give a wait its outcome, unless the other one was first: its function, or the epoch's end."""
    with contextlib.suppress(InvalidStateError):
        settle(outcome)


_current = Epoch()


def current_epoch() -> Epoch:
    return _current


def enter_epoch(epoch: Epoch) -> None:
    """Count what this process connects from now on as part of `epoch`."""
    global _current  # as torch's default group, which each epoch has one of
    _current = epoch

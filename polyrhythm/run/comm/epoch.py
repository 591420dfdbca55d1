"""The epoch that this process is in: when it ends, all waits of the process for others end.

In a job whose workers may be lost, training waits in gloo, NCCL or the store for a worker that is
gone, or for one that waits for that worker itself. Another thread learns of the loss: `end` then
aborts all process groups of the epoch, and every wait in the store raises. What the process makes
afterwards belongs to the next epoch. Outside of such jobs there is one epoch, which never ends.
"""

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from polyrhythm.errors import PeerError
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds

# To connect, all members of an epoch come at once: one that does not is lost, and no abort can
# end the wait of gloo for its address.
_CONNECT_TIMEOUT: Seconds = 20.0


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

        Not if its object is gone by then.
        """
        if self.connects_at_once:  # other epochs do not end
            with self._lock:
                self._on_end.append(weakref.WeakMethod(function))

    def check(self) -> None:
        """Raise the error of the epoch if it has ended."""
        if self._error is not None:
            raise PeerError(
                self._error.peer,
                action=self._error.action,
                waited=self._error.waited,
                cause=self._error.cause,
            )

    def end(self, error: PeerError, abort: Callable[[dist.ProcessGroup], None]) -> None:
        """End all waits of this epoch with an error; `abort` ends those in a group."""
        with self._lock:
            self._error = self._error or error
            groups, functions = list(self._groups), [method() for method in self._on_end]
        for function in functions:
            if function is not None:
                function(error)
        for group in groups:
            abort(group)


_current = Epoch()


def current_epoch() -> Epoch:
    return _current


def enter_epoch(epoch: Epoch) -> None:
    """Count what this process connects from now on as part of `epoch`."""
    global _current  # as torch's default group, which each epoch has one of
    _current = epoch

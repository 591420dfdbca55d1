"""Gather optimizer state while training continues, in a separate thread and process group.

A checkpoint needs the whole optimizer state, of which each worker has a shard. Training waits only
for the copy of its own shard, not for the gather: over slow links that takes longer than a step.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.comm_thread import CommThread
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import all_gather_object, new_gloo_group
from polyrhythm.run.comm.reduce_scatter import GlooCollectives
from polyrhythm.types import Seconds

_POLL_INTERVAL: Seconds = 1.0  # between checks that the thread is alive


class GatherFuture:
    """The result of a gather; every wait inside the gather has a timeout, so this one ends, too."""

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self._is_running, self._is_done = is_running, threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def run(self, function: Callable[[], Any]) -> None:
        try:
            self._result = function()
        except Exception as error:  # raised by `result`
            self._error = error
        self._is_done.set()

    def wait(self) -> None:
        """Wait until the gather has ended, or its thread."""
        while not self._is_done.wait(_POLL_INTERVAL) and self._is_running():
            pass

    def result(self) -> Any:
        """Return the gathered object; raises PeerError if a worker is lost or has left."""
        self.wait()
        if self._error is not None:
            raise self._error
        if not self._is_done.is_set():
            raise PeerError(
                "another worker",
                action="gathering the optimizer's state",
                waited=0.0,
                cause="this worker's optimizer was closed meanwhile",
            )
        return self._result


class BackgroundGather:
    """Runs gathers one after the other; created, and each gather started, by all workers."""

    def __init__(self, ranks: Sequence[int], *, timeout: Seconds) -> None:
        self._group = new_gloo_group(ranks, "gathering state", timeout=timeout)
        self.collectives = GlooCollectives(self._group, timeout=timeout)
        self._thread = CommThread([self._group], timeout=timeout)

    def start(self, function: Callable[[], Any]) -> GatherFuture:
        future = GatherFuture(lambda: self._thread.is_alive)
        self._thread.start(lambda: future.run(function))
        return future

    def all_gather_object(self, obj: Any, what: str) -> list[Any]:
        """Gather an object of every rank; `what` names the call for error messages."""
        with peer_errors("another worker", what):
            return all_gather_object(self._group, obj)

    def close(self) -> None:
        self._thread.close()

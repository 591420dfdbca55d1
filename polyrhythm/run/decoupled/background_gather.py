"""What all workers put together while training goes on, on connections and in a thread of its own.

A checkpoint needs the optimizer's state, of which each worker has a part. Training waits until each
has a copy of its own, and not until the parts have come together: over slow links that takes longer
than steps do.
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

_POLL_INTERVAL: Seconds = 1.0  # whether the thread is still there


class GatherFuture:
    """What will be there; every wait inside of it is bounded, and so is that for it."""

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self._is_running, self._is_done = is_running, threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def run(self, make: Callable[[], Any]) -> None:
        try:
            self._result = make()
        except Exception as error:  # told where it is asked for
            self._error = error
        self._is_done.set()

    def wait(self) -> None:
        """Until it is there, or is not going to be."""
        while not self._is_done.wait(_POLL_INTERVAL) and self._is_running():
            pass

    def result(self) -> Any:
        """Raises PeerError where a worker was lost, or has left."""
        self.wait()
        if self._error is not None:
            raise self._error
        if not self._is_done.is_set():
            raise PeerError(
                "another worker",
                action="putting the optimizer's state together",
                waited=0.0,
                cause="this one was closed meanwhile",
            )
        return self._result


class BackgroundGather:
    """One thing after the other, each begun by all workers; made by all together."""

    def __init__(self, ranks: Sequence[int], *, timeout: Seconds) -> None:
        self._group = new_gloo_group(ranks, "putting state together", timeout=timeout)
        self.collectives = GlooCollectives(self._group, timeout=timeout)
        self._thread = CommThread([self._group], timeout=timeout)

    def start(self, make: Callable[[], Any]) -> GatherFuture:
        future = GatherFuture(lambda: self._thread.is_alive)
        self._thread.start(lambda: future.run(make))
        return future

    def all_gather_object(self, mine: Any, what: str) -> list[Any]:
        """What all give, by rank, in `what`, which all have started."""
        with peer_errors("another worker", what):
            return all_gather_object(self._group, mine)

    def close(self) -> None:
        self._thread.close()

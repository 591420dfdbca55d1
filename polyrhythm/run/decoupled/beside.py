"""What all workers put together while training goes on, on connections and in a thread of its own.

A checkpoint needs the optimizer's state, of which each worker has a part. Training waits until each
has a copy of its own, and not until the parts have come together: over slow links that takes longer
than steps do.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from polyrhythm.errors import PeerError
from polyrhythm.run.decoupled.halves import PeerHalves
from polyrhythm.run.decoupled.reducing import Reducing
from polyrhythm.run.groups import gather_objects, new_group
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds

_LOOK: Seconds = 1.0  # whether the thread is still there


class Later:
    """What will be there; every wait inside of it is bounded, and so is that for it."""

    def __init__(self, is_worked_on: Callable[[], bool]) -> None:
        self._is_worked_on, self._is_over = is_worked_on, threading.Event()
        self._found: Any = None
        self._error: Exception | None = None

    def run(self, make: Callable[[], Any]) -> None:
        try:
            self._found = make()
        except Exception as error:  # told where it is asked for
            self._error = error
        self._is_over.set()

    def wait(self) -> None:
        """Until it is there, or is not going to be."""
        while not self._is_over.wait(_LOOK) and self._is_worked_on():
            pass

    def result(self) -> Any:
        """Raises PeerError where a worker was lost, or has left."""
        self.wait()
        if self._error is not None:
            raise self._error
        if not self._is_over.is_set():
            raise PeerError(
                "another worker",
                action="putting the optimizer's state together",
                waited=0.0,
                cause="this one was closed meanwhile",
            )
        return self._found


class Beside:
    """One thing after the other, each begun by all workers; made by all together."""

    def __init__(self, ranks: Sequence[int], *, timeout: Seconds) -> None:
        self._group = new_group(ranks, "putting state together", deadline=timeout)
        self.halves = PeerHalves(self._group, timeout=timeout)
        self._thread = Reducing([self._group], timeout=timeout)

    def start(self, make: Callable[[], Any]) -> Later:
        later = Later(lambda: self._thread.is_alive)
        self._thread.start(lambda: later.run(make))
        return later

    def gathered(self, mine: Any, what: str) -> list[Any]:
        """What all give, by rank, in `what`, which all have started."""
        with waiting_for("another worker", what):
            return gather_objects(self._group, mine)

    def close(self) -> None:
        self._thread.close()

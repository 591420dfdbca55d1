"""A thread that waits for communication and sums gradients while compute continues."""

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch.distributed as dist

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.process_groups import abort
from polyrhythm.types import Seconds

_CLOSE_TIMEOUT: Seconds = 5.0  # for messages in flight; then once more, for aborted waits

_Job = tuple[Callable[[], None], "Work"]


class Work:
    """A function that runs in the thread; `wait` raises the error that it raised."""

    def __init__(self, timeout: Seconds) -> None:
        self._timeout = timeout
        self._is_done = threading.Event()
        self._error: Exception | None = None

    def wait(self) -> None:
        if not self._is_done.wait(self._timeout):
            raise PeerError(
                "another worker",
                action="averaging gradients",
                waited=self._timeout,
                cause="it is alive, but has not computed its gradients",
            )
        if self._error is not None:
            raise self._error

    def run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # raised by `wait`
            self._error = error
        self._is_done.set()


class CommThread:
    """Runs functions one after the other; aborts `groups`, in which they wait, at exit."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], *, timeout: Seconds) -> None:
        self._timeout = timeout
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_run_jobs, args=(self._jobs,), name="decoupled", daemon=True
        )
        self._thread.start()
        # A daemon thread that waits in gloo when the interpreter ends would abort it.
        self._end = weakref.finalize(self, _end, self._jobs, self._thread, groups)

    def start(self, function: Callable[[], None]) -> Work:
        work = Work(self._timeout)
        self._jobs.put((function, work))
        return work

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; after `close` it ends with its current function."""
        return self._thread.is_alive()

    def close(self) -> None:
        self._end()


def _run_jobs(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        function, work = job
        work.run(function)


def _end(
    jobs: "SimpleQueue[_Job | None]", thread: threading.Thread, groups: Sequence[dist.ProcessGroup]
) -> None:
    jobs.put(None)
    thread.join(_CLOSE_TIMEOUT)  # other workers may still need messages in flight
    for group in groups:
        abort(group)
    thread.join(_CLOSE_TIMEOUT)

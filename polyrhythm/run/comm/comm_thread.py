"""A thread that waits for what is on its way, and adds up gradients, while compute goes on."""

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch.distributed as dist

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.process_groups import abort
from polyrhythm.types import Seconds

_CLOSE_TIMEOUT: Seconds = 5.0  # for what is on its way; then again, for waits that were broken off

_Job = tuple[Callable[[], None], "Work"]


class Work:
    """Something that the thread does; `wait` raises what went wrong there."""

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
                cause="it is alive, but has not computed its own",
            )
        if self._error is not None:
            raise self._error

    def run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # told where it is waited for
            self._error = error
        self._is_done.set()


class CommThread:
    """One thing after the other. In `groups` the thread waits: they are broken off at exit."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], *, timeout: Seconds) -> None:
        self._timeout = timeout
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_run_jobs, args=(self._jobs,), name="decoupled", daemon=True
        )
        self._thread.start()
        # A daemon thread that waits in gloo when the interpreter ends would abort it.
        self._end = weakref.finalize(self, _end, self._jobs, self._thread, groups)

    def start(self, work: Callable[[], None]) -> Work:
        task = Work(self._timeout)
        self._jobs.put((work, task))
        return task

    @property
    def is_alive(self) -> bool:
        """Until it was closed, and its thread has seen that."""
        return self._thread.is_alive()

    def close(self) -> None:
        self._end()


def _run_jobs(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        work, task = job
        task.run(work)


def _end(
    jobs: "SimpleQueue[_Job | None]",
    thread: threading.Thread,
    groups: Sequence[dist.ProcessGroup],
) -> None:
    jobs.put(None)
    thread.join(_CLOSE_TIMEOUT)  # others may need what this worker sends
    for group in groups:
        abort(group)
    thread.join(_CLOSE_TIMEOUT)

"""A thread that waits for communication and sums gradients while compute continues."""

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.process_groups import abort
from polyrhythm.types import Seconds

_CLOSE_TIMEOUT: Seconds = 5.0  # for messages in flight; then once more, for aborted waits

_Job = tuple[Callable[[], Any], "Future[Any]"]


class Work:
    """A function that runs in the thread."""

    def __init__(self, timeout: Seconds) -> None:
        self.future: Future[Any] = Future()
        self._timeout = timeout

    def wait(self) -> None:
        """Wait for its end; raises the error that it raised, or PeerError after the timeout."""
        try:
            self.future.result(self._timeout)
        except TimeoutError:
            raise PeerError(
                "another worker",
                action="averaging gradients",
                waited=self._timeout,
                cause="it is alive, but has not computed its gradients",
            ) from None


class CommThread:
    """Runs functions one after the other; aborts `groups`, in which they wait, at exit."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], *, timeout: Seconds) -> None:
        self.timeout, self._groups = timeout, groups  # of each wait for a function's end
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_run_jobs, args=(self._jobs,), name="decoupled", daemon=True
        )
        self._thread.start()
        # A daemon thread that waits in gloo when the interpreter ends would abort it.
        self._end = weakref.finalize(self, _end, self._jobs, self._thread, groups)

    def start(self, function: Callable[[], Any]) -> Work:
        """Run `function` after those started before; called by the thread that closes this."""
        work = Work(self.timeout)
        if self._end.alive:
            self._jobs.put((function, work.future))
        else:
            closed = PeerError(
                "another worker", action="communicating", waited=0.0, cause="closed on this worker"
            )
            work.future.set_exception(closed)
        return work

    def close(self) -> None:
        self._end()

    def abort(self) -> None:
        """End after a failure: what waits in the groups, here and on peers, fails at once."""
        for group in self._groups:
            abort(group)
        self._end()


def _run_jobs(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        function, future = job
        try:
            future.set_result(function())
        except Exception as error:  # raised by those who wait
            future.set_exception(error)


def _end(
    jobs: "SimpleQueue[_Job | None]", thread: threading.Thread, groups: Sequence[dist.ProcessGroup]
) -> None:
    jobs.put(None)
    thread.join(_CLOSE_TIMEOUT)  # other workers may still need messages in flight
    for group in groups:
        abort(group)
    thread.join(_CLOSE_TIMEOUT)

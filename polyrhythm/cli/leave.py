"""`polyrhythm leave`: ask a worker on this machine to leave its job; the others train on."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.types import Seconds
from polyrhythm.worker_registry import RunningWorker, running_workers

if TYPE_CHECKING:
    from rich.console import Console

_POLL_INTERVAL: Seconds = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveCommand:
    """Ask a worker on this machine to leave its job, and wait until it has gone.

    It completes its step, hands over what only it has, and exits; the others train on. In a job
    that cannot go on without it, all workers save a checkpoint and exit. SIGTERM does the same.
    """

    pid: int | None = None
    """Number of its process; not needed if only one worker runs here."""
    rank: int | None = None
    """Its rank in the job."""
    all: bool = False
    """Ask all workers on this machine, of all jobs."""
    timeout: float = 60.0
    """Seconds to wait until they have gone."""

    def run(self, console: "Console") -> int:
        from polyrhythm.tables import print_line

        if not 0 < self.timeout < float("inf"):
            raise LaunchError(
                f"--timeout {self.timeout:g}",
                expected="seconds above 0",
                fix="omit it to wait for a minute",
            )
        leaving = self._chosen(running_workers())
        start = time.monotonic()
        for worker in leaving:
            if worker.is_running:
                with contextlib.suppress(ProcessLookupError):  # it exits just now
                    os.kill(worker.pid, signal.SIGTERM)
                    print_line(console, f"asked to leave: {worker}")
        for worker in leaving:
            _wait_until_gone(worker, start, self.timeout)
            print_line(console, f"has left after {time.monotonic() - start:.1f} s: {worker}")
        return 0

    def _chosen(self, found: Sequence[RunningWorker]) -> Sequence[RunningWorker]:
        chosen = [
            worker
            for worker in found
            if self.pid in (None, worker.pid) and self.rank in (None, worker.rank)
        ]
        if self.all and not (self.pid is None and self.rank is None):
            raise LaunchError(
                "--all with --pid or --rank",
                expected="all workers, or one",
                fix="omit --all, or omit the others",
            )
        if len(chosen) == 1 or (self.all and chosen):
            return chosen
        listed = "".join(f"\n    {worker}" for worker in chosen or found)
        wanted = {"pid": self.pid, "rank": self.rank}
        given = [f"--{name} {value}" for name, value in wanted.items() if value is not None]
        options = f" with {' '.join(given)}" if given else ""
        if chosen:
            raise LaunchError(
                f"{len(chosen)} workers run here:{listed}",
                expected="one of them",
                fix=f"polyrhythm leave --pid {chosen[0].pid}; or --all",
            )
        raise LaunchError(
            f"no worker of this user runs here{options}{', but' if found else ''}{listed}",
            expected="a process in which a Trainer is in use, on this machine",
            fix="choose one of these" if found else "run it on the worker's machine, as its user",
        )


def _wait_until_gone(worker: RunningWorker, start: Seconds, timeout: Seconds) -> None:
    while worker.is_running:
        waited = time.monotonic() - start
        if waited >= timeout:
            cause = "it still runs: its step, or its checkpoint, takes longer"
            raise PeerError(str(worker), action="its leave", waited=waited, cause=cause)
        time.sleep(_POLL_INTERVAL)

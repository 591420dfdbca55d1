"""The coordinator: the scheduler as a service, which workers speak to over the network.

One thread reads messages (`door.py`), asks the scheduler (`sync/scheduler.py`), and
sends what it answers (`desk.py`). Bad input changes nothing. A defect of ours ends the
service, and all workers hear of it, so that nobody waits in vain.

    with Coordinator.of(setup, bind="tcp://10.0.0.1:0", keys=keys) as coordinator:
        ...  # workers connect to coordinator.address
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from polyrhythm.errors import PolicyError
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.router_socket import RouterSocket
from polyrhythm.run.coordinator.server import LONGEST_POLL, CoordinatorServer
from polyrhythm.run.coordinator.sessions import SessionTable
from polyrhythm.run.coordinator.wire import HEARTBEATS_PER_TIMEOUT
from polyrhythm.sync.decision_log import DecisionLog
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

CLOSE_TIMEOUT: Seconds = 5.0  # for the thread to end


def _ignore(line: str) -> None:
    """Says nothing."""


class Coordinator:
    """Bound to its address when made; serves in `serve`, in a thread, or in a `with` block."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        bind: str,
        keys: JobKeys,
        policy: str,
        num_stages: int,
        num_pipelines: int,
        log: Path | None = None,
        setup: Setup | None = None,
        heartbeat_timeout: Seconds = 15.0,
        startup_timeout: Seconds = 60.0,
        log_info: Callable[[str], None] = _ignore,
        log_warning: Callable[[str], None] | None = None,
    ) -> None:
        """`policy` is what a Hello has to log_info; `setup`, needed for a log, made the scheduler.

        A worker silent for `heartbeat_timeout` is dead; workers begin together, if all have joined within
        `startup_timeout` after the first. `log_info` gets a line when one comes or goes, `log_warning` (by default the
        same) when one is lost or refused; in the serving thread.
        """
        _check_plan(scheduler, num_stages, num_pipelines)
        _check_times(heartbeat_timeout, startup_timeout)
        if log is not None and setup is None:
            raise PolicyError(
                f"log={str(log)!r} without the setup of the scheduler",
                expected="what the scheduler was made of, so that the log can be replayed",
                fix="use Coordinator.of(setup, log=...)",
            )
        self.scheduler = scheduler
        # The door first: if another coordinator has the address, its log must stay as it is.
        self._socket = RouterSocket(bind, keys, num_peers=num_stages * num_pipelines)
        self.address = self._socket.address
        try:
            written = None if log is None or setup is None else DecisionLog(log, setup)
        except OSError:
            self._socket.close()
            raise
        self._server = CoordinatorServer(
            scheduler,
            SessionTable(num_stages, num_pipelines, policy),
            self._socket,
            written,
            heartbeat_timeout=heartbeat_timeout,
            startup_timeout=startup_timeout,
            log_info=log_info,
            log_warning=log_warning or log_info,
        )
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @classmethod
    def of(
        cls,
        setup: Setup,
        *,
        bind: str,
        keys: JobKeys,
        log: Path | None = None,
        heartbeat_timeout: Seconds = 15.0,
        startup_timeout: Seconds = 60.0,
        log_info: Callable[[str], None] = _ignore,
        log_warning: Callable[[str], None] | None = None,
    ) -> Self:
        """With a new scheduler of that setup."""
        return cls(
            setup.scheduler(),
            bind=bind,
            keys=keys,
            policy=setup.text,
            num_stages=setup.num_stages,
            num_pipelines=setup.num_pipelines,
            log=log,
            setup=setup,
            heartbeat_timeout=heartbeat_timeout,
            startup_timeout=startup_timeout,
            log_info=log_info,
            log_warning=log_warning,
        )

    @property
    def counters(self) -> Counter[str]:
        """Groups by how they ended, and what was refused, ignored or lost, by kind."""
        total: Counter[str] = Counter()
        for counters in (self.scheduler.counters, self._socket.counters, self._server.counters):
            total.update(dict(counters))  # a copy at once: another thread may be counting
        return total

    @property
    def present(self) -> list[Worker]:
        """Who takes part now."""
        return [session.worker for session in self._server.sessions.active()]

    @property
    def is_over(self) -> bool:
        """Whether workers had begun, and all of them are gone."""
        return self._server.has_started and self._server.sessions.num_active == 0

    def serve(self, stop_event: threading.Event) -> None:
        """Until that is set. Raises what a defect of ours raised, once all workers were told."""
        why = "the coordinator has ended"
        try:
            while not stop_event.is_set():
                self._server.run_once()
        except BaseException as error:
            why = f"the coordinator has failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._end(why)

    def start(self) -> Self:
        """Serve in a thread of this process, until `close`."""
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()
        return self

    def wait(self, timeout: Seconds) -> bool:
        """Whether it has ended within `timeout`; `close` says why."""
        # Not by joining the thread: if Ctrl-C interrupts that, Python takes the thread for ended.
        return self._ended.wait(timeout)

    def close(self, timeout: Seconds = 0.0) -> None:
        """End, once all workers have left; raises what has ended it before.

        Or when none of them has said anything for `timeout`, but that it lives.
        """
        if self._thread is not None:
            began = time.monotonic()
            while self.present and not self.wait(0.02):
                if time.monotonic() - max(began, self._server.last_message_at) >= timeout:
                    break
            self._stop.set()
            assert self.wait(CLOSE_TIMEOUT), (
                f"the coordinator does not end within {CLOSE_TIMEOUT:g} s"
            )
            self._thread.join()
        elif not self._ended.is_set():
            self._end("the coordinator has ended")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self.serve(self._stop)
        except BaseException as error:  # for whoever closes
            self._error = error

    def _end(self, why: str) -> None:
        try:
            self._server.notify_shutdown(why)
            self._socket.close()
        finally:
            self._ended.set()


def _check_plan(scheduler: Scheduler, num_stages: int, num_pipelines: int) -> None:
    plan = len(scheduler.policies), len(scheduler.membership.stages[0])
    if plan != (num_stages, num_pipelines):
        raise PolicyError(
            f"a scheduler of {plan[0]} stages x {plan[1]} pipelines, in a job of "
            f"{num_stages} stages x {num_pipelines} pipelines",
            expected="the same plan",
            fix="make the scheduler for as many stages and pipelines",
        )


def _check_times(heartbeat_timeout: Seconds, startup_timeout: Seconds) -> None:
    shortest = 2 * HEARTBEATS_PER_TIMEOUT * LONGEST_POLL
    if not (shortest <= heartbeat_timeout < math.inf and 0 <= startup_timeout < math.inf):
        raise PolicyError(
            f"silence={heartbeat_timeout:g} startup={startup_timeout:g}",
            expected=f"a silence of {shortest:g} s or more, in which a worker beats {HEARTBEATS_PER_TIMEOUT} times "
            "and the coordinator looks more often; and 0 s or more to start up",
            fix="leave them out for 15 s and 60 s",
        )

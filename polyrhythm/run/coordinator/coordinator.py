"""The coordinator: the scheduler as a network service for workers.

One thread receives messages (`sockets.py`), passes them to the scheduler
(`sync/scheduler.py`), and sends its commands (`server.py`). Invalid input changes nothing. A defect
of ours ends the service, with a message to all workers, so that none of them waits for it.

    with Coordinator.of(setup, bind="tcp://10.0.0.1:0", keys=keys) as coordinator:
        ...  # workers connect to coordinator.address
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Self

from polyrhythm.errors import PolicyError
from polyrhythm.run.coordinator.keys import ServerKeys
from polyrhythm.run.coordinator.server import LONGEST_POLL, CoordinatorServer
from polyrhythm.run.coordinator.sessions import SessionTable
from polyrhythm.run.coordinator.sockets import RouterSocket
from polyrhythm.run.coordinator.wire import HEARTBEATS_PER_TIMEOUT
from polyrhythm.sync.decision_log import DecisionLog
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

CLOSE_TIMEOUT: Seconds = 5.0  # for the thread to end


def _ignore(line: str) -> None:
    """Drop a log line."""


class Coordinator:
    """Binds its address at once; runs in `serve`, in a thread (`start`), or in a `with` block."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        bind: str,
        keys: ServerKeys,
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
        """`policy`: the text that every Hello must have. `setup`: needed to write a `log`.

        No message for `heartbeat_timeout`: the worker is dead. Workers start together once all have
        joined, or `startup_timeout` after the first. The serving thread calls `log_info` when a
        worker joins or leaves, `log_warning` (default: `log_info`) when one is lost or refused.
        """
        _check_plan(scheduler, num_stages, num_pipelines)
        _check_times(heartbeat_timeout, startup_timeout)
        if log is not None and setup is None:
            raise PolicyError(
                f"log={str(log)!r} without setup",
                expected="the setup of the scheduler, so that the log can be replayed",
                fix="use Coordinator.of(setup, log=...)",
            )
        self.scheduler = scheduler
        # Bind before opening the log: another coordinator may have the address, and this log.
        self._socket = RouterSocket(bind, keys, num_peers=num_stages * num_pipelines)
        self.address = self._socket.address
        try:
            decision_log = None if log is None or setup is None else DecisionLog(log, setup)
        except OSError:
            self._socket.close()
            raise
        self._server = CoordinatorServer(
            scheduler,
            SessionTable(num_stages, num_pipelines, policy),
            self._socket,
            decision_log,
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
        keys: ServerKeys,
        log: Path | None = None,
        heartbeat_timeout: Seconds = 15.0,
        startup_timeout: Seconds = 60.0,
        log_info: Callable[[str], None] = _ignore,
        log_warning: Callable[[str], None] | None = None,
    ) -> Self:
        """Create a coordinator with a new scheduler for `setup`."""
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
        """Count groups by how they ended, and refused, ignored or lost messages by kind."""
        total: Counter[str] = Counter()
        for counters in (self.scheduler.counters, self._socket.counters, self._server.counters):
            total.update(dict(counters))  # an atomic copy: another thread may be counting
        return total

    @property
    def present(self) -> list[Worker]:
        """The workers that are active now."""
        return [session.worker for session in self._server.sessions.active()]

    @property
    def is_over(self) -> bool:
        """Whether workers had started, and all of them are gone."""
        return self._server.has_started and self._server.sessions.num_active == 0

    def serve(self, stop_event: threading.Event) -> None:
        """Serve until `stop_event` is set; notify all workers of a defect, then raise it."""
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
        """Return whether the service ends within `timeout`; `close` raises its error."""
        # Not Thread.join: if Ctrl-C interrupts that, Python marks the thread as ended.
        return self._ended.wait(timeout)

    def close(self, timeout: Seconds = 0.0) -> None:
        """End once all workers have left, and raise the error of the service, if any.

        Ends earlier if for `timeout` the workers have sent nothing but heartbeats.
        """
        if self._thread is not None:
            start = time.monotonic()
            while self.present and not self.wait(0.02):
                if time.monotonic() - max(start, self._server.last_message_at) >= timeout:
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self.serve(self._stop)
        except BaseException as error:  # raised by `close`
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
            fix="create the scheduler for as many stages and pipelines as the job has",
        )


def _check_times(heartbeat_timeout: Seconds, startup_timeout: Seconds) -> None:
    min_timeout = 2 * HEARTBEATS_PER_TIMEOUT * LONGEST_POLL
    if not (min_timeout <= heartbeat_timeout < math.inf and 0 <= startup_timeout < math.inf):
        raise PolicyError(
            f"heartbeat_timeout={heartbeat_timeout:g} startup_timeout={startup_timeout:g}",
            expected=f"a heartbeat timeout of at least {min_timeout:g} s, in which a worker sends "
            f"{HEARTBEATS_PER_TIMEOUT} heartbeats and the coordinator polls more often; "
            "and a startup timeout of at least 0 s",
            fix="omit them for 15 s and 60 s",
        )

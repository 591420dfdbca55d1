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
from polyrhythm.run.coordinator.desk import LONGEST_POLL, Desk
from polyrhythm.run.coordinator.door import Door
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.seats import Seats
from polyrhythm.run.coordinator.wire import BEATS
from polyrhythm.sync.decision_log import DecisionLog
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

CLOSING: Seconds = 5.0  # for the thread to end


def _silent(line: str) -> None:
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
        silence: Seconds = 15.0,
        startup: Seconds = 60.0,
        say: Callable[[str], None] = _silent,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`policy` is what a Hello has to say; `setup`, needed for a log, made the scheduler.

        A worker silent for `silence` is dead; workers begin together, if all have joined within
        `startup` after the first. `say` gets a line when one comes or goes, `warn` (by default the
        same) when one is lost or refused; in the serving thread.
        """
        _check_plan(scheduler, num_stages, num_pipelines)
        _check_times(silence, startup)
        if log is not None and setup is None:
            raise PolicyError(
                f"log={str(log)!r} without the setup of the scheduler",
                expected="what the scheduler was made of, so that the log can be replayed",
                fix="use Coordinator.of(setup, log=...)",
            )
        self.scheduler = scheduler
        # The door first: if another coordinator has the address, its log must stay as it is.
        self._door = Door(bind, keys, num_peers=num_stages * num_pipelines)
        self.address = self._door.address
        try:
            written = None if log is None or setup is None else DecisionLog(log, setup)
        except OSError:
            self._door.close()
            raise
        self._desk = Desk(
            scheduler,
            Seats(num_stages, num_pipelines, policy),
            self._door,
            written,
            silence=silence,
            startup=startup,
            say=say,
            warn=warn or say,
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
        silence: Seconds = 15.0,
        startup: Seconds = 60.0,
        say: Callable[[str], None] = _silent,
        warn: Callable[[str], None] | None = None,
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
            silence=silence,
            startup=startup,
            say=say,
            warn=warn,
        )

    @property
    def counters(self) -> Counter[str]:
        """Groups by how they ended, and what was refused, ignored or lost, by kind."""
        total: Counter[str] = Counter()
        for counters in (self.scheduler.counters, self._door.counters, self._desk.counters):
            total.update(dict(counters))  # a copy at once: another thread may be counting
        return total

    @property
    def present(self) -> list[Worker]:
        """Who takes part now."""
        return [seat.worker for seat in self._desk.seats.taken()]

    @property
    def is_over(self) -> bool:
        """Whether workers had begun, and all of them are gone."""
        return self._desk.has_begun and self._desk.seats.num_taken == 0

    def serve(self, until: threading.Event) -> None:
        """Until that is set. Raises what a defect of ours raised, once all workers were told."""
        why = "the coordinator has ended"
        try:
            while not until.is_set():
                self._desk.turn()
        except BaseException as error:
            why = f"the coordinator has failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._end(why)

    def in_thread(self) -> Self:
        """Serve in a thread of this process, until `close`."""
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()
        return self

    def wait(self, timeout: Seconds) -> bool:
        """Whether it has ended within `timeout`; `close` says why."""
        # Not by joining the thread: if Ctrl-C interrupts that, Python takes the thread for ended.
        return self._ended.wait(timeout)

    def close(self, patience: Seconds = 0.0) -> None:
        """End, once all workers have left; raises what has ended it before.

        Or when none of them has said anything for `patience`, but that it lives.
        """
        if self._thread is not None:
            began = time.monotonic()
            while self.present and not self.wait(0.02):
                if time.monotonic() - max(began, self._desk.last_word) >= patience:
                    break
            self._stop.set()
            assert self.wait(CLOSING), f"the coordinator does not end within {CLOSING:g} s"
            self._thread.join()
        elif not self._ended.is_set():
            self._end("the coordinator has ended")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self.in_thread()

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
            self._desk.farewell(why)
            self._door.close()
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


def _check_times(silence: Seconds, startup: Seconds) -> None:
    shortest = 2 * BEATS * LONGEST_POLL
    if not (shortest <= silence < math.inf and 0 <= startup < math.inf):
        raise PolicyError(
            f"silence={silence:g} startup={startup:g}",
            expected=f"a silence of {shortest:g} s or more, in which a worker beats {BEATS} times "
            "and the coordinator looks more often; and 0 s or more to start up",
            fix="leave them out for 15 s and 60 s",
        )

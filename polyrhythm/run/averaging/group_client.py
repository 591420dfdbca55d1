"""Connect a worker to the scheduler: join, run averages and sample requests, leave.

The worker's clock counts its reports: each group average and each global average has its own
number. The process that hosts the coordinator leaves last, after waiting for the others.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.events import WORKERS
from polyrhythm.run.averaging.averager import Averager, AverageResult
from polyrhythm.run.averaging.rendezvous import Rendezvous
from polyrhythm.run.comm.store import WARN_AFTER
from polyrhythm.run.coordinator.client import CoordinatorClient
from polyrhythm.run.coordinator.keys import KEYS_VARIABLE, JobKeys
from polyrhythm.run.coordinator.sample_requests import SampleFuture
from polyrhythm.run.coordinator.wire import PROTOCOL, FromWorker, Hello, TensorShapes
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.sync.decision_log import decision_log_path
from polyrhythm.sync.dispatch import Ranges, SamplerState
from polyrhythm.sync.protocol import MAX_CHUNK_SIZE, MAX_POSITION, Request
from polyrhythm.types import Seconds


class AverageTimings(NamedTuple):
    """Time spent on averages since the last query."""

    waited: Seconds  # by training
    exchange: Seconds  # the last one, from when all members were ready, waited for or not
    num_members: int  # of the last exchange; 1 if there was none


class GroupClient:
    def __init__(
        self,
        rendezvous: Rendezvous,
        shape: TensorShapes,
        *,
        node: str,
        coordinator: str | None,
        keys: Path | str | None,
        log: EventLog | None,
        decoupled: bool = False,
    ) -> None:
        """Join the job; return when all workers have joined."""
        self._timeout, self._clock = rendezvous.timeout, 0
        self._num_acquired = self._num_queries = 0
        self._waited: Seconds = 0.0
        self._policy, self._log = rendezvous.setup.policy, log
        worker, incarnation = self.me = rendezvous.me
        hello = Hello(PROTOCOL, worker, node, 0, incarnation, rendezvous.setup.text, shape)
        with ExitStack() as undo:  # a thread left running would send heartbeats of a dead worker
            self._coordinator = None
            if coordinator:
                path = Path(keys or os.environ.get(KEYS_VARIABLE, "job.keys"))
                address, client_keys = coordinator, JobKeys.load(path).client_keys
            else:
                self._coordinator, address, client_keys = rendezvous.start_coordinator(
                    _decision_log_path(log)
                )
            if self._coordinator is not None:
                undo.callback(self._coordinator.close, 0.0)
            self._averager = Averager(
                rendezvous.connections,
                self._send,
                answers_while_computing=rendezvous.setup.mode.answers_while_computing,
                decoupled=decoupled,
                log=log,
            )
            undo.callback(self._averager.close)
            self._client = CoordinatorClient(
                address,
                client_keys,
                hello,
                on_command=self._averager.on_command,
                on_failure=self._averager.fail,
                served_by="" if coordinator else str(rendezvous.setup.workers[0]),
            )
            undo.callback(self._client.close, leave=False)
            self._client.join(rendezvous.timeout, check=rendezvous.raise_failure)
            undo.pop_all()

    def request(self) -> None:
        """Ask for a group at the start of the step after which it is needed."""
        self._send(Request(self.me.worker, self._clock + 1, self.me.incarnation))

    def publish(self, read: Callable[[AverageResult | None], Tensor]) -> Tensor:
        """Publish the buffer that `read` returns, to be averaged in a group."""
        self._clock += 1
        return self._averager.publish(read, self._clock)

    def average_all(
        self, read: Callable[[AverageResult | None], Tensor], step: int
    ) -> AverageResult | None:
        """Average with all workers of the stage; None if there is no other worker."""
        self._clock += 1
        self._averager.publish(read, self._clock, average_all=True)
        self.wait(step, needed="averaging all workers", warn_after=WARN_AFTER)
        return self.pop_result()

    def wait(self, step: int, *, needed: str = "", warn_after: Seconds = math.inf) -> None:
        """Wait until the scheduler has ended the step; `step` is for the log.

        `needed` names the action that cannot continue without an average: a Skip then raises.
        """
        start = time.perf_counter()
        why = self._averager.wait(self._timeout, needed or "waiting for a group", warn_after)
        self._waited += time.perf_counter() - start
        if self._log is not None:
            self._log.write("sync", start=self._log.at(start), step=step, name=self._policy)
        if needed and why is not None:
            waited = time.perf_counter() - start
            raise PeerError("another worker", action=needed, waited=waited, cause=why)

    def pop_result(self) -> AverageResult | None:
        return self._averager.pop_result()

    def acquire(self, number: int, count: int, until: int | None) -> SampleFuture[Ranges]:
        """Request the next chunk, or again an earlier one."""
        is_possible = 1 <= count <= MAX_CHUNK_SIZE and 0 <= (until or 0) <= MAX_POSITION
        if not (is_possible and 0 <= number <= self._num_acquired):
            raise PolicyError(
                f"{self.me.worker} asks for {count} positions before {until}, as chunk {number}",
                expected=f"at least one position, and chunks in order: 0 to {self._num_acquired}",
                fix=f"ask for chunk {self._num_acquired} next",
            )
        self._num_acquired = max(self._num_acquired, number + 1)
        return self._client.acquire(number, count, until, self._timeout)

    def acknowledge(self, number: int) -> None:
        """Report that all chunks up to `number` are used."""
        self._client.acknowledge(number)

    def sampler_state(self, last_batch: int | None) -> SamplerState:
        """Return which positions all workers have used so far."""
        self._num_queries += 1
        return self._client.query_progress(self._num_queries, self._timeout, last_batch).wait()

    def pop_timings(self) -> AverageTimings:
        """Return the timings since the last call, and reset them."""
        waited, self._waited = self._waited, 0.0
        return AverageTimings(waited, *self._averager.last_exchange())

    def wait_idle(self) -> None:
        """Wait until no peer needs this worker for a committed average."""
        self._averager.wait_idle(self._timeout)

    def close(self, *, graceful: bool) -> None:
        """Leave; the host of the coordinator waits for the others.

        If not `graceful`, close at once: the coordinator marks this worker dead.
        """
        self._averager.close()
        self._client.close(leave=graceful)
        if self._coordinator is not None:
            self._coordinator.close(self._timeout if graceful else 0.0)

    def _send(self, message: FromWorker) -> None:
        self._client.send(message)


_num_logs: Counter[Path] = Counter()  # decision logs that this process has created, by run


def _decision_log_path(log: EventLog | None) -> Path | None:
    """Return the path of the decision log, in the folder of the run."""
    if log is None:
        return None
    folder = log.path.parent
    run = folder.parent if folder.name == WORKERS else folder
    _num_logs[run] += 1
    return decision_log_path(run, _num_logs[run])

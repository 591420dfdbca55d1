"""A worker's line to the scheduler: it joins, hears what to do, and leaves.

Its clock counts what it has reported: each average, or gathering, has a number of its own. Whoever
serves the coordinator for the others leaves last, after waiting for them.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.events import WORKERS, EventLog
from polyrhythm.run.average.averager import Averager, Outcome
from polyrhythm.run.average.meeting import RANK_0, SAYS_SO, Meeting
from polyrhythm.run.coordinator.client import CoordinatorClient
from polyrhythm.run.coordinator.deals import Answer
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.wire import PROTOCOL, FromWorker, Hello, Shape
from polyrhythm.sync.decision_log import decision_log
from polyrhythm.sync.dispenser import Ranges, Supply
from polyrhythm.sync.messages import MOST_AT_ONCE, MOST_POSITIONS, Request
from polyrhythm.types import Seconds


class Averaged(NamedTuple):
    """What averages took of some time."""

    waited: Seconds  # by training
    exchange: Seconds  # the last one, from when all were there, whether training waited or not
    num_members: int  # of that; 1 if there was none


class Scheduled:
    def __init__(
        self,
        meeting: Meeting,
        shape: Shape,
        *,
        node: str,
        coordinator: str | None,
        keys: Path | str | None,
        log: EventLog | None,
        decoupled: bool = False,
    ) -> None:
        """Returns when all workers have joined."""
        self._timeout, self._clock = meeting.timeout, 0
        self._num_asked = self._num_tallies = 0
        self._waited: Seconds = 0.0
        self._policy, self._log = meeting.setup.policy, log
        worker, life = self.me = meeting.me
        hello = Hello(PROTOCOL, worker, node, 0, life, meeting.setup.text, shape)
        with ExitStack() as undo:  # threads that lived on would be taken for a worker
            self._coordinator = None if coordinator else meeting.coordinate(_decisions(log))
            if self._coordinator is not None:
                undo.callback(self._coordinator.close, 0.0)
            if not coordinator:
                address, job_keys = meeting.coordinator()
            else:
                address, job_keys = coordinator, JobKeys.load(Path(keys or "job.keys"))
            self._averager = Averager(
                meeting.pairs,
                self._send,
                answers_meanwhile=meeting.setup.policy == "pairwise",
                decoupled=decoupled,
                log=log,
            )
            undo.callback(self._averager.close)
            self._client = CoordinatorClient(
                address,
                job_keys,
                hello,
                hear=self._averager.hear,
                fail=self._averager.fail,
                served_by="" if coordinator else RANK_0,
            )
            undo.callback(self._client.close, leave=False)
            client = self._client
            meeting.wait_until(lambda: client.has_joined, client.missing, "joining")
            undo.pop_all()

    def ask(self) -> None:
        """A step begins after which a group will be wanted."""
        self._send(Request(self.me.worker, self._clock + 1, self.me.life))

    def publish(self, read: Callable[[Outcome | None], Tensor]) -> Tensor:
        """What `read` gives may be averaged in a group."""
        self._clock += 1
        return self._averager.publish(read, self._clock)

    def gather(self, read: Callable[[Outcome | None], Tensor], step: int) -> Outcome | None:
        """The average with all workers of the stage; None if there is nobody else."""
        self._clock += 1
        self._averager.publish(read, self._clock, gather=True)
        self.wait(step, needed="consolidating", says_so=SAYS_SO)
        return self.take()

    def wait(self, step: int, *, needed: str = "", says_so: Seconds = math.inf) -> None:
        """Until the scheduler has sent this worker on; `step` is for the log.

        `needed` says what for: then to go on without an average is an error.
        """
        began = time.perf_counter()
        why = self._averager.wait(self._timeout, needed or "waiting for a group", says_so)
        self._waited += time.perf_counter() - began
        if self._log is not None:
            self._log.write("sync", start=self._log.at(began), step=step, name=self._policy)
        if needed and why is not None:
            waited = time.perf_counter() - began
            raise PeerError("another worker", action=needed, waited=waited, cause=why)

    def take(self) -> Outcome | None:
        return self._averager.take()

    def take_positions(self, number: int, count: int, until: int | None) -> Answer[Ranges]:
        """Ask for a chunk; one that was asked for before, or the next one."""
        is_possible = 1 <= count <= MOST_AT_ONCE and 0 <= (until or 0) <= MOST_POSITIONS
        if not (is_possible and 0 <= number <= self._num_asked):
            raise PolicyError(
                f"{self.me.worker} asks for {count} positions before {until}, as chunk {number}",
                expected=f"one position or more, and chunks in order: 0 to {self._num_asked}",
                fix=f"ask for chunk {self._num_asked} next",
            )
        self._num_asked = max(self._num_asked, number + 1)
        return self._client.take(number, count, until, self._timeout)

    def use_positions(self, number: int) -> None:
        """All chunks up to that one are used."""
        self._client.use(number)

    def supply(self, last_batch: int | None) -> Supply:
        """Which positions were used by now, by all."""
        self._num_tallies += 1
        return self._client.tally(self._num_tallies, self._timeout, last_batch).wait()

    def averaged(self) -> Averaged:
        """Since it was asked the last time."""
        waited, self._waited = self._waited, 0.0
        return Averaged(waited, *self._averager.last_exchange())

    def settle(self) -> None:
        """Until nobody needs this worker for an average that has been committed."""
        self._averager.settle(self._timeout)

    def close(self, *, in_order: bool) -> None:
        """Leave; who serves the others waits for them. If not `in_order`, be missed: at once."""
        self._averager.close()
        self._client.close(leave=in_order)
        if self._coordinator is not None:
            self._coordinator.close(self._timeout if in_order else 0.0)

    def _send(self, message: FromWorker) -> None:
        self._client.send(message)


_num_logs: Counter[Path] = Counter()  # that this process has begun, by run


def _decisions(log: EventLog | None) -> Path | None:
    """Where the scheduler's log goes: to the folder of the run, beside that of the workers."""
    if log is None:
        return None
    folder = log.path.parent
    run = folder.parent if folder.name == WORKERS else folder
    _num_logs[run] += 1
    return decision_log(run, _num_logs[run])

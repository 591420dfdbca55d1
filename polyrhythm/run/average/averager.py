"""Sees a worker's averages through: publish, exchange, Done, then Commit applies or Abort forgets.

Training publishes a buffer and says Ready. A thread of its own then does what the scheduler says:
on Assign it exchanges with the other members, out of place, and says Done; on Commit the mean
counts; on Abort nothing has happened. Training may wait for the outcome, or go on and take it in at
the next step's end: then it adds the difference to what the weights have become meanwhile
(x += mean - published). Differences of a group add up to zero, so the mean of all weights stays.

An average in two halves (`halves.py`) counts at Commit as well, when each member has its own part
of the mean. Training goes on, and the thread gathers the parts of the others.

A worker that answers while it computes (the passive side of a pair) has its latest buffer averaged,
without being asked, any number of times between two of its steps; differences add up.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from torch import Tensor

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.events import EventLog
from polyrhythm.run.average.arriving import Arriving
from polyrhythm.run.average.exchange import mean
from polyrhythm.run.average.halves import Halves
from polyrhythm.run.average.pairs import Pairs, Peer
from polyrhythm.run.coordinator.wire import FromWorker, ToWorker
from polyrhythm.sync.messages import Abort, Assign, Commit, Done, Gather, Heal, Ready, Skip
from polyrhythm.types import Seconds

# Only if the scheduler falls silent: it gives up a group that waits too long, and says so.
_LONGEST: Seconds = 900.0
_CLOSING: Seconds = 30.0  # for the thread, whose exchange has been broken off

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has become of what was published."""

    published: Tensor
    value: Tensor
    arriving: Arriving | None = None  # what fills `value`, if it is not there yet

    @property
    def difference(self) -> Tensor:
        return self.value - self.published


@dataclass(frozen=True, slots=True)
class _Exchanged:
    gid: int
    published: Tensor
    mean: Tensor
    halves: Halves | None  # if the mean is not there yet
    deadline: Seconds
    why: str
    began: Seconds
    took: Seconds


class Averager:
    """Of one worker. The coordinator's client calls `hear` and `fail`, training calls the rest.

    `answers_meanwhile`: exchanges whenever it is asked to, else only once training has published.
    `decoupled`: in two halves, but for what is gathered from all.
    """

    def __init__(
        self,
        pairs: Pairs,
        send: Callable[[FromWorker], None],
        *,
        answers_meanwhile: bool,
        decoupled: bool,
        log: EventLog | None,
    ) -> None:
        self._pairs, self._send, self._log = pairs, send, log
        self._answers_meanwhile, self._decoupled = answers_meanwhile, decoupled
        self._commands: SimpleQueue[ToWorker | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._published: Tensor | None = None
        self._value: Tensor | None = None  # the same, with all averages since
        self._arriving: Arriving | None = None  # what fills that, if it is not there yet
        self._is_whole = True  # what was published is averaged in one piece
        self._clock: int | None = None  # of the step whose end training is to be told
        self._missed: str | None = None  # why the last step has no average, though one was due
        self._exchanged: _Exchanged | None = None
        self._running: tuple[int, list[Peer]] | None = None  # a group in the midst of its exchange
        self._given_up: set[int] = set()  # groups whose Abort has come, and not been seen to
        self._last_exchange: tuple[Seconds, int] = 0.0, 1  # how long, and of how many
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="averager", daemon=True)
        self._thread.start()

    def publish(
        self, read: Callable[[Outcome | None], Tensor], clock: int, *, gather: bool = False
    ) -> Tensor:
        """Training has made a local update: what `read` gives may be averaged, and is returned.

        `read` takes in what has come since the last time, first.
        """
        with self._changed:
            self._raise_error()
            assert self._clock is None, "the last step has ended"
            self._published = self._value = flat = read(self._taken())
            self._clock, self._missed = clock, None
            self._arriving, self._is_whole = None, gather or not self._decoupled
            self._changed.notify_all()
        worker, life = self._pairs.me
        message = Gather if gather else Ready
        self._send(message(worker, clock, life))
        return flat

    def wait(self, timeout: Seconds, action: str, says_so: Seconds = math.inf) -> str | None:
        """Until the step has ended; why without an average, if there should have been one."""
        began = time.monotonic()
        with self._changed:
            if says_so < timeout and not self._changed.wait_for(self._is_over, says_so):
                _logger.warning(
                    "%s has waited %g s for others while %s, and gives up after %g s",
                    *(self._pairs.me.worker, says_so, action, timeout),
                )
                timeout -= says_so
            over = self._changed.wait_for(self._is_over, timeout)
            self._raise_error()
            if not over:
                raise PeerError(
                    "another worker",
                    action=action,
                    waited=time.monotonic() - began,
                    cause="it is alive, but not ready; the scheduler's log says who was missing",
                )
            return self._missed

    def take(self) -> Outcome | None:
        """What has come since the last time, for training to take in."""
        with self._changed:
            return self._taken()

    def last_exchange(self) -> tuple[Seconds, int]:
        """How long that of the last group took, and of how many; told once."""
        with self._changed:
            last, self._last_exchange = self._last_exchange, (0.0, 1)
        return last

    def hear(self, command: ToWorker) -> None:
        """A command of the scheduler."""
        if isinstance(command, Abort):
            with self._changed:
                self._given_up.add(command.gid)
                running = self._running
                self._changed.notify_all()
            # Before it is in the queue: then no later group uses these connections yet.
            if running is not None and running[0] == command.gid:
                self._pairs.break_off(running[1])
        self._commands.put(command)

    def fail(self, error: Exception) -> None:
        """Nothing more will come: training is to be told why."""
        with self._changed:
            self._error = self._error or error
            running = self._running
            self._changed.notify_all()
        if running is not None:
            self._pairs.break_off(running[1])

    def settle(self, timeout: Seconds) -> None:
        """Until nobody needs this worker for an average that has been committed."""
        with self._changed:
            self._changed.wait_for(lambda: self._running is None, timeout)

    def close(self) -> None:
        self.fail(RuntimeError("averaging is over"))
        self._commands.put(None)
        self._thread.join(_CLOSING)
        self._pairs.close()

    def _taken(self) -> Outcome | None:
        if self._published is None or self._value is None or self._value is self._published:
            return None
        outcome = Outcome(self._published, self._value, self._arriving)
        self._published = self._value
        return outcome

    def _is_over(self) -> bool:
        return self._clock is None or self._error is not None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                self._see_to(command)
            except Exception as error:  # a defect of ours: training must hear of it
                self.fail(error)

    def _see_to(self, command: ToWorker) -> None:
        if isinstance(command, Assign):
            self._average(command)
        elif isinstance(command, Commit):
            self._commit(command)
        elif isinstance(command, Abort):
            self._abort(command)
        elif isinstance(command, Skip):
            with self._changed:
                if command.failed and command.clock == self._clock:
                    self._missed = command.why
                self._end_step(command.clock)
        elif isinstance(command, Heal):
            self.fail(
                PolicyError(
                    f"{command.worker} joins a job that has begun",
                    expected="all workers there from the beginning",
                    fix="start the job anew, from a checkpoint",
                )
            )

    def _average(self, assign: Assign) -> None:
        members = [Peer(*peer) for peer in zip(assign.members, assign.lives, strict=True)]
        others = [peer for peer in members if peer != self._pairs.me]
        with self._changed:
            self._changed.wait_for(lambda: self._may_begin(assign.gid))
            if self._error or assign.gid in self._given_up:
                return
            published = self._value
            assert published is not None, "published before it was ready"
            self._running = assign.gid, others
        found = self._exchange(assign, members, others, published)
        with self._changed:
            self._running, self._exchanged = None, found
        if found is None:
            self._pairs.drop(peer.worker for peer in others)
        worker, life = self._pairs.me
        self._send(Done(worker, assign.gid, found is not None, life))

    def _may_begin(self, gid: int) -> bool:
        is_ready = self._clock is not None
        if self._answers_meanwhile:
            is_ready = self._published is not None
        return is_ready or gid in self._given_up or self._error is not None

    def _exchange(
        self, assign: Assign, members: list[Peer], others: list[Peer], published: Tensor
    ) -> _Exchanged | None:
        """Whole or its first half; None if somebody was lost: the scheduler finds out who."""

        def stopped() -> bool:
            return assign.gid in self._given_up or self._error is not None

        gid, weights, began = assign.gid, assign.weights, time.perf_counter()
        halves: Halves | None = None
        try:
            self._pairs.connect(others, str(gid), deadline=_LONGEST, stopped=stopped)
            if stopped():  # while the last pair was made, which nobody could break off
                return None
            if self._is_whole:
                found = mean(self._pairs, members, weights, published, number=gid, timeout=_LONGEST)
            else:
                halves = Halves(self._pairs, members, published, number=gid)
                found = halves.scatter(weights, timeout=_LONGEST)
            took = time.perf_counter() - began
            return _Exchanged(
                gid, published, found, halves, assign.deadline, assign.why, began, took
            )
        except PeerError as error:
            if self._log is not None:
                self._log.write("average_failed", name=str(gid), why=str(error))
            return None

    def _commit(self, commit: Commit) -> None:
        self._pairs.release()  # all members have said Done
        with self._changed:
            done, self._exchanged = self._exchanged, None
            assert done is not None, f"group {commit.gid} is committed after our Done"
            assert done.gid == commit.gid, f"group {done.gid} was to be committed"
            self._last_exchange = done.took, len(commit.members)
            if self._value is done.published:
                self._value = done.mean
                if done.halves is not None:
                    self._arriving = done.halves.arriving
                    self._running = done.gid, done.halves.others
            else:  # training has published anew since the exchange began
                assert self._value is not None, "something was exchanged"
                assert done.halves is None, "training waits for the first half"
                self._value = self._value + (done.mean - done.published)
            self._end_step(commit.ends[commit.members.index(self._pairs.me.worker)])
        if done.halves is not None:
            self._gather(done, done.halves)
        self._record(done, commit)

    def _gather(self, done: _Exchanged, halves: Halves) -> None:
        """The second half, while training goes on."""
        try:
            mended = halves.gather(done.deadline, lambda: self._error is not None)
        except Exception as error:
            halves.arriving.fail(self._error or error)
            if self._error is None:
                raise
            return
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()
        if mended is not None and self._log is not None:
            self._log.write("average_mended", name=str(done.gid), why=mended)

    def _abort(self, abort: Abort) -> None:
        with self._changed:
            self._given_up.discard(abort.gid)
            self._exchanged = None
        others = [worker for worker in abort.members if worker != self._pairs.me.worker]
        self._pairs.drop(others)

    def _end_step(self, clock: int) -> None:
        """Of that clock, if it has not ended yet; a worker that answers meanwhile ends none."""
        if clock == self._clock:
            self._clock = None
            self._changed.notify_all()

    def _record(self, done: _Exchanged, commit: Commit) -> None:
        if self._log is not None:
            members = " ".join(map(str, commit.members))
            self._log.write(
                "average",
                start=self._log.at(done.began),
                name=str(done.gid),
                why=done.why,
                values={"members": members, "bytes": done.mean.nbytes},
            )

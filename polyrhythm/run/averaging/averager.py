"""Sees a worker's averages through: publish, exchange, Done, then Commit applies or Abort forgets.

Training publishes a buffer and says Ready. A thread of its own then does what the scheduler says:
on Assign it exchanges with the other members, out of place, and says Done; on Commit the mean
counts; on Abort nothing has happened. Training may wait for the outcome, or go on and take it in at
the next step's end: then it adds the difference to what the weights have become meanwhile
(x += mean - published). Differences of a group add up to zero, so the mean of all weights stays.

An average in two halves (`split.py`) counts at Commit as well, when each member has its own part
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
from polyrhythm.run.averaging.exchange import all_reduce_mean
from polyrhythm.run.averaging.peer_connections import Peer, PeerConnections
from polyrhythm.run.averaging.split_all_reduce import SplitAllReduce
from polyrhythm.run.averaging.streaming import StreamingBuffer
from polyrhythm.run.coordinator.wire import FromWorker, ToWorker
from polyrhythm.sync.protocol import Abort, Assign, AverageAll, Commit, CopyFrom, Done, Ready, Skip
from polyrhythm.types import Seconds

# Only if the scheduler falls silent: it gives up a group that waits too long, and says so.
_EXCHANGE_TIMEOUT: Seconds = 900.0
_CLOSE_TIMEOUT: Seconds = 30.0  # for the thread, whose exchange has been broken off

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AverageResult:
    """What has become of what was published."""

    published: Tensor
    value: Tensor
    streaming_buffer: StreamingBuffer | None = None  # what fills `value`, if it is not there yet

    @property
    def difference(self) -> Tensor:
        return self.value - self.published


@dataclass(frozen=True, slots=True)
class _Exchange:
    gid: int
    published: Tensor
    mean: Tensor
    split: SplitAllReduce | None  # if the mean is not there yet
    timeout: Seconds
    why: str
    began: Seconds
    took: Seconds


class Averager:
    """Of one worker. The coordinator's client calls `on_command` and `fail`, training calls the rest.

    `answers_while_computing`: exchanges whenever it is asked to, else only once training has published.
    `decoupled`: in two halves, but for what is gathered from all.
    """

    def __init__(
        self,
        connections: PeerConnections,
        send: Callable[[FromWorker], None],
        *,
        answers_while_computing: bool,
        decoupled: bool,
        log: EventLog | None,
    ) -> None:
        self._connections, self._send, self._log = connections, send, log
        self._answers_while_computing, self._decoupled = answers_while_computing, decoupled
        self._commands: SimpleQueue[ToWorker | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._published: Tensor | None = None
        self._value: Tensor | None = None  # the same, with all averages since
        self._streaming_buffer: StreamingBuffer | None = (
            None  # what fills that, if it is not there yet
        )
        self._is_unsplit = True  # what was published is averaged in one piece
        self._clock: int | None = None  # of the step whose end training is to be told
        self._skip_reason: str | None = None  # why the last step has no average, though one was due
        self._pending_exchange: _Exchange | None = None
        self._running: tuple[int, list[Peer]] | None = None  # a group in the midst of its exchange
        self._aborted: set[int] = set()  # groups whose Abort has come, and not been seen to
        self._last_exchange: tuple[Seconds, int] = 0.0, 1  # how long, and of how many
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="averager", daemon=True)
        self._thread.start()

    def publish(
        self,
        read: Callable[[AverageResult | None], Tensor],
        clock: int,
        *,
        average_all: bool = False,
    ) -> Tensor:
        """Training has made a local update: what `read` gives may be averaged, and is returned.

        `read` takes in what has come since the last time, first.
        """
        with self._changed:
            self._raise_error()
            assert self._clock is None, "the last step has ended"
            self._published = self._value = flat = read(self._pop_locked())
            self._clock, self._skip_reason = clock, None
            self._streaming_buffer, self._is_unsplit = None, average_all or not self._decoupled
            self._changed.notify_all()
        worker, incarnation = self._connections.me
        message = AverageAll if average_all else Ready
        self._send(message(worker, clock, incarnation))
        return flat

    def wait(self, timeout: Seconds, action: str, warn_after: Seconds = math.inf) -> str | None:
        """Until the step has ended; why without an average, if there should have been one."""
        began = time.monotonic()
        with self._changed:
            if warn_after < timeout and not self._changed.wait_for(
                self._step_has_ended, warn_after
            ):
                _logger.warning(
                    "%s has waited %g s for others while %s, and gives up after %g s",
                    *(self._connections.me.worker, warn_after, action, timeout),
                )
                timeout -= warn_after
            has_ended = self._changed.wait_for(self._step_has_ended, timeout)
            self._raise_error()
            if not has_ended:
                raise PeerError(
                    "another worker",
                    action=action,
                    waited=time.monotonic() - began,
                    cause="it is alive, but not ready; the scheduler's log says who was missing",
                )
            return self._skip_reason

    def pop_result(self) -> AverageResult | None:
        """What has come since the last time, for training to take in."""
        with self._changed:
            return self._pop_locked()

    def last_exchange(self) -> tuple[Seconds, int]:
        """How long that of the last group took, and of how many; told once."""
        with self._changed:
            last, self._last_exchange = self._last_exchange, (0.0, 1)
        return last

    def on_command(self, command: ToWorker) -> None:
        """A command of the scheduler."""
        if isinstance(command, Abort):
            with self._changed:
                self._aborted.add(command.gid)
                running = self._running
                self._changed.notify_all()
            # Before it is in the queue: then no later group uses these connections yet.
            if running is not None and running[0] == command.gid:
                self._connections.abort(running[1])
        self._commands.put(command)

    def fail(self, error: Exception) -> None:
        """Nothing more will come: training is to be told why."""
        with self._changed:
            self._error = self._error or error
            running = self._running
            self._changed.notify_all()
        if running is not None:
            self._connections.abort(running[1])

    def wait_idle(self, timeout: Seconds) -> None:
        """Until nobody needs this worker for an average that has been committed."""
        with self._changed:
            self._changed.wait_for(lambda: self._running is None, timeout)

    def close(self) -> None:
        self.fail(RuntimeError("averaging is over"))
        self._commands.put(None)
        self._thread.join(_CLOSE_TIMEOUT)
        self._connections.close()

    def _pop_locked(self) -> AverageResult | None:
        if self._published is None or self._value is None or self._value is self._published:
            return None
        result = AverageResult(self._published, self._value, self._streaming_buffer)
        self._published = self._value
        return result

    def _step_has_ended(self) -> bool:
        return self._clock is None or self._error is not None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                self._handle(command)
            except Exception as error:  # a defect of ours: training must hear of it
                self.fail(error)

    def _handle(self, command: ToWorker) -> None:
        if isinstance(command, Assign):
            self._average(command)
        elif isinstance(command, Commit):
            self._commit(command)
        elif isinstance(command, Abort):
            self._abort(command)
        elif isinstance(command, Skip):
            with self._changed:
                if command.failed and command.clock == self._clock:
                    self._skip_reason = command.why
                self._end_step(command.clock)
        elif isinstance(command, CopyFrom):
            self.fail(
                PolicyError(
                    f"{command.worker} joins a job that has begun",
                    expected="all workers there from the beginning",
                    fix="start the job anew, from a checkpoint",
                )
            )

    def _average(self, assign: Assign) -> None:
        members = [Peer(*peer) for peer in zip(assign.members, assign.incarnations, strict=True)]
        others = [peer for peer in members if peer != self._connections.me]
        with self._changed:
            self._changed.wait_for(lambda: self._can_start(assign.gid))
            if self._error or assign.gid in self._aborted:
                return
            published = self._value
            assert published is not None, "published before it was ready"
            self._running = assign.gid, others
        found = self._exchange(assign, members, others, published)
        with self._changed:
            self._running, self._pending_exchange = None, found
        if found is None:
            self._connections.drop(peer.worker for peer in others)
        worker, incarnation = self._connections.me
        self._send(Done(worker, assign.gid, found is not None, incarnation))

    def _can_start(self, gid: int) -> bool:
        is_ready = self._clock is not None
        if self._answers_while_computing:
            is_ready = self._published is not None
        return is_ready or gid in self._aborted or self._error is not None

    def _exchange(
        self, assign: Assign, members: list[Peer], others: list[Peer], published: Tensor
    ) -> _Exchange | None:
        """Whole or its first half; None if somebody was lost: the scheduler finds out who."""

        def should_stop() -> bool:
            return assign.gid in self._aborted or self._error is not None

        gid, weights, began = assign.gid, assign.weights, time.perf_counter()
        split: SplitAllReduce | None = None
        try:
            self._connections.connect(
                others, str(gid), timeout=_EXCHANGE_TIMEOUT, should_stop=should_stop
            )
            if should_stop():  # while the last pair was made, which nobody could break off
                return None
            if self._is_unsplit:
                found = all_reduce_mean(
                    self._connections,
                    members,
                    weights,
                    published,
                    number=gid,
                    timeout=_EXCHANGE_TIMEOUT,
                )
            else:
                split = SplitAllReduce(self._connections, members, published, number=gid)
                found = split.reduce_scatter(weights, timeout=_EXCHANGE_TIMEOUT)
            took = time.perf_counter() - began
            return _Exchange(gid, published, found, split, assign.timeout, assign.why, began, took)
        except PeerError as error:
            if self._log is not None:
                self._log.write("average_failed", name=str(gid), why=str(error))
            return None

    def _commit(self, commit: Commit) -> None:
        self._connections.release()  # all members have said Done
        with self._changed:
            done, self._pending_exchange = self._pending_exchange, None
            assert done is not None, f"group {commit.gid} is committed after our Done"
            assert done.gid == commit.gid, f"group {done.gid} was to be committed"
            self._last_exchange = done.took, len(commit.members)
            if self._value is done.published:
                self._value = done.mean
                if done.split is not None:
                    self._streaming_buffer = done.split.streaming_buffer
                    self._running = done.gid, done.split.others
            else:  # training has published anew since the exchange began
                assert self._value is not None, "something was exchanged"
                assert done.split is None, "training waits for the first half"
                self._value = self._value + (done.mean - done.published)
            self._end_step(commit.end_clocks[commit.members.index(self._connections.me.worker)])
        if done.split is not None:
            self._all_gather(done, done.split)
        self._record(done, commit)

    def _all_gather(self, done: _Exchange, split: SplitAllReduce) -> None:
        """The second half, while training goes on."""
        try:
            repaired = split.all_gather(done.timeout, lambda: self._error is not None)
        except Exception as error:
            split.streaming_buffer.fail(self._error or error)
            if self._error is None:
                raise
            return
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()
        if repaired is not None and self._log is not None:
            self._log.write("average_repaired", name=str(done.gid), why=repaired)

    def _abort(self, abort: Abort) -> None:
        with self._changed:
            self._aborted.discard(abort.gid)
            self._pending_exchange = None
        others = [worker for worker in abort.members if worker != self._connections.me.worker]
        self._connections.drop(others)

    def _end_step(self, clock: int) -> None:
        """Of that clock, if it has not ended yet; a worker that answers meanwhile ends none."""
        if clock == self._clock:
            self._clock = None
            self._changed.notify_all()

    def _record(self, done: _Exchange, commit: Commit) -> None:
        if self._log is not None:
            members = " ".join(map(str, commit.members))
            self._log.write(
                "average",
                start=self._log.at(done.began),
                name=str(done.gid),
                why=done.why,
                values={"members": members, "bytes": done.mean.nbytes},
            )

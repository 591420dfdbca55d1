"""Run a worker's rounds: publish, exchange, Done, then Commit applies the mean or Abort drops it.

Training publishes a buffer and sends Ready. The averager's thread executes the scheduler's
commands: on Assign it exchanges with the other members, out of place, and sends Done; on Commit the
mean becomes valid; on Abort nothing has changed. Training waits for the result, or continues and
applies it at the end of the next step: it then adds the difference to the current weights
(x += mean - published). Differences of a group sum to zero, so the mean of all weights is kept.
State that decays is treated otherwise (`buffers.merge_state`).

Gradients are published while backward still computes them: the exchange of each bucket waits until
it is filled. A buffer that will not be completed is retracted: its exchange fails, nothing has
changed, and the group is tried again with the buffer that is published next.

A split all-reduce (`split_all_reduce.py`) is valid at Commit as well, when each member has its own
shard of the mean. Training continues, and the thread all-gathers the shards of the others.

A worker that answers while it computes (the passive side of a pair) has its latest buffer averaged
any number of times between two of its steps, without being asked; the differences add up.

`GroupClient` connects all this to the coordinator. A worker's clock counts its reports: each group
average and each global average has its own number. The process that hosts the coordinator leaves
last, after waiting for the others.
"""

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from torch import Tensor

from polyrhythm.errors import PeerError, PolicyError, SingleWorkerError
from polyrhythm.events import WORKERS
from polyrhythm.run.averaging.buffers import ReplicaState, check_finite
from polyrhythm.run.averaging.exchange import (
    DRAIN_TIMEOUT,
    Peer,
    PeerConnections,
    RoundShape,
    all_reduce_mean,
    direct_peers,
    owners,
    shard_slices,
)
from polyrhythm.run.averaging.rendezvous import Rendezvous
from polyrhythm.run.averaging.split_all_reduce import (
    BucketedAllReduce,
    FillingBuffer,
    SplitAllReduce,
    StreamingBuffer,
    bucket_shards,
    split_shards,
)
from polyrhythm.run.comm.epoch import current_epoch
from polyrhythm.run.comm.process_groups import step_timeout
from polyrhythm.run.comm.store import WARN_AFTER
from polyrhythm.run.coordinator.client import CoordinatorClient
from polyrhythm.run.coordinator.keys import KEYS_VARIABLE, JobKeys
from polyrhythm.run.coordinator.sessions import (
    PROTOCOL,
    FromWorker,
    Hello,
    ToWorker,
)
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.sync.decision_log import decision_log_path
from polyrhythm.sync.protocol import (
    Abort,
    Assign,
    AverageAll,
    Commit,
    CopyFrom,
    Done,
    Ready,
    Request,
    Skip,
)
from polyrhythm.types import AverageTimings, Seconds, Worker

# Reached only without a scheduler, which sends Abort to a group that waits too long.
_EXCHANGE_TIMEOUT: Seconds = 900.0
_CLOSE_TIMEOUT: Seconds = 30.0  # for the thread to end an exchange that has been aborted

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AverageResult:
    """A published buffer and its average."""

    published: Tensor
    value: Tensor
    streaming_buffer: StreamingBuffer | None = None  # fills `value`, if the all-gather still runs


@dataclass(frozen=True, slots=True)
class _Exchange:
    gid: int
    published: Tensor
    mean: Tensor
    split: SplitAllReduce | None  # if the all-gather is still to come
    timeout: Seconds
    why: str
    start: Seconds
    duration: Seconds


class Averager:
    """The averages of one worker.

    The coordinator's client calls `on_command` and `fail`, training calls the rest.
    `answers_while_computing`: exchange on every Assign, else only once training has published.
    `decoupled`: reduce-scatter before the Commit and all-gather after it, except in `average_all`.
    `averages_alone`: a group of one is an average, too. `merge` applies the mean of an earlier
    buffer (second argument) to a later one.
    """

    def __init__(
        self,
        connections: PeerConnections,
        send: Callable[[FromWorker], None],
        *,
        answers_while_computing: bool,
        decoupled: bool,
        averages_alone: bool,
        merge: Callable[[Tensor, Tensor, Tensor], Tensor],
        log: EventLog | None,
    ) -> None:
        self._connections, self._send, self._log = connections, send, log
        self._averages_alone, self._merge = averages_alone, merge
        self._answers_while_computing, self._decoupled = answers_while_computing, decoupled
        self._commands: SimpleQueue[ToWorker | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._published: Tensor | None = None
        self._value: Tensor | None = None  # `_published` plus all averages since
        self._filling: FillingBuffer | None = None  # fills `_published`, if training still does
        self._streaming_buffer: StreamingBuffer | None = None  # fills `_value` during an all-gather
        self._is_unsplit = True  # average the published buffer in one piece
        self._clock: int | None = None  # of the step that has not ended yet
        self._skip_reason: str | None = None  # why the last step's average failed, if it did
        self._pending_exchange: _Exchange | None = None
        self._running: tuple[int, list[Peer]] | None = None  # the group that exchanges now
        self._aborted: set[int] = set()  # groups whose Abort is received, but not yet handled
        self._last_exchange: tuple[Seconds, int] = 0.0, 1  # duration, number of members
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="averager", daemon=True)
        current_epoch().on_end(self.fail)
        current_epoch().on_unreachable(self.lose)
        self._thread.start()

    def publish(
        self,
        read: Callable[[AverageResult | None], Tensor],
        clock: int,
        *,
        average_all: bool = False,
        filling: FillingBuffer | None = None,
    ) -> Tensor:
        """Publish the buffer that `read` returns after a local update, and return it.

        `read` gets the result since the last publish, to apply it first. `filling`: fills the
        buffer from now on. After `retract` the buffer replaces the retracted one.
        """
        with self._changed:
            self._raise_error()
            is_ready = self.is_ready
            assert not is_ready or self._value is None, "the last step has ended"
            self._published = self._value = flat = read(self._pop_locked())
            self._clock = self._clock if is_ready else clock
            self._filling, self._skip_reason = filling, None
            self._streaming_buffer, self._is_unsplit = None, average_all or not self._decoupled
            self._changed.notify_all()
        if not is_ready:
            worker, incarnation = self._connections.me
            message = AverageAll if average_all else Ready
            self._send(message(worker, clock, incarnation))
        return flat

    @property
    def is_ready(self) -> bool:
        """Whether the scheduler counts this worker as ready: its step has not ended yet."""
        return self._clock is not None

    def retract(self, why: str) -> None:
        """Withdraw a buffer that will not be completed; return when no exchange uses it.

        This worker stays ready: `publish` another buffer in its place.
        """
        worker = str(self._connections.me.worker)
        with self._changed:
            if self._filling is not None:
                self._filling.fail(PeerError(worker, action="averaging", waited=0.0, cause=why))
            self._filling = self._published = self._value = None
            self._changed.wait_for(lambda: self._running is None, _CLOSE_TIMEOUT)

    def wait(self, timeout: Seconds, action: str, warn_after: Seconds = math.inf) -> str | None:
        """Wait until the step has ended; return why its average failed, or None."""
        start = time.monotonic()
        with self._changed:
            if warn_after < timeout and not self._changed.wait_for(
                self._step_has_ended, warn_after
            ):
                _logger.warning(
                    "%s has waited %g s for other workers while %s; timeout is %g s",
                    *(self._connections.me.worker, warn_after, action, timeout),
                )
                timeout -= warn_after
            has_ended = self._changed.wait_for(self._step_has_ended, timeout)
            self._raise_error()
            if not has_ended:
                raise PeerError(
                    "another worker",
                    action=action,
                    waited=time.monotonic() - start,
                    cause="it is not ready, or does not answer: it is the one without the last "
                    "Ready in the scheduler's log, scheduler.jsonl",
                )
            return self._skip_reason

    def pop_result(self) -> AverageResult | None:
        """Return the averages since the last call, or None if there are none."""
        with self._changed:
            return self._pop_locked()

    def last_exchange(self) -> tuple[Seconds, int]:
        """Return duration and number of members of the last exchange, and reset them."""
        with self._changed:
            last, self._last_exchange = self._last_exchange, (0.0, 1)
        return last

    def on_command(self, command: ToWorker) -> None:
        """Queue a command of the scheduler; an Abort interrupts the running exchange at once."""
        if isinstance(command, Abort):
            with self._changed:
                self._aborted.add(command.gid)
                running = self._running
                self._wake()
            # Cancel before queueing the command: no later group uses these connections yet.
            if running is not None and running[0] == command.gid:
                self._connections.cancel(is_late=command.is_late)
                end_wait = self._connections.end_wait
                timer = threading.Timer(DRAIN_TIMEOUT, end_wait, [command.gid])
                timer.daemon = True
                timer.start()
        self._commands.put(command)

    def fail(self, error: Exception) -> None:
        """Make training raise `error`: no more commands will arrive."""
        with self._changed:
            self._error = self._error or error
            running = self._running
            self._wake()
        if running is not None:
            self._connections.abort(running[1])

    def lose(self, workers: Collection[Worker]) -> None:
        """End waits for workers that this one does not reach any more: averages go around them."""
        self._connections.lose(workers)

    def wait_idle(self, timeout: Seconds) -> None:
        """Wait until no peer needs this worker for a committed average."""
        with self._changed:
            self._changed.wait_for(lambda: self._running is None, timeout)

    def close(self) -> None:
        self.fail(RuntimeError("the averager is closed"))
        self._commands.put(None)
        self._thread.join(_CLOSE_TIMEOUT)
        self._connections.close()

    def _pop_locked(self) -> AverageResult | None:
        if self._published is None or self._value is None or self._value is self._published:
            return None
        result = AverageResult(self._published, self._value, self._streaming_buffer)
        self._published = self._value
        return result

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._filling is not None:
            self._filling.wake()

    def _step_has_ended(self) -> bool:
        return self._clock is None or self._error is not None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                self._handle(command)
            except Exception as error:  # a defect of ours: training must raise it
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
                if command.clock == self._clock:
                    if command.failed:
                        self._skip_reason = command.why
                    elif self._averages_alone and self._published is not None:
                        self._value = self._published.view_as(self._published)  # a new result
                self._end_step(command.clock)
        elif isinstance(command, CopyFrom):
            self.fail(
                PolicyError(
                    f"{command.worker} joins a job that has started",
                    expected="all workers present from the start",
                    fix="restart the job from a checkpoint",
                )
            )

    def _average(self, assign: Assign) -> None:
        members = [Peer(*peer) for peer in zip(assign.members, assign.incarnations, strict=True)]
        others = direct_peers(members, self._connections.me, assign.apart)
        with self._changed:
            self._changed.wait_for(lambda: self._can_start(assign.gid))
            if self._error:
                return
            published, filling = self._value, self._filling
            is_aborted = assign.gid in self._aborted
            self._running = None if is_aborted else (assign.gid, others)
        if is_aborted:
            self._leave(assign, members, others, published, filling)
            return
        assert published is not None, "training publishes before it sends Ready"
        exchange = self._exchange(assign, members, others, published, filling)
        with self._changed:
            self._running, self._pending_exchange = None, exchange
            self._changed.notify_all()
        worker, incarnation = self._connections.me
        lost = self._connections.pop_lost()
        self._send(Done(worker, assign.gid, exchange is not None, incarnation, lost=lost))
        if exchange is None:
            self._connections.drain()
            self._report_lost(assign.gid)

    def _leave(
        self,
        assign: Assign,
        members: list[Peer],
        others: list[Peer],
        published: Tensor | None,
        filling: FillingBuffer | None,
    ) -> None:
        """Answer the members of a group that was aborted before this worker could start."""
        if published is None:  # the sizes of messages are unknown
            self._connections.abort(others)
            self._connections.drop(peer.worker for peer in others)
            return
        self._connections.begin(self._shape(assign, members, published, filling), others)
        self._connections.drain()
        # The others may have stopped to wait for this worker.
        self._connections.pop_lost()
        self._connections.pop_slow()

    def _shape(
        self,
        assign: Assign,
        members: list[Peer],
        published: Tensor,
        filling: FillingBuffer | None,
    ) -> RoundShape:
        """Return what all messages of the group follow from."""
        is_split, element_bytes = filling is None and not self._is_unsplit, published.element_size()
        if filling is not None:
            shards = bucket_shards(filling.memory, members, assign.apart)
        elif is_split:
            shards = split_shards(published, members, assign.apart)
        else:
            owning = owners(members, assign.apart)
            shards = shard_slices(published.numel(), len(members), element_bytes, owners=owning)
        return RoundShape(members, shards, element_bytes, assign.gid, gathers=not is_split)

    def _can_start(self, gid: int) -> bool:
        is_ready = self._published is not None
        if not self._answers_while_computing:
            is_ready = is_ready and self._clock is not None
        return is_ready or gid in self._aborted or self._error is not None

    def _exchange(
        self,
        assign: Assign,
        members: list[Peer],
        others: list[Peer],
        published: Tensor,
        filling: FillingBuffer | None,
    ) -> _Exchange | None:
        """Run the all-reduce or its reduce-scatter; None if a peer was lost."""

        def should_stop() -> bool:
            return assign.gid in self._aborted or self._error is not None

        gid, start = assign.gid, time.perf_counter()
        weights = [1 / len(members)] * len(members)
        split: SplitAllReduce | None = None
        try:
            try:
                self._connections.connect(
                    others, str(gid), timeout=_EXCHANGE_TIMEOUT, should_stop=should_stop
                )
            finally:
                shape = self._shape(assign, members, published, filling)
                self._connections.begin(shape, others)
            if should_stop():  # set before the round began
                return None
            duration: Seconds | None = None
            if filling is not None:
                bucketed = BucketedAllReduce(
                    self._connections,
                    members,
                    filling,
                    number=gid,
                    timeout=_EXCHANGE_TIMEOUT,
                    should_stop=should_stop,
                    apart=assign.apart,
                )
                mean = bucketed.run(weights)
                duration = bucketed.duration
            elif self._is_unsplit:
                mean = all_reduce_mean(
                    self._connections,
                    members,
                    weights,
                    published,
                    number=gid,
                    timeout=_EXCHANGE_TIMEOUT,
                    apart=assign.apart,
                )
            else:
                split = SplitAllReduce(
                    self._connections, members, published, number=gid, apart=assign.apart
                )
                mean = split.reduce_scatter(weights, timeout=_EXCHANGE_TIMEOUT)
            if duration is None:
                duration = time.perf_counter() - start
            timeout, why = assign.timeout, assign.why
            return _Exchange(gid, published, mean, split, timeout, why, start, duration)
        except PeerError as error:
            if self._log is not None:
                self._log.write("average_failed", name=str(gid), why=str(error))
            return None

    def _commit(self, commit: Commit) -> None:
        self._connections.commit(commit.members)  # all members have sent Done
        with self._changed:
            done, self._pending_exchange = self._pending_exchange, None
            assert done is not None, f"group {commit.gid} is committed before our Done"
            assert done.gid == commit.gid, f"expected the Commit of group {done.gid}"
            self._last_exchange = done.duration, len(commit.members)
            if self._value is done.published:
                self._value = done.mean
                if done.split is not None:
                    self._streaming_buffer = done.split.streaming_buffer
                    self._running = done.gid, done.split.others
            else:  # training has published again since the exchange started
                assert self._value is not None, "a buffer was exchanged"
                assert done.split is None, "training waits for the reduce-scatter"
                self._value = self._merge(self._value, done.published, done.mean)
            self._end_step(commit.end_clocks[commit.members.index(self._connections.me.worker)])
        if done.split is not None:
            self._all_gather(done, done.split)
        self._record(done, commit)

    def _all_gather(self, done: _Exchange, split: SplitAllReduce) -> None:
        """Run the all-gather while training continues."""
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
            has_exchanged, self._pending_exchange = self._pending_exchange is not None, None
        if has_exchanged:
            self._connections.drain()
            self._report_lost(abort.gid)

    def _report_lost(self, gid: int) -> None:
        """After an aborted round: report whom this worker does not reach, if there is anybody."""
        (worker, incarnation), lost = self._connections.me, self._connections.pop_lost()
        slow = self._connections.pop_slow()
        if lost or slow:
            self._send(Done(worker, gid, False, incarnation, lost=lost, slow=slow))

    def _end_step(self, clock: int) -> None:
        """End the step with this clock; -1, for a passive member, ends none."""
        if clock == self._clock:
            self._clock = None
            self._changed.notify_all()

    def _record(self, done: _Exchange, commit: Commit) -> None:
        if self._log is not None:
            members = " ".join(map(str, commit.members))
            self._log.write(
                "average",
                start=self._log.at(done.start),
                name=str(done.gid),
                why=done.why,
                values={"members": members, "bytes": done.mean.nbytes},
            )


class GroupClient:
    def __init__(
        self,
        rendezvous: Rendezvous,
        model: ReplicaState,
        *,
        coordinator: str | None,
        keys: Path | str | None,
        log: EventLog | None,
    ) -> None:
        """Join the job; return when all workers have joined."""
        self._timeout, self._clock = rendezvous.timeout, 0
        self._waited: Seconds = 0.0
        self._policy, self._log = rendezvous.setup.policy, log
        self._averages_models = rendezvous.setup.mode.averages == "model"
        self._workers = rendezvous.setup.workers
        worker, incarnation = self.me = rendezvous.me
        node, policy = rendezvous.nodes[worker], rendezvous.setup.text
        hello = Hello(PROTOCOL, worker, node, 0, incarnation, policy, model.shape())
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
                decoupled=model.decoupled,
                averages_alone=rendezvous.setup.mode.has_outer_optimizer,
                merge=model.merge,
                log=log,
            )
            undo.callback(self._averager.close)
            is_separate = coordinator is not None or current_epoch().group_hosting is not None
            self.coordinator_client = CoordinatorClient(
                address,
                client_keys,
                hello,
                on_command=self._averager.on_command,
                on_failure=self._averager.fail,
                served_by="" if is_separate else str(rendezvous.setup.workers[0]),
            )
            undo.callback(self.coordinator_client.close, leave=False)
            self.coordinator_client.join(rendezvous.timeout, check=rendezvous.raise_failure)
            undo.pop_all()

    def request(self) -> None:
        """Ask for a group at the start of the step after which it is needed."""
        self._send(Request(self.me.worker, self._clock + 1, self.me.incarnation))

    def publish_filling(self, buffer: FillingBuffer) -> None:
        """Publish gradients that training still fills in; after `retract`, in place of others."""
        self._clock += not self._averager.is_ready
        # As in DDP, all replicas see what is not finite.
        self._averager.publish(lambda _: buffer.memory.flat, self._clock, filling=buffer)

    def retract(self, why: str) -> None:
        """Withdraw gradients that will not be completed."""
        self._averager.retract(why)

    def publish(self, read: Callable[[AverageResult | None], Tensor]) -> Tensor:
        """Publish the buffer that `read` returns, to be averaged in a group."""
        self._clock += 1
        # Gradients are as in DDP, where all replicas see what is not finite.
        checked = self._checked(read) if self._averages_models else read
        return self._averager.publish(checked, self._clock)

    def average_all(
        self, read: Callable[[AverageResult | None], Tensor], step: int
    ) -> AverageResult | None:
        """Average models with all workers of the stage; None if there is no other worker."""
        if self._averager.is_ready:
            raise PolicyError(
                "average_all() while gradients are averaged",
                expected="average_all() after optimizer.step()",
                fix="call optimizer.step() after each backward, then average_all()",
            )
        self._clock += 1
        self._averager.publish(self._checked(read), self._clock, average_all=True)
        needed, timeout = "averaging all workers", self._timeout
        self.wait(step, needed=needed, warn_after=WARN_AFTER, timeout=timeout)
        return self.pop_result()

    def wait(
        self,
        step: int,
        *,
        needed: str = "",
        warn_after: Seconds = math.inf,
        timeout: Seconds | None = None,
    ) -> None:
        """Wait until the scheduler has ended the step, longer if it is one of the first.

        `needed` names the action that cannot continue without an average: a Skip then raises.
        """
        start = time.perf_counter()
        timeout = step_timeout(self._timeout, step) if timeout is None else timeout
        why = self._averager.wait(timeout, needed or "waiting for a group", warn_after)
        self._waited += time.perf_counter() - start
        if self._log is not None:
            self._log.write("sync", start=self._log.at(start), step=step, name=self._policy)
        if needed and why is not None:
            waited = time.perf_counter() - start
            raise PeerError("another worker", action=needed, waited=waited, cause=why)

    def pop_result(self) -> AverageResult | None:
        return self._averager.pop_result()

    def pop_timings(self) -> AverageTimings:
        """Return the timings since the last call, and reset them."""
        waited, self._waited = self._waited, 0.0
        return AverageTimings(waited, *self._averager.last_exchange())

    def wait_idle(self) -> None:
        """Wait until no peer needs this worker for a committed average."""
        self._averager.wait_idle(self._timeout)

    def lost_pipelines(self) -> set[int]:
        """Return the pipelines without one of their workers; only the coordinator's host knows."""
        if self._coordinator is None:
            return set()
        present = set(self._coordinator.present)
        return {worker.pipeline for worker in self._workers if worker not in present}

    def close(self, *, graceful: bool) -> None:
        """Leave; the host of the coordinator waits for the others.

        If not `graceful`, close at once: the coordinator marks this worker dead.
        """
        self._averager.close()
        self.coordinator_client.close(leave=graceful)
        if self._coordinator is not None:
            self._coordinator.close(self._timeout if graceful else 0.0)

    def _checked(
        self, read: Callable[[AverageResult | None], Tensor]
    ) -> Callable[[AverageResult | None], Tensor]:
        """Refuse models that are not finite."""

        def read_finite(result: AverageResult | None) -> Tensor:
            flat = read(result)
            try:
                check_finite(flat, self.me.worker)
            except SingleWorkerError as error:
                if self._log is not None:
                    self._log.write("average_failed", name=str(self._clock), why=error.wrong)
                raise
            return flat

        return read_finite

    def _send(self, message: FromWorker) -> None:
        self.coordinator_client.send(message)


_num_logs: Counter[Path] = Counter()  # decision logs that this process has created, by run


def _decision_log_path(log: EventLog | None) -> Path | None:
    """Return the path of the decision log, in the folder of the run."""
    if log is None:
        return None
    folder = log.path.parent
    run = folder.parent if folder.name == WORKERS else folder
    _num_logs[run] += 1
    return decision_log_path(run, _num_logs[run])

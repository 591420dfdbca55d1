"""EpochClient: a process's membership in its job, and its part in the epochs (`sync/epochs.py`).

One thread owns the connection. It sends heartbeats, and calls `on_end` when the current epoch ends,
so that what the main thread waits for can be aborted. The main thread awaits epochs and commits
steps: it waits for the coordinator, never for another member.

After a reconnect the client enrolls again and repeats what is not answered. Commands that it has
received already change nothing.
"""

import atexit
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.processes import FencedError
from polyrhythm.run.coordinator.epoch_server import (
    HEARTBEAT_INTERVAL,
    FromMember,
    GroupsHosted,
    HostGroups,
    LossTimeouts,
    MemberHeartbeat,
    ServiceEnded,
    ToMember,
)
from polyrhythm.run.coordinator.keys import ClientKeys
from polyrhythm.run.coordinator.sockets import ConnectionEvent, DealerSocket
from polyrhythm.sync.epochs import (
    Await,
    Begin,
    Committed,
    Depart,
    End,
    Enroll,
    Fenced,
    Finish,
    Member,
    TrainInGroups,
    Unreachable,
    Vote,
)
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds

# The server gives a closed connection less time: a client that is not back by then is fenced.
RECONNECT_TIMEOUT: Seconds = 1.5
SERVER_TIMEOUT: Seconds = 15.0  # without any message of the coordinator
RESTART_TIMEOUT: Seconds = 60.0  # after its connection has closed, if it is started again
CLOSE_TIMEOUT: Seconds = 1.0  # for the last messages, and again for the thread to end
_STALL: Seconds = 2 * HEARTBEAT_INTERVAL  # this process was stopped or starved
_MAX_BATCH = 256  # messages between two checks of timers
_MAX_TEXT = 4096  # characters, as the server accepts
_PROBLEMS = {
    ConnectionEvent.CONNECTED: "it sends nothing",
    ConnectionEvent.HANDSHAKE_CLOSED: "it closes connections at once: are the keys of its job?",
    ConnectionEvent.PROTOCOL_ERROR: "another service answers at this address",
    ConnectionEvent.CLOSED: "its connection has closed: its process has exited",
}


class CoordinatorAccess(NamedTuple):
    """Where the coordinator of a job is, and a member's keys to it."""

    address: str
    keys: ClientKeys
    timeouts: LossTimeouts = LossTimeouts()  # the coordinator's
    is_restarted: bool = False  # if it ends: its members wait for its successor


class EpochClient:
    """The client of one member. Enrolls at once; one thread calls the methods that wait."""

    def __init__(
        self,
        coordinator: CoordinatorAccess,
        *,
        member: Member,
        incarnation: int = 0,
        node: str,
        on_end: Callable[[str, Collection[Member] | None], None],
        unreachable: Callable[[], Collection[Member]] = tuple,
    ) -> None:
        """`on_end(why, lost)` is called in the client's thread when the current epoch has ended.

        `lost`: those of its members that are; it is called again if more are. It is called with
        None when this process can have no further epoch: it is fenced, or the coordinator is lost.
        The next epoch does not begin before `on_end` has returned, and no heartbeat is sent
        meanwhile. `unreachable()` is called in that thread, too, with each heartbeat: which members
        of the epoch this one cannot reach.
        """
        self._name = f"the coordinator at {coordinator.address}"
        self.address, self._key = coordinator.address, (member, incarnation)
        self._node = node[:255]
        is_restarted = coordinator.is_restarted
        self._reconnect_timeout = RESTART_TIMEOUT if is_restarted else RECONNECT_TIMEOUT
        self._on_end, self._unreachable = on_end, unreachable
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToMember).decode
        self._changed = threading.Condition()
        self._begin: Begin | None = None
        self._committed: Committed | None = None  # the last one of the current epoch
        self._outgoing: deque[FromMember] = deque([self._enrollment])
        self._end: End | None = None  # of the current epoch, the last one
        self._ended = ""  # why the current epoch has ended
        self._await: Await | None = None  # until the next epoch begins
        self._vote: Vote | None = None  # until it is committed, or the epoch has ended
        self._depart: Depart | None = None
        self._in_groups: TrainInGroups | None = None  # in the current epoch
        self._host: HostGroups | None = None  # until it is answered
        self._hosted: dict[str, GroupsHosted] = {}  # the answer to it, by name
        self._error: Exception | None = None
        self._is_closing = False
        self._problem = "nothing answers at this address"
        self._is_connected, self._closed_at = False, math.inf
        self._last_received_at = self._last_run_at = time.monotonic()
        self._heartbeat_at = self._last_run_at + HEARTBEAT_INTERVAL
        self._process = os.getpid()
        self._socket = DealerSocket(coordinator.address, coordinator.keys)
        self._thread = threading.Thread(target=self._run, name="epoch-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def _enrollment(self) -> Enroll:
        """With what a coordinator that was started again may not know."""
        return Enroll(*self._key, self._node, begin=self._begin, committed=self._committed)

    @property
    def epoch(self) -> int:
        """The number of the current epoch; 0 before the first."""
        return 0 if self._begin is None else self._begin.epoch

    @property
    def ended(self) -> str:
        """Why the current epoch has ended; empty while it runs."""
        return self._ended

    @property
    def last_commit(self) -> Committed | None:
        """The last commit of the current epoch, whether or not this member has voted on it."""
        return self._committed

    def check(self, action: str = "training") -> None:
        """Raise PeerError if the current epoch has ended, or this process has lost its job."""
        with self._changed:
            self._raise_if_over(action, time.monotonic())

    def check_member(self) -> None:
        """Raise the error if this process is no member any more, or has lost the coordinator."""
        with self._changed:
            self._raise_error()

    def next_epoch(self, why: str, timeout: Seconds | None) -> Begin:
        """Wait for the next epoch. `why` the current one ends for all members, if it still runs.

        With an empty `why` it does not: a spare waits until another member ends it. Raises
        PeerError after `timeout` (None: no limit), if the coordinator is lost, or, as FencedError,
        if this process is no longer a member.
        """
        start, before = time.monotonic(), self.epoch
        with self._changed:
            self._await = Await(*self._key, before, why[:_MAX_TEXT])
            self._submit(self._await)
            self._changed.wait_for(lambda: self._error or self.epoch > before, timeout)
            self._raise_error()
            if self._begin is not None and self._begin.epoch > before:
                return self._begin
        cause = "not all processes that are left await the next epoch"
        raise self._peer_error("the other processes", "the next epoch", start, cause)

    def commit(
        self, number: int, num_voters: int, timeout: Seconds, *, may_end: bool = True
    ) -> Committed:
        """Vote for a step, and wait until all voters have; raises PeerError if the epoch has ended.

        `may_end`: it may be the last one of the epoch, for a member that leaves. After another
        PeerError the step may have been committed all the same: the next Begin tells.
        """
        start, action = time.monotonic(), "the commit of a step"
        with self._changed:
            self._raise_if_over(action, start)
            self._vote = Vote(*self._key, self.epoch, number, num_voters, may_end)
            self._submit(self._vote)
            self._changed.wait_for(
                lambda: self._is_committed(number) or self._ended or self._error, timeout
            )
            committed = self._committed
            if committed is not None and self._is_committed(number):
                return committed
            self._raise_if_over(action, start)
        cause = f"not all of {num_voters} workers have voted"
        raise self._peer_error("another worker", action, start, cause)

    def depart(self, why: str, *, without_commit: bool = False) -> None:
        """Ask to leave: the next commit is the last of its epoch, and the next epoch this one's.

        `without_commit`: the epoch ends soon all the same.
        """
        with self._changed:
            self._depart = Depart(*self._key, why[:_MAX_TEXT], without_commit)
            self._submit(self._depart)

    def train_in_groups(self) -> None:
        """From now on nobody votes in this epoch: it ends soon if a process joins."""
        with self._changed:
            self._in_groups = TrainInGroups(*self._key, self.epoch)
            self._submit(self._in_groups)

    def host_groups(
        self,
        name: str,
        setup: Setup,
        workers: Sequence[Member],
        *,
        log: Path | None,
        timeout: Seconds,
        startup_timeout: Seconds,
    ) -> str:
        """Let the coordinator start a scheduler of groups, with its own keys; return the address.

        `workers`: the members that are the workers of the setup, in its order. Raises PeerError if
        the epoch has ended, or if it cannot start.
        """
        start, action = time.monotonic(), "starting a scheduler of groups"
        with self._changed:
            self._raise_if_over(action, start)
            path = None if log is None else str(log.absolute())
            self._host = HostGroups(
                *self._key, self.epoch, name, setup, tuple(workers), path, startup_timeout
            )
            self._submit(self._host)
            self._changed.wait_for(
                lambda: name in self._hosted or self._ended or self._error, timeout
            )
            hosted, self._host = self._hosted.pop(name, None), None
            self._raise_if_over(action, start)
            if hosted is not None and hosted.address:
                return hosted.address
            cause = "it has not answered" if hosted is None else hosted.why
        raise self._peer_error(self._name, action, start, cause)

    def finish(self) -> None:
        """Leave the job, and close: the others need this process no more."""
        self._close(Finish(*self._key))

    def close(self) -> None:
        """Close. A process that has not finished counts as lost."""
        self._close(None)

    def _close(self, last: Finish | None) -> None:
        if os.getpid() != self._process:  # a fork has no thread to end, and maybe a locked lock
            return
        with self._changed:
            was_closing, self._is_closing = self._is_closing, True
            if last is not None and not was_closing:
                self._outgoing.append(last)
        if was_closing:
            return
        atexit.unregister(self.close)
        self._socket.wake()
        if threading.current_thread() is not self._thread:  # `on_end` may call close()
            self._thread.join(2 * CLOSE_TIMEOUT)

    def _submit(self, message: FromMember) -> None:
        assert os.getpid() == self._process, "a fork has no connection to the coordinator"
        assert not self._is_closing, "the client is closed"
        self._outgoing.append(message)
        self._socket.wake()

    def _is_committed(self, number: int) -> bool:
        return self._committed is not None and self._committed.number >= number

    def _raise_if_over(self, action: str, start: Seconds) -> None:
        self._raise_error()
        if self._ended:
            cause = f"the epoch has ended: {self._ended}"
            raise self._peer_error("another process", action, start, cause)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _peer_error(self, peer: str, action: str, start: Seconds, cause: str) -> PeerError:
        return PeerError(peer, action=action, waited=time.monotonic() - start, cause=cause)

    def _run(self) -> None:
        try:
            while self._error is None and not self._is_closing:
                self._run_once()
            if self._error is None:
                self._send_queued()
        except Exception as error:  # a defect, possibly of `on_end`: it would be lost here
            self._set_error(error)
        finally:
            is_connected = self._is_connected or self._begin is not None
            self._socket.close(CLOSE_TIMEOUT if is_connected and self._error is None else 0.0)

    def _run_once(self) -> None:
        due = min(
            self._heartbeat_at,
            self._silent_at,
            self._closed_at + self._reconnect_timeout,
        )
        self._socket.wait(due - time.monotonic())
        was_message = self._send_queued() | self._receive()
        now = time.monotonic()
        if not was_message or now >= self._heartbeat_at:  # not in every commit: it takes a while
            self._handle_connection_events(now)
        gap, self._last_run_at = now - self._last_run_at, now
        if gap > _STALL:  # it has received nothing for that reason: wait again
            self._last_received_at += gap
            self._closed_at += gap
        if now - self._closed_at >= self._reconnect_timeout:
            self._fail(self._lost_error(now - self._closed_at))
        elif now >= self._silent_at:
            self._fail(self._lost_error(now - self._last_received_at))
        elif now >= self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_INTERVAL
            self._socket.send(self._encode(MemberHeartbeat(*self._key)))
            if not self._ended and (peers := self._unreachable()):
                report = Unreachable(*self._key, self.epoch, tuple(sorted(peers)))
                self._socket.send(self._encode(report))

    @property
    def _silent_at(self) -> Seconds:
        """When a coordinator that is connected has sent nothing for too long."""
        is_closed = self._closed_at < math.inf
        return math.inf if is_closed else self._last_received_at + SERVER_TIMEOUT

    def _send_queued(self) -> bool:
        """Send all queued messages; return whether there was one."""
        had_message = bool(self._outgoing)
        while self._outgoing:
            self._socket.send(self._encode(self._outgoing.popleft()))
        return had_message

    def _receive(self) -> bool:
        """Handle received messages; return whether there was one."""
        for number in range(_MAX_BATCH):
            if self._error is not None or (data := self._socket.receive()) is None:
                return number > 0
            self._last_received_at = time.monotonic()
            try:
                command = self._decode(data)
            except msgspec.MsgspecError as error:
                self._problem = f"it sent a message of another version: {error}"
                self._fail(self._lost_error(0.0))
            else:
                self._handle(command)
        return True

    def _handle(self, command: ToMember) -> None:
        match command:
            # A candidate that does not await it yet has no part in it.
            case Begin() if command.epoch > self.epoch and self._key[0] in command.members:
                with self._changed:
                    self._begin, self._committed, self._ended = command, None, ""
                    self._end = self._in_groups = None
                    self._await = self._vote = None
                    self._changed.notify_all()
            case Committed() if command.epoch == self.epoch and not self._ended:
                if not self._is_committed(command.number):
                    with self._changed:
                        self._committed, self._vote = command, None
                        self._changed.notify_all()
            case End() if command.epoch == self.epoch and command != self._end:
                self._end = command
                self._end_epoch(command.why or "another process has left it", command.lost)
            case GroupsHosted() if self._host is not None and command.name == self._host.name:
                with self._changed:
                    self._hosted[command.name] = command
                    self._changed.notify_all()
            case Fenced() if (command.member, command.incarnation) == self._key:
                action = "training" if self._begin else "joining"
                error = FencedError("the job", action=action, waited=0.0, cause=command.why)
                self._fail(error)
            case ServiceEnded():
                self._problem = command.why
                self._fail(self._lost_error(0.0))

    def _handle_connection_events(self, now: Seconds) -> None:
        """Handle connects, disconnects and refused keys."""
        for event in self._socket.connection_events():
            if event is ConnectionEvent.CLOSED and not self._is_connected:
                continue  # it was never open: an earlier event has the reason
            self._problem = _PROBLEMS.get(event, self._problem)
            if event is ConnectionEvent.CLOSED:
                self._closed_at = min(self._closed_at, now)
            elif event is ConnectionEvent.CONNECTED:
                self._closed_at, self._last_received_at = math.inf, now
                if self._is_connected:  # a reconnect
                    self._resend()
                self._is_connected = True
            elif event is ConnectionEvent.KEY_REFUSED:
                self._fail(
                    LaunchError(
                        f"{self._name} refuses the key of process {self._key[0]}",
                        expected="the keys of the coordinator's job",
                        fix="copy the key file from the coordinator's machine",
                    )
                )

    def _resend(self) -> None:
        with self._changed:
            unanswered = [
                self._enrollment,
                self._depart,
                self._vote,
                self._in_groups,
                self._host,
                self._await,
            ]
        for message in unanswered:
            if message is not None:
                self._socket.send(self._encode(message))

    def _end_epoch(self, why: str, lost: Collection[Member] | None = None) -> None:
        with self._changed:
            self._ended, self._vote = self._ended or why, None
            self._changed.notify_all()
        self._on_end(why, lost)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._set_error(error)
            self._end_epoch(str(error))

    def _set_error(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _lost_error(self, waited: Seconds) -> PeerError:
        action = "training" if self._begin else "joining"
        return PeerError(self._name, action=action, waited=waited, cause=self._problem)

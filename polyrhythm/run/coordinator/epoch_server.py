"""EpochServer: the epochs of a job (`sync/epochs.py`) as a network service for its members.

One thread receives messages, passes them to JobEpochs, and sends its commands to all present
members. It only decides which messages are accepted, and notices that a process is lost: its
launcher says so, its connection has closed and it does not reconnect, or it has sent nothing for
longer than its heartbeats usually take. A client that reconnects enrolls again, and receives the
commands of the current epoch again.
"""

import contextlib
import logging
import math
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self

import msgspec
import zmq

from polyrhythm.errors import PolicyError, UserError
from polyrhythm.run.coordinator.group_host import GroupHost
from polyrhythm.run.coordinator.keys import ServerKeys
from polyrhythm.run.coordinator.sockets import RouterSocket
from polyrhythm.sync.decision_log import DecisionLog, LogEnd, clock
from polyrhythm.sync.epochs import (
    Await,
    Begin,
    Command,
    Committed,
    Depart,
    End,
    Enroll,
    EpochsSetup,
    Event,
    Fenced,
    Finish,
    JobEpochs,
    Lost,
    Member,
    Resume,
    Tick,
    TrainInGroups,
    Unreachable,
    Vote,
)
from polyrhythm.sync.log_reader import rebuild
from polyrhythm.sync.members import LearnedTimeout
from polyrhythm.sync.protocol import Count, Name
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds

HEARTBEAT_INTERVAL: Seconds = 0.5  # of a client's thread, whatever else it sends
MAX_MESSAGE_BYTES = 1 << 20  # a setup has the positions that are not used
_MAX_TEXT = 4096  # characters
CLOSE_TIMEOUT: Seconds = 5.0  # for the thread to end
_MAX_BATCH = 256  # messages between two checks of timers
_LONGEST_POLL: Seconds = 0.1  # until the stop event is checked
# A member whose machine others cannot reach: it, and not only a link, is dead. They know after 6 s.
_SILENT_FOR: Seconds = 6 * HEARTBEAT_INTERVAL
_STALL: Seconds = 2.5 * _LONGEST_POLL  # between two polls: this process was stopped or starved
# After the launcher's report: the last messages of the process may still be on their way.
_EXIT_DELAY: Seconds = 0.05
_NUM_DEVIATIONS = 10  # of a usual gap between heartbeats, above its median
_Key = tuple[Member, int]  # a member and its incarnation

_logger = logging.getLogger(__name__)


class MemberHeartbeat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Shows that the sender is alive; the server returns it."""

    member: Count
    incarnation: Count


class ServiceEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server ends, and with it the job."""

    why: str


class HostGroups(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A member asks for a scheduler of groups in the current epoch."""

    member: Count
    incarnation: Count
    epoch: Count
    name: Name  # of the GroupSync
    setup: Setup
    workers: tuple[Member, ...]  # of the setup, in its order
    log: str | None  # where the decision log belongs
    startup_timeout: Seconds


class GroupsHosted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The scheduler of groups serves at this address; empty if it cannot start, with the reason."""

    name: str
    address: str
    why: str = ""


FromMember = (
    Enroll
    | Await
    | Vote
    | TrainInGroups
    | Depart
    | Unreachable
    | Finish
    | HostGroups
    | MemberHeartbeat
)
ToMember = Begin | End | Committed | Fenced | GroupsHosted | MemberHeartbeat | ServiceEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTimeouts:
    """When a process counts as lost that its launcher has not reported."""

    # After its connection has closed. A client retries after 0.1 to 0.2 s, and needs four round
    # trips then. Launchers report processes that have ended: only without them others wait longer.
    reconnect: Seconds = 1.0
    # Without any message: learned from the gaps between its heartbeats, within these bounds. Until
    # enough are known it is the longest, since a process that starts may be busy.
    min_heartbeat: Seconds = 5.0
    max_heartbeat: Seconds = 15.0
    # Alive, but not awaiting the next epoch after the end of one: it may compile or evaluate.
    answer: Seconds = 600.0

    def __post_init__(self) -> None:
        has_heartbeats = 2 * HEARTBEAT_INTERVAL <= self.min_heartbeat <= self.max_heartbeat
        is_ordered = 0 < self.reconnect < self.max_heartbeat < self.answer < math.inf
        if not (has_heartbeats and is_ordered):
            raise PolicyError(
                str(self),
                expected=f"min_heartbeat of at least {2 * HEARTBEAT_INTERVAL:g} s, as a process "
                f"sends a heartbeat each {HEARTBEAT_INTERVAL:g} s, and not above max_heartbeat; "
                "reconnect, max_heartbeat and answer each longer than the one before",
                fix="omit them for the defaults",
            )

    def order(self, timeout: Seconds) -> str:
        """Return the order of waits, the shortest first, if steps wait for up to `timeout`.

        Raises PolicyError if a step would fail before it is known whom it waits for in vain.
        """
        if not self.max_heartbeat < timeout:
            raise PolicyError(
                f"timeout={timeout:g} s, in a job that goes on after losses",
                expected=f"more than {self.max_heartbeat:g} s: only then a process without "
                "heartbeat counts as lost, and steps that wait for it would fail before",
                fix=f"use timeout={2 * self.max_heartbeat:g} or more, or omit it",
            )
        waits = [
            (self.reconnect, "a process whose connection closes is lost"),
            (self.max_heartbeat, "a process without heartbeat is lost, mostly sooner"),
            (timeout, "a step fails that waits for a process that is alive"),
            (self.answer, "a process that is alive, but does not go on after a loss, is lost"),
        ]
        return "; ".join(f"after {wait:g} s {what}" for wait, what in sorted(waits))

    def learned_heartbeat(self) -> LearnedTimeout:
        return LearnedTimeout(
            1.0, self.min_heartbeat, self.max_heartbeat, self.max_heartbeat, usual=_usual_gap
        )


def _usual_gap(gaps: Iterable[Seconds]) -> Seconds:
    """Return the median plus some median absolute deviations: few outliers do not move them."""
    known = list(gaps)
    middle = median(known)
    return middle + _NUM_DEVIATIONS * median(abs(gap - middle) for gap in known)


class _Connection:
    """The connection of a present member."""

    __slots__ = ("fd", "heartbeat_at", "heartbeat_timeout", "last_received_at", "routing_id")

    def __init__(self, routing_id: bytes, heartbeat_timeout: LearnedTimeout) -> None:
        self.routing_id, self.heartbeat_timeout = routing_id, heartbeat_timeout
        self.fd = -1  # of its socket, at its last Enroll
        self.last_received_at: Seconds = -math.inf
        self.heartbeat_at: Seconds = math.nan  # nan: the next gap is not known


class _EpochSocket(RouterSocket):
    """A RouterSocket whose `wait` any thread can end."""

    def __init__(self, bind: str, keys: ServerKeys, *, num_peers: int) -> None:
        super().__init__(bind, keys, num_peers=num_peers)
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._poller.register(self._wake_receiver, zmq.POLLIN)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full of wake-ups already, or closed
            self._wake_sender.send(b"\0")

    def wait(self, timeout: Seconds) -> None:
        """Wait as a RouterSocket, or for `wake`: what is to be seen then must be there before."""
        super().wait(timeout)
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)

    def close(self) -> None:
        super().close()
        self._wake_sender.close()
        self._wake_receiver.close()


class EpochServer:
    """Binds its address at once; runs in `serve`, in a thread (`start`), or in a `with` block."""

    def __init__(
        self,
        num_members: int,
        *,
        bind: str,
        keys: ServerKeys,
        timeouts: LossTimeouts | None = None,
        log: Path | None = None,
        resumes: bool = False,
    ) -> None:
        """The first epoch begins with `num_members`; `log` gets all events (`decision_log.py`).

        `resumes`: in place of a coordinator of the same keys that has ended, from its log. Raises
        EventError if the log is that of another job, or not valid.
        """
        self._timeouts = timeouts or LossTimeouts()
        setup = EpochsSetup(num_expected=num_members, answer_timeout=self._timeouts.answer)
        self.epochs, log_end = setup.epochs(), None
        if resumes and log is not None:
            rebuilt = rebuild(log, job=keys.pair.public, setup=setup)
            assert isinstance(rebuilt.machine, JobEpochs), "the setup is that of epochs"
            self.epochs, log_end = rebuilt.machine, rebuilt.end
        self._resumes = resumes
        self._socket = _EpochSocket(bind, keys, num_peers=num_members)
        self.address = self._socket.address
        self._groups = GroupHost(f"{self.address.rpartition(':')[0]}:0", keys)
        self._log = None if log is None else self._open_log(log, setup, keys, log_end)
        self._counters: Counter[str] = Counter()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromMember).decode
        self._connections: dict[_Key, _Connection] = {}  # of present members
        # Routing ids and file descriptors of processes that may become members.
        self._enrolling: dict[_Key, tuple[bytes, int]] = {}
        # The last Begin, and the last Committed and the last End after it.
        self._current: dict[type[Command], bytes] = {}
        self._suspects: dict[_Key, Seconds] = {}  # processes to check, and when
        self._exits: dict[_Key, str] = {}  # suspects that have ended, and why
        self._reports: deque[tuple[_Key, str]] = deque()
        self._heartbeat_check_at: Seconds = math.inf
        self._last_run_at = time.monotonic()
        self._stop, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def counters(self) -> Counter[str]:
        """Count refused and ignored messages by kind."""
        total: Counter[str] = Counter()
        for counters in (self.epochs.counters, self._socket.counters, self._counters):
            total.update(dict(counters))  # an atomic copy: another thread may be counting
        return total

    @property
    def is_over(self) -> bool:
        """Whether all members have finished or are lost."""
        return self.epochs.is_over

    def report_exit(self, member: Member, why: str, *, incarnation: int = 0) -> None:
        """Report that the process of a member has ended. Any thread may call this."""
        self._reports.append(((member, incarnation), why))
        self._socket.wake()

    def serve(self, stop_event: threading.Event) -> None:
        """Serve until `stop_event` is set; notify all members of a defect, then raise it."""
        why = "the coordinator has ended"
        try:
            self._last_run_at = time.monotonic()
            if self._resumes:
                self._step(Resume(clock()))
            while not stop_event.is_set():
                self._run_once()
        except BaseException as error:
            why = f"the coordinator has failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._end(why)

    def start(self) -> Self:
        """Serve in a thread of this process, until `close`."""
        self._thread = threading.Thread(target=self._run, name="epoch-server", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """End; members that are still present lose the coordinator. Raise the service's error."""
        if self._thread is not None:
            self._stop.set()
            self._socket.wake()
            assert self._ended.wait(CLOSE_TIMEOUT), f"it does not end in {CLOSE_TIMEOUT:g} s"
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
            self._send_to_all(self._encode(ServiceEnded(why)))
            self._socket.close()
            self._groups.close_all()
            self._groups.join(CLOSE_TIMEOUT)
            if self._log is not None:
                self._log.close()
        finally:
            self._ended.set()

    def _run_once(self) -> None:
        """Wait for messages or timers, up to `_LONGEST_POLL`, and handle them."""
        due = min(self.epochs.next_timer(), self._next_check_at())
        self._socket.wait(min(due - time.monotonic(), _LONGEST_POLL))
        received = self._socket.receive(_MAX_BATCH)
        for routing_id, frame in received:
            self._on_message(routing_id, frame, clock())
        now = clock()
        self._extend_after_stall(now - self._last_run_at)
        self._last_run_at = now
        if self.epochs.next_timer() <= now:
            self._step(Tick(now, self._silent_members(now)))
        if self._reports:
            self._read_reports(now)
        if self._socket.closed_fds:
            self._suspect_closed(now)
        # Check once no queued message can show that a process is alive.
        if self._next_check_at() <= now and len(received) < _MAX_BATCH:
            self._check_suspects(now)
            self._check_heartbeats(now)
        if self._log is not None:
            self._log.flush()

    def _on_message(self, routing_id: bytes, frame: zmq.Frame, now: Seconds) -> None:
        data = frame.bytes
        try:
            if len(data) > MAX_MESSAGE_BYTES:
                self._counters["oversized"] += 1
                return
            message = self._decode(data)
        except Exception:  # any error of the decoder: the bytes are not trusted
            self._counters["malformed"] += 1
            return
        key = message.member, message.incarnation
        connection = self._connections.get(key)
        if connection is not None and connection.routing_id != routing_id:
            self._counters["second_process"] += 1
            why = f"another process is member {message.member} already"
            self._send(routing_id, self._encode(Fenced(*key, why)))
            return
        if connection is not None:
            connection.last_received_at = now
        if isinstance(message, MemberHeartbeat):
            self._on_heartbeat(routing_id, message, connection, now)
            return
        if isinstance(message, HostGroups):
            if connection is not None and message.epoch == self.epochs.epoch:
                self._send(routing_id, self._encode(self._host_groups(message)))
            return
        msgspec.structs.force_setattr(message, "now", now)  # frozen, but not shared yet
        if isinstance(message, Enroll) and connection is not None:  # a reconnect
            self._counters["reconnected"] += 1
            for command in self._current.values():
                self._send(routing_id, command)
        if isinstance(message, Enroll):
            self._enrolling[key] = routing_id, frame.get(zmq.SRCFD)
        self._step(message, routing_id)
        if isinstance(message, Enroll) and key in self._connections:
            connection = self._connections[key]
            connection.fd, connection.last_received_at = frame.get(zmq.SRCFD), now
            self._heartbeat_check_at = min(
                self._heartbeat_check_at, now + connection.heartbeat_timeout.current
            )

    def _host_groups(self, message: HostGroups) -> GroupsHosted:
        log = None if message.log is None else Path(message.log)
        try:
            address = self._groups.open(
                message.name,
                message.setup,
                message.workers,
                log=log,
                startup_timeout=message.startup_timeout,
            )
        except (OSError, UserError, ValueError) as error:
            return GroupsHosted(message.name, "", f"{type(error).__name__}: {error}"[:_MAX_TEXT])
        return GroupsHosted(message.name, address)

    def _on_heartbeat(
        self,
        routing_id: bytes,
        heartbeat: MemberHeartbeat,
        connection: _Connection | None,
        now: Seconds,
    ) -> None:
        if connection is None:
            key = heartbeat.member, heartbeat.incarnation
            if self.epochs.is_resuming:  # sent before it has enrolled again
                return
            self._send(routing_id, self._encode(Fenced(*key, self.epochs.why_absent(*key))))
            return
        if not math.isnan(connection.heartbeat_at):
            connection.heartbeat_timeout.record(now - connection.heartbeat_at)
        connection.heartbeat_at = now
        self._send(routing_id, self._encode(heartbeat))

    def _step(self, event: Event, sender: bytes | None = None) -> None:
        """Pass an event of the connection `sender` to the epochs, and send their commands."""
        commands: list[Command] = []
        try:
            commands = self.epochs.step(event)
        finally:  # a replay of the log then reproduces the defect
            if self._log is not None:
                self._log.add(event, commands)
        if isinstance(event, Finish):
            self._connections.pop((event.member, event.incarnation), None)
        # Others than its sender become members, too, when all have enrolled again.
        for key in [key for key in self._enrolling if not self.epochs.is_resuming]:
            self._connect(key)
        if isinstance(event, Enroll) and self.epochs.is_member(event.member, event.incarnation):
            self._connect((event.member, event.incarnation))
        for command in commands:
            self._send_command(command, sender)

    def _connect(self, key: _Key) -> None:
        """Keep the connection of a process that has enrolled, if it is a member."""
        sender, fd = self._enrolling.pop(key, (b"", -1))
        if sender and key not in self._connections and self.epochs.is_member(*key):
            heartbeat_timeout = self._timeouts.learned_heartbeat()
            connection = self._connections[key] = _Connection(sender, heartbeat_timeout)
            connection.fd, connection.last_received_at = fd, clock()
            check_at = connection.last_received_at + heartbeat_timeout.current
            self._heartbeat_check_at = min(self._heartbeat_check_at, check_at)

    def _send_command(self, command: Command, sender: bytes | None) -> None:
        data = self._encode(command)
        if isinstance(command, Fenced):
            key = command.member, command.incarnation
            connection = self._connections.pop(key, None)
            self._suspects.pop(key, None)
            self._exits.pop(key, None)
            if connection is not None:
                self._groups.report_lost(command.member)
            routing_id = sender if connection is None else connection.routing_id
            if routing_id is not None:
                self._socket.send(routing_id, data)
            return
        if isinstance(command, Begin):
            self._current.clear()
            self._groups.close_all()
        self._current[type(command)] = data
        self._send_to_all(data)

    def _send_to_all(self, data: bytes) -> None:
        for connection in self._connections.values():
            self._send(connection.routing_id, data)

    def _send(self, routing_id: bytes, data: bytes) -> None:
        if not self._socket.send(routing_id, data):
            deadline = time.monotonic() + self._timeouts.reconnect
            for key, connection in self._connections.items():
                if connection.routing_id == routing_id:
                    self._suspects.setdefault(key, deadline)

    def _read_reports(self, now: Seconds) -> None:
        while self._reports:
            key, why = self._reports.popleft()
            if self.epochs.is_member(*key):
                self._exits[key], self._suspects[key] = why, now + _EXIT_DELAY
            else:
                self._step(Lost(*key, why, now))

    def _suspect_closed(self, now: Seconds) -> None:
        """Schedule a check of the connections whose file descriptors have closed.

        A descriptor may belong to another connection by now, so this alone proves nothing.
        """
        closed = set(self._socket.closed_fds)
        self._socket.closed_fds.clear()
        for key, connection in self._connections.items():
            if connection.fd in closed:
                self._suspects.setdefault(key, now + self._timeouts.reconnect)

    def _extend_after_stall(self, gap: Seconds) -> None:
        """Extend all timeouts by a time in which this process was stopped or starved."""
        if gap < _STALL:
            return
        self._counters["stalled"] += 1
        for connection in self._connections.values():
            connection.last_received_at += gap
            connection.heartbeat_at = math.nan
        for key in self._suspects:
            self._suspects[key] += gap

    def _silent_members(self, now: Seconds) -> tuple[Member, ...]:
        connections = self._connections.items()
        return tuple(m for (m, _), c in connections if now - c.last_received_at >= _SILENT_FOR)

    def _next_check_at(self) -> Seconds:
        return min(self._heartbeat_check_at, *self._suspects.values(), math.inf)

    def _check_suspects(self, now: Seconds) -> None:
        for key in [key for key, deadline in self._suspects.items() if deadline <= now]:
            self._suspects.pop(key, None)
            connection = self._connections.get(key)
            heartbeat = self._encode(MemberHeartbeat(*key))
            if (why := self._exits.pop(key, "")) != "":
                self._step(Lost(*key, why, now))
            elif connection is None:
                continue
            elif not self._socket.send(connection.routing_id, heartbeat):
                self._step(Lost(*key, "its connection has closed", now))

    def _check_heartbeats(self, now: Seconds) -> None:
        if now < self._heartbeat_check_at:
            return
        for key, connection in list(self._connections.items()):
            silent_for = now - connection.last_received_at
            if silent_for >= connection.heartbeat_timeout.current:
                self._step(Lost(*key, f"no heartbeat for {silent_for:.1f} s", now))
        self._heartbeat_check_at = min(
            (c.last_received_at + c.heartbeat_timeout.current for c in self._connections.values()),
            default=math.inf,
        )

    def _open_log(
        self, path: Path, setup: EpochsSetup, keys: ServerKeys, after: LogEnd | None
    ) -> DecisionLog[JobEpochs] | None:
        """Begin the log; without it the job goes on."""
        try:
            job = keys.pair.public
            return DecisionLog(path, setup, self.epochs, job=job, after=after, in_background=True)
        except OSError as error:
            _logger.warning("no log of the membership: %s: %s", path, error)
            return None

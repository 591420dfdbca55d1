"""An agent: a process on a host that runs submitted tasks one by one and returns their results.

One process serves many tasks: a fork for every pair of hosts would take longer than most
measurements, and each would leave a file open. Tasks are messages (msgpack), and know how to run.

A described bandwidth counts whole packets. Of 1500 bytes on the wire TCP carries 1448 (the others
are IP and TCP headers with timestamps), so received bytes are multiplied by 1500 / 1448.
"""

import math
import multiprocessing
import socket
import statistics
import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec

from polyrhythm.errors import PeerError
from polyrhythm.lab.lab import Lab
from polyrhythm.types import Seconds

SEGMENT, PACKET = 1448, 1500  # bytes that TCP carries, of those on the wire
EXTRA_TIMEOUT: Seconds = 10.0  # for a busy machine, on top of a task's own duration
ECHO_GAP: Seconds = 0.02  # between echoes, so that one pause of the machine does not delay all

_CHUNK = 1 << 18
_STAMP = struct.Struct("d")
_SO_MEMINFO, _MEMORY = 55, struct.Struct("I")  # its first number is the receive memory
_BYTES_RECEIVED = struct.Struct("128xQ")  # tcpi_bytes_received of struct tcp_info


@dataclass(frozen=True, slots=True)
class MeasureWindow:
    """Let TCP find the bandwidth during `settle`; count arrivals during `length` after it."""

    settle: Seconds
    length: Seconds
    loss_timeout: Seconds = 5.0  # how long a lost packet may block delivery of later ones


class NoTask(msgspec.Struct, frozen=True, tag=True):
    def run(self) -> float:
        return 0.0


class Echo(msgspec.Struct, frozen=True, tag=True):
    """Echo datagrams until an empty one arrives; return how many."""

    deadline: Seconds
    port: int

    def run(self) -> float:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.bind(("", self.port))
            num_echoes = 0
            while True:
                server.settimeout(_remaining(self.deadline))
                data, sender = server.recvfrom(64)
                if not data:
                    return num_echoes
                server.sendto(data, sender)
                num_echoes += 1


class MedianEchoTime(msgspec.Struct, frozen=True, tag=True):
    """Return the median round trip of datagrams, each of which carries its send time."""

    num_echoes: int
    deadline: Seconds
    address: tuple[str, int]

    def run(self) -> float:
        times: list[Seconds] = []
        next_at = time.monotonic()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.connect(self.address)
            while len(times) < self.num_echoes:
                _remaining(self.deadline)
                try:
                    if time.monotonic() >= next_at:
                        client.send(_STAMP.pack(time.monotonic()))
                        next_at += ECHO_GAP
                    client.settimeout(max(1e-4, next_at - time.monotonic()))
                    (sent_at,) = _STAMP.unpack(client.recv(64))
                    times.append(time.monotonic() - sent_at)
                except (TimeoutError, ConnectionRefusedError):  # in flight; no echo server yet
                    continue
            client.send(b"")
        return statistics.median(times)


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send at full speed until the receiver closes the connection; return the bytes sent."""

    deadline: Seconds
    address: tuple[str, int]

    def run(self) -> float:
        chunk = bytes(_CHUNK)
        with self._connected() as connection:
            # Discard unsent bytes on close.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sent = 0
            while True:
                connection.settimeout(_remaining(self.deadline))
                try:
                    sent += connection.send(chunk)
                except (ConnectionResetError, BrokenPipeError):
                    return sent

    def _connected(self) -> socket.socket:
        while True:
            try:
                return socket.create_connection(self.address, timeout=_remaining(self.deadline))
            except ConnectionRefusedError:  # the receiver does not listen yet
                time.sleep(0.01)


class Receive(msgspec.Struct, frozen=True, tag=True):
    """Return wire bytes per second in a window that starts at `begin`, or later if it must."""

    begin: Seconds
    window: MeasureWindow
    port: int

    def run(self) -> float:
        begin, window = self.begin, self.window
        with socket.create_server(("", self.port)) as server:
            server.settimeout(_remaining(begin + EXTRA_TIMEOUT))
            connection, _ = server.accept()
        if (now := time.monotonic()) > begin:  # a busy machine: TCP gets its time to settle anyway
            begin = now + window.settle
        with connection:
            started, before = _arrived_by(connection, begin, window.loss_timeout)
            ended, after = _arrived_by(connection, started + window.length, window.loss_timeout)
        return (after - before) / (ended - started) * PACKET / SEGMENT


Task = NoTask | Echo | MedianEchoTime | Send | Receive
_tasks = msgspec.msgpack.Decoder(Task)
_results = msgspec.msgpack.Decoder(tuple[float, str | None])  # value, or what was wrong


class Agent:
    """One process on a host. Call `submit`, then `result`; agents work concurrently."""

    def __init__(self, lab: Lab, host: str) -> None:
        self.host = host
        self._action, self._submitted_at = "nothing", 0.0
        self.connection, other_end = multiprocessing.Pipe()
        self.child = lab.spawn(host, _serve, other_end)
        other_end.close()  # only the agent holds it open: its death closes the pipe at once

    def submit(self, action: str, task: Task) -> None:
        """Start the task; a PeerError of `result` names `action`."""
        self._action, self._submitted_at = action, time.monotonic()
        self.connection.send_bytes(msgspec.msgpack.encode(task))

    def result(self, deadline: Seconds) -> float:
        """Return the last task's result by `deadline` (time.monotonic()), or raise PeerError."""
        try:
            if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                raise self._lost("no result")
            value, wrong = _results.decode(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.child.wait(1.0)
            raise self._lost(f"its process {self.child.reason}") from None
        if wrong is not None:
            raise self._lost(wrong)
        return value

    def _lost(self, cause: str) -> PeerError:
        waited = time.monotonic() - self._submitted_at
        return PeerError(f"host {self.host}", action=self._action, waited=waited, cause=cause)


def _serve(connection: Connection) -> None:
    while True:
        task = _tasks.decode(connection.recv_bytes())
        value, wrong = math.nan, None
        try:
            value = task.run()
        except OSError as error:  # a network error is a result, not a crash
            wrong = str(error)
        connection.send_bytes(msgspec.msgpack.encode((float(value), wrong)))


def _arrived_by(
    connection: socket.socket, moment: Seconds, loss_timeout: Seconds
) -> tuple[Seconds, int]:
    """Return the first time after `moment` with no undelivered bytes, and all bytes by then.

    TCP delivers bytes in order: those behind a lost packet wait, and are delivered all at once when
    it was resent, seconds later on a slow link. Between two times at which no bytes wait, exactly
    the bytes that arrived in between are counted.
    """
    unused = bytearray(_CHUNK)
    latest = moment + loss_timeout
    while True:
        connection.settimeout(_remaining(latest + EXTRA_TIMEOUT / 2))
        if not connection.recv_into(unused, _CHUNK, socket.MSG_TRUNC):  # counts, but copies nothing
            raise ConnectionResetError("the sender closed the connection")
        if (now := time.monotonic()) >= moment and (now > latest or not _held_back(connection)):
            state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
            (received,) = _BYTES_RECEIVED.unpack(state)
            return now, received


def _held_back(connection: socket.socket) -> int:
    """Return the memory of bytes that have arrived and are not delivered."""
    (memory,) = _MEMORY.unpack(connection.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMORY.size))
    return int(memory)


def _remaining(deadline: Seconds) -> Seconds:
    """Return the seconds until `deadline`; raise TimeoutError if it has passed."""
    if (remaining := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return remaining

"""Measure round trips with UDP echoes and goodput with TCP, by processes on the lab's hosts.

A described bandwidth counts whole packets. Of 1500 bytes on the wire TCP carries 1448 (the others
are IP and TCP headers with timestamps), so received bytes are multiplied by 1500 / 1448.
"""

import math
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from polyrhythm.describe.cluster import Cluster
from polyrhythm.errors import PeerError
from polyrhythm.lab.agent import AgentPool, Task
from polyrhythm.lab.channel import MIN_QUEUE, QUEUE_TIME
from polyrhythm.lab.lab import Lab
from polyrhythm.types import BytesPerSecond, Seconds

Pair = tuple[str, str]  # source host, target host

SEGMENT, PACKET = 1448, 1500  # bytes that TCP carries, of those on the wire
NUM_ECHOES = 25
EXTRA_TIMEOUT: Seconds = 10.0  # for a busy machine, on top of a task's own duration
START_TIMEOUT: Seconds = 60.0  # longest wait for one more agent to start

_Tasks = tuple[Task, Task, Seconds]  # at the source, at the target, and the deadline of both

_ECHO_GAP: Seconds = 0.02  # between echoes, so that one pause of the machine does not delay all
_PORT = 7000
_CHUNK = 1 << 18
_STAMP = struct.Struct("d")
_INITIAL_WINDOW = 10  # segments that TCP sends before the first acknowledgement (RFC 6928)
_BURST = 8 * PACKET  # a host's smallest burst: tcp_min_tso_segs
_SO_MEMINFO, _MEMORY = 55, struct.Struct("I")  # its first number is the receive memory
_BYTES_RECEIVED = struct.Struct("128xQ")  # tcpi_bytes_received of struct tcp_info


@dataclass(frozen=True, slots=True)
class MeasureWindow:
    """Let TCP find the bandwidth during `settle`; count arrivals during `length` after it."""

    settle: Seconds
    length: Seconds
    loss_timeout: Seconds = 5.0  # how long a lost packet may block delivery of later ones


def window_for(cluster: Cluster, pairs: Sequence[Pair]) -> MeasureWindow:
    """Return a window in which the slowest pair is past slow start and its rate is steady."""
    settle = length = loss_timeout = 0.0
    for a, b in pairs:
        link, round_trip = cluster.link(a, b), described_round_trip(cluster, (a, b))
        segments_in_flight = link.bandwidth * round_trip / PACKET
        doublings = math.log2(max(1.0, segments_in_flight / _INITIAL_WINDOW))
        settle = max(settle, 0.3 + (3 + doublings) * round_trip)
        length = max(length, 1.0, 4 * round_trip, 50 * _BURST / link.bandwidth)
        # A resent packet waits for the whole queue, maybe repeatedly: bursts are lost together.
        loss_timeout = max(loss_timeout, 3 * (round_trip + QUEUE_TIME + MIN_QUEUE / link.bandwidth))
    return MeasureWindow(settle, length, loss_timeout)


def described_round_trip(cluster: Cluster, pair: Pair) -> Seconds:
    a, b = pair
    return cluster.link(a, b).latency + cluster.link(b, a).latency


class Meter:
    """Measure in one lab repeatedly; the measuring processes end with the `with` block."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._agents = AgentPool(lab)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._agents.end()

    def round_trips(self, pairs: Sequence[Pair], num_echoes: int = NUM_ECHOES) -> list[Seconds]:
        """Measure the round trips of all pairs concurrently."""
        longest = max(described_round_trip(self._lab.cluster, pair) for pair in pairs)

        def tasks(now: Seconds) -> _Tasks:
            deadline = now + num_echoes * _ECHO_GAP + longest + EXTRA_TIMEOUT
            client = partial(_median_echo_time, num_echoes, deadline)
            return client, partial(_echo, deadline), deadline

        return self._run_on_pairs("round trip", pairs, tasks)[0]

    def goodput(
        self, pairs: Sequence[Pair], window: MeasureWindow | None = None
    ) -> list[BytesPerSecond]:
        """Measure the goodput of all pairs concurrently; then wait until the links are empty."""
        chosen = window or window_for(self._lab.cluster, pairs)

        def tasks(now: Seconds) -> _Tasks:
            begin = now + chosen.settle
            # A pair that connects as late as `begin + EXTRA_TIMEOUT` still gets a whole window.
            longest = EXTRA_TIMEOUT + chosen.settle + chosen.length + 2 * chosen.loss_timeout
            deadline = begin + longest + EXTRA_TIMEOUT
            return partial(_send, deadline), partial(_receive, begin, chosen), deadline

        _, rates = self._run_on_pairs("goodput", pairs, tasks)
        self._drain(pairs)
        return rates

    def _run_on_pairs(
        self, action: str, pairs: Sequence[Pair], tasks: Callable[[Seconds], _Tasks]
    ) -> tuple[list[float], list[float]]:
        """Run both tasks for every pair, each on its own port; return all results.

        `tasks` gets the time at which all agents run: on a slow machine it takes seconds to start
        many of them, which is not part of a measurement.
        """
        targets = [self._agents.acquire(b) for _, b in pairs]
        sources = [self._agents.acquire(a) for a, _ in pairs]
        for agent in [*sources, *targets]:
            agent.submit("starting", _no_task)
        for agent in [*sources, *targets]:
            agent.result(time.monotonic() + START_TIMEOUT)
        at_source, at_target, deadline = tasks(time.monotonic())
        for number, agent in enumerate(targets):
            agent.submit(action, at_target, _PORT + number)
        for number, agent in enumerate(sources):
            agent.submit(action, at_source, (self._lab.address(pairs[number][1]), _PORT + number))
        # One second more: a task's own timeout has the more precise error.
        results = [agent.result(deadline + 1.0) for agent in [*sources, *targets]]
        for agent in [*sources, *targets]:
            self._agents.release(agent)
        return results[: len(pairs)], results[len(pairs) :]

    def _drain(self, pairs: Sequence[Pair]) -> None:
        """Wait until the queues are empty: left-over packets would delay the next measurement."""
        cluster, start = self._lab.cluster, time.monotonic()
        slowest = min(cluster.link(*pair).bandwidth for pair in pairs)
        while queued := max((pair.backlog for pair in self._lab.report().pairs), default=0):
            waited = time.monotonic() - start
            if waited > EXTRA_TIMEOUT + 2 * (QUEUE_TIME + MIN_QUEUE / slowest):
                cause = f"{queued} bytes are still queued"
                raise PeerError("the links", action="emptying them", waited=waited, cause=cause)
            time.sleep(0.05)
        time.sleep(max(cluster.link(*pair).latency for pair in pairs))


def _no_task() -> float:
    return 0.0


def _echo(deadline: Seconds, port: int) -> float:
    """Echo datagrams until an empty one arrives; return how many."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", port))
        num_echoes = 0
        while True:
            server.settimeout(_remaining(deadline))
            data, sender = server.recvfrom(64)
            if not data:
                return num_echoes
            server.sendto(data, sender)
            num_echoes += 1


def _median_echo_time(num_echoes: int, deadline: Seconds, address: tuple[str, int]) -> float:
    """Return the median round trip of datagrams, each of which carries its send time."""
    times: list[Seconds] = []
    next_at = time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(address)
        while len(times) < num_echoes:
            _remaining(deadline)
            try:
                if time.monotonic() >= next_at:
                    client.send(_STAMP.pack(time.monotonic()))
                    next_at += _ECHO_GAP
                client.settimeout(max(1e-4, next_at - time.monotonic()))
                (sent_at,) = _STAMP.unpack(client.recv(64))
                times.append(time.monotonic() - sent_at)
            except (TimeoutError, ConnectionRefusedError):  # in flight; no echo server yet
                continue
        client.send(b"")
    return statistics.median(times)


def _send(deadline: Seconds, address: tuple[str, int]) -> float:
    """Send at full speed until the receiver closes the connection; return the bytes sent."""
    chunk = bytes(_CHUNK)
    with _connected(address, deadline) as connection:
        # Discard unsent bytes on close.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sent = 0
        while True:
            connection.settimeout(_remaining(deadline))
            try:
                sent += connection.send(chunk)
            except (ConnectionResetError, BrokenPipeError):
                return sent


def _connected(address: tuple[str, int], deadline: Seconds) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=_remaining(deadline))
        except ConnectionRefusedError:  # the receiver does not listen yet
            time.sleep(0.01)


def _receive(begin: Seconds, window: MeasureWindow, port: int) -> float:
    """Return wire bytes per second in a window that starts at `begin`, or later if it must."""
    with socket.create_server(("", port)) as server:
        server.settimeout(_remaining(begin + EXTRA_TIMEOUT))
        connection, _ = server.accept()
    if (now := time.monotonic()) > begin:  # a busy machine: TCP gets its time to settle anyway
        begin = now + window.settle
    with connection:
        started, before = _arrived_by(connection, begin, window.loss_timeout)
        ended, after = _arrived_by(connection, started + window.length, window.loss_timeout)
    return (after - before) / (ended - started) * PACKET / SEGMENT


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

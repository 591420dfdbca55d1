"""The meter: processes on a lab's hosts that echo datagrams, and send what TCP carries.

A described bandwidth counts whole packets. Of 1500 bytes on the wire TCP carries 1448 (the others
are the headers of IP and TCP, timestamps included), so what arrives is multiplied by 1500 / 1448.
"""

import math
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from polyrhythm.describe.cluster import Cluster
from polyrhythm.errors import PeerError
from polyrhythm.lab.agent import AgentPool, Task
from polyrhythm.lab.channel import MIN_QUEUE, QUEUE_TIME
from polyrhythm.lab.lab import Lab
from polyrhythm.types import BytesPerSecond, Seconds

Pair = tuple[str, str]  # from this host to that one

SEGMENT, PACKET = 1448, 1500  # bytes that TCP carries, of those on the wire
NUM_ECHOES = 25
EXTRA_TIMEOUT: Seconds = (
    10.0  # for the processes of a busy machine, beyond the time that a task takes
)

_ECHO_GAP: Seconds = 0.02  # apart, so that one pause of the machine does not spoil them all
_PORT = 7000
_CHUNK = 1 << 18
_STAMP = struct.Struct("d")
_INITIAL_WINDOW = 10  # segments that TCP sends before the first acknowledgement (RFC 6928)
_BURST = 8 * PACKET  # what a host hands over at once at the least: its tcp_min_tso_segs
_SO_MEMINFO, _MEMORY = 55, struct.Struct("I")  # the first number is of what is to be received
_BYTES_RECEIVED = struct.Struct("128xQ")  # tcpi_bytes_received of struct tcp_info


@dataclass(frozen=True, slots=True)
class MeasureWindow:
    """TCP gets `settle` to find the bandwidth; what arrives in the `length` after it counts."""

    settle: Seconds
    length: Seconds
    loss_timeout: Seconds = 5.0  # how long one lost packet may keep others from being given out


def window_for(cluster: Cluster, pairs: Sequence[Pair]) -> MeasureWindow:
    """So long that the slowest of the pairs is past slow start, and its figure a steady one."""
    settle = length = loss_timeout = 0.0
    for a, b in pairs:
        link, round_trip = cluster.link(a, b), described_round_trip(cluster, (a, b))
        segments_on_the_way = link.bandwidth * round_trip / PACKET
        doublings = math.log2(max(1.0, segments_on_the_way / _INITIAL_WINDOW))
        settle = max(settle, 0.3 + (3 + doublings) * round_trip)
        length = max(length, 1.0, 4 * round_trip, 50 * _BURST / link.bandwidth)
        # It waits for the whole queue, maybe more than once: bursts are lost together.
        loss_timeout = max(loss_timeout, 3 * (round_trip + QUEUE_TIME + MIN_QUEUE / link.bandwidth))
    return MeasureWindow(settle, length, loss_timeout)


def described_round_trip(cluster: Cluster, pair: Pair) -> Seconds:
    a, b = pair
    return cluster.link(a, b).latency + cluster.link(b, a).latency


class Meter:
    """Measures in one lab, time after time, with processes that end with the block."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._agents = AgentPool(lab)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._agents.end()

    def round_trips(self, pairs: Sequence[Pair], num_echoes: int = NUM_ECHOES) -> list[Seconds]:
        """Of every pair, at the same time."""
        longest = max(described_round_trip(self._lab.cluster, pair) for pair in pairs)
        deadline = time.monotonic() + num_echoes * _ECHO_GAP + longest + EXTRA_TIMEOUT
        asking = partial(_ask_echoes, num_echoes, deadline)
        times, _ = self._at_both_ends(
            "round trip", pairs, asking, partial(_echo, deadline), deadline
        )
        return times

    def goodput(
        self, pairs: Sequence[Pair], window: MeasureWindow | None = None
    ) -> list[BytesPerSecond]:
        """Of every pair, at the same time; afterwards the links are empty again."""
        window = window or window_for(self._lab.cluster, pairs)
        begin = time.monotonic() + window.settle
        end = begin + window.length
        deadline = end + 2 * window.loss_timeout + EXTRA_TIMEOUT
        receiving = partial(_receive, begin, end, window.loss_timeout)
        _, rates = self._at_both_ends(
            "goodput", pairs, partial(_send, deadline), receiving, deadline
        )
        self._drain(pairs)
        return rates

    def _at_both_ends(
        self,
        action: str,
        pairs: Sequence[Pair],
        at_source: Task,
        at_target: Task,
        deadline: Seconds,
    ) -> tuple[list[float], list[float]]:
        """What both tasks answer, for every pair; each pair has a port of its own."""
        targets = [self._agents.acquire(b) for _, b in pairs]
        sources = [self._agents.acquire(a) for a, _ in pairs]
        for number, agent in enumerate(targets):
            agent.ask(action, at_target, _PORT + number)
        for number, agent in enumerate(sources):
            agent.ask(action, at_source, (self._lab.address(pairs[number][1]), _PORT + number))
        # One second more: a task that gives up by itself knows better what it waited for.
        answers = [agent.answer(deadline + 1.0) for agent in [*sources, *targets]]
        for agent in [*sources, *targets]:
            self._agents.release(agent)
        return answers[: len(pairs)], answers[len(pairs) :]

    def _drain(self, pairs: Sequence[Pair]) -> None:
        """Wait until what the senders left in the queues is gone: it would delay the next."""
        cluster, began = self._lab.cluster, time.monotonic()
        slowest = min(cluster.link(*pair).bandwidth for pair in pairs)
        while left := max((pair.backlog for pair in self._lab.report().pairs), default=0):
            waited = time.monotonic() - began
            if waited > EXTRA_TIMEOUT + 2 * (QUEUE_TIME + MIN_QUEUE / slowest):
                cause = f"{left} bytes are still queued"
                raise PeerError("the links", action="emptying them", waited=waited, cause=cause)
            time.sleep(0.05)
        time.sleep(max(cluster.link(*pair).latency for pair in pairs))


def _echo(deadline: Seconds, port: int) -> float:
    """Send everything back, up to an empty datagram."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", port))
        num_echoes = 0
        while True:
            server.settimeout(_left(deadline))
            data, sender = server.recvfrom(64)
            if not data:
                return num_echoes
            server.sendto(data, sender)
            num_echoes += 1


def _ask_echoes(num_echoes: int, deadline: Seconds, address: tuple[str, int]) -> float:
    """The median time until a datagram comes back; it carries the time at which it left."""
    times: list[Seconds] = []
    next_at = time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(address)
        while len(times) < num_echoes:
            _left(deadline)
            try:
                if time.monotonic() >= next_at:
                    client.send(_STAMP.pack(time.monotonic()))
                    next_at += _ECHO_GAP
                client.settimeout(max(1e-4, next_at - time.monotonic()))
                (left_at,) = _STAMP.unpack(client.recv(64))
                times.append(time.monotonic() - left_at)
            except (TimeoutError, ConnectionRefusedError):  # it is on its way; nobody echoes yet
                continue
        client.send(b"")
    return statistics.median(times)


def _send(deadline: Seconds, address: tuple[str, int]) -> float:
    """Send as much as goes until the receiver has had enough."""
    chunk = bytes(_CHUNK)
    with _connected(address, deadline) as connection:
        # What was not sent by the end is thrown away, not delivered.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sent = 0
        while True:
            connection.settimeout(_left(deadline))
            try:
                sent += connection.send(chunk)
            except (ConnectionResetError, BrokenPipeError):
                return sent


def _connected(address: tuple[str, int], deadline: Seconds) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=_left(deadline))
        except ConnectionRefusedError:  # the receiver has yet to listen
            time.sleep(0.01)


def _receive(begin: Seconds, end: Seconds, loss_timeout: Seconds, port: int) -> float:
    """Bytes per second on the wire, from `begin` to `end`, or as long a moment later."""
    with socket.create_server(("", port)) as server:
        server.settimeout(_left(end))
        connection, _ = server.accept()
    with connection:
        started, before = _arrived_by(connection, begin, loss_timeout)
        ended, after = _arrived_by(connection, started + end - begin, loss_timeout)
    return (after - before) / (ended - started) * PACKET / SEGMENT


def _arrived_by(
    connection: socket.socket, moment: Seconds, loss_timeout: Seconds
) -> tuple[Seconds, int]:
    """Take in what comes; the first time after `moment` at which all that arrived is counted.

    TCP gives out bytes in order: behind a lost packet they wait, and come all at once when it was
    sent again, seconds later on a slow link. So the time is that of an arrival after which none
    wait, and between two such times no byte is missed and none is counted that came earlier.
    """
    unused = bytearray(_CHUNK)
    latest = moment + loss_timeout
    while True:
        connection.settimeout(_left(latest + EXTRA_TIMEOUT / 2))
        if not connection.recv_into(unused, _CHUNK, socket.MSG_TRUNC):  # counts, but copies nothing
            raise ConnectionResetError("the sender closed the connection")
        if (now := time.monotonic()) >= moment and (now > latest or not _held_back(connection)):
            state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
            (received,) = _BYTES_RECEIVED.unpack(state)
            return now, received


def _held_back(connection: socket.socket) -> int:
    """Memory of what has arrived and was not given out."""
    (memory,) = _MEMORY.unpack(connection.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMORY.size))
    return int(memory)


def _left(deadline: Seconds) -> Seconds:
    """Seconds from now; raises TimeoutError if there are none."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left

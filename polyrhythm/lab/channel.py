"""One direction of a link: packets leave one after the other, then travel for one latency.

Pure: `now` is an argument. A packet waits for earlier ones, takes wire bytes / bandwidth to leave,
and arrives one latency later, never before an earlier packet. A packet that finds the backlog
above the queue's limit is dropped, as in a router. A change applies to packets that have not left
completely: the unsent bytes of the packet being sent leave at the new bandwidth.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from polyrhythm.lab.namespace import VNET_HEADER
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

MIN_QUEUE: Bytes = 256 * 1024  # several bursts of 64 KB: a shorter queue starves TCP
QUEUE_TIME: Seconds = 1.0  # above any emulated round trip, so that TCP can keep the link full
MAX_BYTES = VNET_HEADER + 65535  # of a packet

# Offsets of headers in a packet.
_IP = VNET_HEADER
_LAST_BYTE_OF_DESTINATION = _IP + 19
_MIN_LENGTH = _IP + 20


def destination(packet: bytes, num_hosts: int) -> int | None:
    """Return the number of the target host; None for an address outside the lab."""
    if len(packet) < _MIN_LENGTH or packet[_IP] >> 4 != 4:
        return None
    host = packet[_LAST_BYTE_OF_DESTINATION] - 1
    return host if 0 <= host < num_hosts else None


def wire_bytes(packet: bytes) -> int:
    """Return the length as if split to the MTU: a TCP burst counts the headers of each segment."""
    length = len(packet) - _IP
    if packet[1] == 0:  # gso_type of the virtio header: one ordinary packet
        return length
    ip_header = (packet[_IP] & 15) * 4
    tcp_header = (packet[_IP + ip_header + 12] >> 4) * 4
    headers = ip_header + tcp_header
    segment = packet[4] | packet[5] << 8
    extra_segments = max(0, length - headers - 1) // segment
    return length + extra_segments * headers


@dataclass(slots=True)
class _Packet:
    leaves: Seconds
    arrives: Seconds
    wire_bytes: int
    data: bytes


@dataclass(slots=True)
class Channel:
    """A queue with bandwidth and latency. `lost`: packets are dropped.

    `held` (a host is paused): packets wait, up to the queue's limit; on release, those that are
    overdue arrive at once.
    """

    latency: Seconds
    bandwidth: BytesPerSecond
    lost: bool = False
    held: bool = False
    packets: int = 0  # delivered
    wire_bytes: int = 0  # delivered
    drops: int = 0
    peak_backlog: int = 0  # bytes
    _free_at: Seconds = 0.0  # when the last packet has left
    _last_arrival: Seconds = 0.0
    _queued: int = 0  # bytes in the queue, whether they have left or not
    _queue: deque[_Packet] = field(default_factory=deque)

    def offer(self, now: Seconds, wire_bytes: int, data: bytes) -> None:
        """Queue or drop a packet; `wire_bytes` is its length on a real wire with headers."""
        if self.lost:
            self.drops += 1
            return
        backlog = self.backlog(now)
        if backlog > max(MIN_QUEUE, self.bandwidth * QUEUE_TIME):
            self.drops += 1
            return
        self.peak_backlog = max(self.peak_backlog, backlog)
        self._free_at = max(self._free_at, now) + wire_bytes / self.bandwidth
        self._last_arrival = max(self._last_arrival, self._free_at + self.latency)
        self._queue.append(_Packet(self._free_at, self._last_arrival, wire_bytes, data))
        self._queued += wire_bytes

    def backlog(self, now: Seconds) -> int:
        """Bytes that have not left yet."""
        if self.held:
            return self._queued
        return int(max(0.0, self._free_at - now) * self.bandwidth)

    def reset_counters(self) -> None:
        self.packets = self.wire_bytes = self.drops = self.peak_backlog = 0

    def next_arrival(self) -> Seconds:
        """Return when to call `arrived`; inf if the queue is empty or held."""
        return self._queue[0].arrives if self._queue and not self.held else math.inf

    def arrived(self, now: Seconds) -> Iterator[tuple[Seconds, bytes]]:
        """Remove and yield packets that arrive by `now`, each with its arrival time."""
        while self.next_arrival() <= now:
            packet = self._queue.popleft()
            self._queued -= packet.wire_bytes
            self.packets += 1
            self.wire_bytes += packet.wire_bytes
            yield packet.arrives, packet.data

    def change(
        self,
        now: Seconds,
        *,
        latency: Seconds | None = None,
        bandwidth: BytesPerSecond | None = None,
        lost: bool | None = None,
        held: bool | None = None,
    ) -> None:
        """Change the channel from `now` on; arguments that are None change nothing."""
        was_held, old_bandwidth = self.held, self.bandwidth
        self.latency = self.latency if latency is None else latency
        self.bandwidth = self.bandwidth if bandwidth is None else bandwidth
        self.lost = self.lost if lost is None else lost
        self.held = self.held if held is None else held
        if self.lost:
            self.drops += len(self._queue)
            self._queue.clear()
            self._queued = 0
            self._free_at = 0.0
        elif not self.held:
            self._retime(now, old_bandwidth, released=was_held)

    def _retime(self, now: Seconds, old_bandwidth: float, *, released: bool) -> None:
        """Reschedule packets that have not left and, if `released`, overdue arrivals."""
        free_at = now
        last_arrival = 0.0
        for packet in self._queue:
            if packet.leaves > now:
                start = packet.leaves - packet.wire_bytes / old_bandwidth
                unsent = packet.wire_bytes - max(0.0, now - start) * old_bandwidth
                free_at += unsent / self.bandwidth
                packet.leaves = free_at
                packet.arrives = free_at + self.latency
            elif released:
                packet.arrives = max(packet.arrives, now)
            packet.arrives = last_arrival = max(packet.arrives, last_arrival)
        self._free_at, self._last_arrival = free_at, last_arrival

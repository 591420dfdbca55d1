"""One direction between two hosts: packets leave one after the other, then travel.

Pure: time comes in. A packet waits for those before it, takes wire bytes / bandwidth to leave, and
arrives one latency later, never before an earlier one. When the backlog is longer than the queue, a
packet is dropped, as a router would. What is changed while packets are on their way applies to
those that have not left: the one that is leaving has sent its part, the rest goes at the new
bandwidth.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from polyrhythm.types import Bytes, BytesPerSecond, Seconds

MIN_QUEUE: Bytes = 256 * 1024  # several bursts of 64 KB: a shorter queue starves TCP
QUEUE_TIME: Seconds = 1.0  # deep enough for any round trip here, so that a full pipe stays full


@dataclass(slots=True)
class _Packet:
    leaves: Seconds
    arrives: Seconds
    wire_bytes: int
    data: bytes


@dataclass(slots=True)
class Channel:
    """`lost`: packets vanish. `held`: they wait, up to the queue's length (a host stands still).

    What would have arrived meanwhile arrives at once when it is let go.
    """

    latency: Seconds
    bandwidth: BytesPerSecond
    lost: bool = False
    held: bool = False
    packets: int = 0  # delivered, as are the wire bytes
    wire_bytes: int = 0
    drops: int = 0
    peak_backlog: int = 0  # bytes
    _free_at: Seconds = 0.0  # when the last packet has left
    _last_arrival: Seconds = 0.0
    _queued: int = 0  # bytes in the queue, whether they have left or not
    _queue: deque[_Packet] = field(default_factory=deque)

    def offer(self, now: Seconds, wire_bytes: int, data: bytes) -> None:
        """A packet comes in; `wire_bytes` is its length on a real wire, headers counted."""
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
        """When to call `arrived`; inf if there is nothing to wait for."""
        return self._queue[0].arrives if self._queue and not self.held else math.inf

    def arrived(self, now: Seconds) -> Iterator[tuple[Seconds, bytes]]:
        """Take out what has arrived by `now`, with the time at which it was due."""
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
        """Change it from `now` on; what is None stays."""
        was_held, before = self.held, self.bandwidth
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
            self._retime(now, before, released=was_held)

    def _retime(self, now: Seconds, bandwidth_before: float, *, released: bool) -> None:
        """Give new times to what has not left; after a standstill, to everything that is late."""
        free_at = now
        last_arrival = 0.0
        for packet in self._queue:
            if packet.leaves > now:
                start = packet.leaves - packet.wire_bytes / bandwidth_before
                unsent = packet.wire_bytes - max(0.0, now - start) * bandwidth_before
                free_at += unsent / self.bandwidth
                packet.leaves = free_at
                packet.arrives = free_at + self.latency
            elif released:
                packet.arrives = max(packet.arrives, now)
            packet.arrives = last_arrival = max(packet.arrives, last_arrival)
        self._free_at, self._last_arrival = free_at, last_arrival

"""The network of a simulation, for averages: who sends how much to whom, and how fast at the most.

Latency and bandwidth are per directed link between regions, as a cluster has them. What several
flows share, a host's own connection, is dealt by the engine (`engine/sharing.py`).
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from polyrhythm.cost.sync import SMALL, uplinks_of
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.types import BytesPerSecond, Seconds


class Sending(NamedTuple):
    """What one device sends in one half of an average, to one other or to all."""

    source: int
    target: int | None
    size: float  # in all
    most: BytesPerSecond
    num_targets: int


class Network:
    def __init__(self, cluster: Cluster) -> None:
        places = {region: place for place, region in enumerate(cluster.regions)}
        self.regions = [places[device.region] for device in cluster.devices]
        self._names = cluster.regions
        self._up = [list(map(float, row)) for row in cluster.bandwidth]  # of links that are up
        self._latency = [list(map(float, row)) for row in cluster.latency]
        self._bandwidth = [list(row) for row in self._up]
        self._uplinks = uplinks_of(cluster)

    def latency(self, a: int, b: int) -> Seconds:
        """Of a word from one device to another; to itself it takes no time."""
        return 0.0 if a == b else self._latency[self.regions[a]][self.regions[b]]

    def transfer(self, a: int, b: int, size: float) -> Seconds:
        """Of so many bytes, if nothing else is under way."""
        if a == b:
            return 0.0
        bandwidth = min(self._bandwidth[self.regions[a]][self.regions[b]], self._uplinks[a])
        return self.latency(a, b) + (size / bandwidth if bandwidth else float("inf"))

    def both_ways(self, devices: Sequence[int]) -> Seconds:
        """A message begins when its sender hears that it is awaited: the slowest pair."""
        there = Counter(self.regions[device] for device in devices)
        latency = self._latency
        return max(
            (latency[a][b] + latency[b][a] for a in there for b in there if a != b or there[a] > 1),
            default=0.0,
        )

    def half(self, devices: Sequence[int], size: float, *, second: bool) -> list[Sending]:
        """What is sent when they exchange a buffer: in the first half parts to their owners.

        In the second half, owners send what they made of them. Small buffers have one owner.
        """
        others = len(devices) - 1
        if size <= SMALL:
            first, rest = devices[0], devices[1:]
            pairs = [(first, device) if second else (device, first) for device in rest]
            return [Sending(a, b, size, 0.0, 1) for a, b in pairs]
        there = Counter(self.regions[device] for device in devices)
        slowest = {
            a: min(self._bandwidth[a][b] for b in there if a != b or there[a] > 1) for a in there
        }
        received = min(self._uplinks[device] for device in devices)  # connections are symmetric
        total = others * size / len(devices)
        return [
            Sending(
                device, None, total, min(others * slowest[self.regions[device]], received), others
            )
            for device in devices
        ]

    def half_time(self, devices: Sequence[int], size: float) -> Seconds:
        """Of one half if nothing else is under way, without latency."""
        takes = 0.0
        for sending in self.half(devices, size, second=False):
            if sending.target is None:
                rate = min(sending.most, self._uplinks[sending.source])
            else:
                a, b = self.regions[sending.source], self.regions[sending.target]
                rate = min(self._bandwidth[a][b], self._uplinks[sending.source])
            takes = max(takes, sending.size / rate if rate else float("inf"))
        return takes

    def sent(self, devices: Sequence[int], size: float) -> Counter[tuple[int, int]]:
        """Bytes from region to region of both halves."""
        there = Counter(self.regions[device] for device in devices)
        share = 2 * size / len(devices)
        found: Counter[tuple[int, int]] = Counter()
        for a in there:
            for b in there:
                pairs = there[a] * (there[b] - (a == b))
                if pairs:
                    found[a, b] = pairs * share  # type: ignore[assignment]
        return found

    def changed(self, change: LinkChange) -> list[tuple[int, int, Seconds, BytesPerSecond]]:
        """Make a change; which regions, and what their link is from now on."""
        a, b = self._names.index(change.source), self._names.index(change.target)
        found = []
        for here, there in [(a, b)] if change.one_way or a == b else [(a, b), (b, a)]:
            if change.latency is not None:
                self._latency[here][there] = change.latency
            if change.bandwidth is not None:
                self._up[here][there] = change.bandwidth
            was_down = self._bandwidth[here][there] == 0
            is_up = not was_down if change.up is None else change.up
            self._bandwidth[here][there] = self._up[here][there] if is_up else 0.0
            link = self._latency[here][there], self._bandwidth[here][there]
            found.append((here, there, *link))
        return found

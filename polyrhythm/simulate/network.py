"""The simulated network, for averages: bytes and largest rates between devices.

Latency and bandwidth are per directed link between regions, as in a cluster. The engine divides a
host's own connection among its flows (`engine/flows.py`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from polyrhythm.cost.sync import SMALL, uplinks_of
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.types import BytesPerSecond, Seconds


class PhaseTransfers(NamedTuple):
    """Transfers of one phase of an average (reduce-scatter or all-gather)."""

    sources: Sequence[int]
    targets: Sequence[int]  # one per source; empty if every source sends to all others
    size: float  # total bytes of each source
    max_rate: Sequence[BytesPerSecond]  # total of each source
    weight: float  # number of connections that each source counts as at a shared host


class SimulatedNetwork:
    def __init__(self, cluster: Cluster, gateways: Sequence[int] | None = None) -> None:
        index = {region: i for i, region in enumerate(cluster.regions)}
        self.regions = [index[device.region] for device in cluster.devices]
        self._names = cluster.regions
        self._up = [list(map(float, row)) for row in cluster.bandwidth]  # of links that are up
        self._latency = [list(map(float, row)) for row in cluster.latency]
        self._bandwidth = [list(row) for row in self._up]
        self._uplinks = uplinks_of(cluster)
        self._gateways = gateways

    def latency(self, a: int, b: int) -> Seconds:
        """Latency from one device to another; 0 to itself."""
        return 0.0 if a == b else self._latency[self.regions[a]][self.regions[b]]

    def transfer(self, a: int, b: int, size: float) -> Seconds:
        """Time to send `size` bytes if nothing else is sent."""
        if a == b:
            return 0.0
        bandwidth = self._rate(a, b)
        return self.latency(a, b) + (size / bandwidth if bandwidth else float("inf"))

    def max_round_trip(self, devices: Sequence[int]) -> Seconds:
        """Round trip of the slowest pair: a message starts when its receiver has asked for it."""
        latency = self._latency
        if len(latency) == 1:
            return 2 * latency[0][0] if len(devices) > 1 else 0.0
        count = Counter(self.regions[device] for device in devices)
        return max(
            (latency[a][b] + latency[b][a] for a in count for b in count if a != b or count[a] > 1),
            default=0.0,
        )

    def phase_transfers(
        self, devices: Sequence[int], size: float, *, is_all_gather: bool = False
    ) -> PhaseTransfers:
        """Transfers of one phase: reduce-scatter sends shards to their owners, all-gather back.

        A small buffer has one owner.
        """
        if size <= SMALL:
            first, rest = [devices[0]] * (len(devices) - 1), devices[1:]
            sources, targets = (first, rest) if is_all_gather else (rest, first)
            return PhaseTransfers(sources, targets, size, (), 1)
        others = len(devices) - 1
        if self._gateways is not None:
            crossed = list(dict.fromkeys(self._gateways[device] for device in devices))
            if len(crossed) > 1:  # a ring goes through each machine once
                max_rate = [self._uplinks[gateway] for gateway in crossed]
                return PhaseTransfers(crossed, (), others * size / len(devices), max_rate, 1)
        slowest = self._slowest(devices)
        received = min([self._uplinks[device] for device in devices])  # connections are symmetric
        max_rate = [
            min(others * slowest[self.regions[device]], received, self._uplinks[device])
            for device in devices
        ]
        return PhaseTransfers(devices, (), others * size / len(devices), max_rate, others)

    def endpoints(self, source: int, target: int) -> tuple[int, int]:
        """The two devices whose connections a message passes."""
        if self._gateways is None:
            return source, target
        out, into = self._gateways[source], self._gateways[target]
        return (source, target) if out == into else (out, into)

    def phase_time(self, devices: Sequence[int], size: float) -> Seconds:
        """Time of one phase without latency, if nothing else is sent."""
        if len(devices) == 1 or size <= 0:
            return 0.0
        phase = self.phase_transfers(devices, size)
        if not phase.targets:
            rates = list(phase.max_rate)
        else:
            rates = [self._rate(a, b) for a, b in zip(phase.sources, phase.targets, strict=True)]
        slowest = min(rates)
        return phase.size / slowest if slowest else float("inf")

    def _rate(self, a: int, b: int) -> BytesPerSecond:
        return min(self._bandwidth[self.regions[a]][self.regions[b]], self._uplinks[a])

    def _slowest(self, devices: Sequence[int]) -> dict[int, BytesPerSecond]:
        """Bandwidth of the slowest link from each region to the others of these devices."""
        if len(self._bandwidth) == 1:
            return {0: self._bandwidth[0][0]}
        count = Counter(self.regions[device] for device in devices)
        return {
            a: min(self._bandwidth[a][b] for b in count if a != b or count[a] > 1) for a in count
        }

    def sent(self, devices: Sequence[int], size: float) -> Iterator[tuple[int, int, float]]:
        """Yield the bytes of both phases from region to region."""
        if size <= SMALL:
            owner = self.regions[devices[0]]
            for other in devices[1:]:
                yield owner, self.regions[other], size
                yield self.regions[other], owner, size
            return
        count = Counter(self.regions[device] for device in devices)
        share = 2 * size / len(devices)
        for a, num_a in count.items():
            for b, num_b in count.items():
                if pairs := num_a * (num_b - (a == b)):
                    yield a, b, pairs * share

    def apply_change(self, change: LinkChange) -> list[tuple[int, int, Seconds, BytesPerSecond]]:
        """Apply a change; return regions, latency and bandwidth of the changed links."""
        a, b = self._names.index(change.source), self._names.index(change.target)
        links = []
        for source, target in [(a, b)] if change.one_way or a == b else [(a, b), (b, a)]:
            if change.latency is not None:
                self._latency[source][target] = change.latency
            if change.bandwidth is not None:
                self._up[source][target] = change.bandwidth
            was_down = self._bandwidth[source][target] == 0
            is_up = not was_down if change.up is None else change.up
            self._bandwidth[source][target] = self._up[source][target] if is_up else 0.0
            link = self._latency[source][target], self._bandwidth[source][target]
            links.append((source, target, *link))
        return links

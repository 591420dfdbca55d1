"""The network of a simulation, for averages: who sends how much to whom, and how fast at the most.

Latency and bandwidth are per directed link between regions, as a cluster has them. What several
flows share, a host's own connection, is dealt by the engine (`engine/sharing.py`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from polyrhythm.cost.sync import SMALL, uplinks_of
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.types import BytesPerSecond, Seconds


class PhaseTransfers(NamedTuple):
    """One half of an average: what each source sends."""

    sources: Sequence[int]
    targets: Sequence[int]  # of each; none if every source sends to all others
    size: float  # of each source, in all
    max_rate: Sequence[BytesPerSecond]  # of each source to all
    weight: float  # connections that each source shares a host's with others for


class SimulatedNetwork:
    def __init__(self, cluster: Cluster, gateways: Sequence[int] | None = None) -> None:
        places = {region: place for place, region in enumerate(cluster.regions)}
        self.regions = [places[device.region] for device in cluster.devices]
        self._names = cluster.regions
        self._up = [list(map(float, row)) for row in cluster.bandwidth]  # of links that are up
        self._latency = [list(map(float, row)) for row in cluster.latency]
        self._bandwidth = [list(row) for row in self._up]
        self._uplinks = uplinks_of(cluster)
        self._gateways = gateways

    def latency(self, a: int, b: int) -> Seconds:
        """Of a word from one device to another; to itself it takes no time."""
        return 0.0 if a == b else self._latency[self.regions[a]][self.regions[b]]

    def transfer(self, a: int, b: int, size: float) -> Seconds:
        """Of so many bytes, if nothing else is under way."""
        if a == b:
            return 0.0
        bandwidth = self._rate(a, b)
        return self.latency(a, b) + (size / bandwidth if bandwidth else float("inf"))

    def max_round_trip(self, devices: Sequence[int]) -> Seconds:
        """A message begins when its sender hears that it is awaited: the slowest pair."""
        latency = self._latency
        if len(latency) == 1:
            return 2 * latency[0][0] if len(devices) > 1 else 0.0
        there = Counter(self.regions[device] for device in devices)
        return max(
            (latency[a][b] + latency[b][a] for a in there for b in there if a != b or there[a] > 1),
            default=0.0,
        )

    def phase_transfers(
        self, devices: Sequence[int], size: float, *, is_all_gather: bool = False
    ) -> PhaseTransfers:
        """What is sent when they exchange a buffer: in the first half parts to their owners.

        In the second half, owners send what they made of them. Small buffers have one owner.
        """
        if size <= SMALL:
            first, rest = [devices[0]] * (len(devices) - 1), devices[1:]
            return (
                PhaseTransfers(first, rest, size, (), 1)
                if is_all_gather
                else PhaseTransfers(rest, first, size, (), 1)
            )
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
        """Whose connections a message between two devices goes through."""
        if self._gateways is None:
            return source, target
        out, into = self._gateways[source], self._gateways[target]
        return (source, target) if out == into else (out, into)

    def phase_time(self, devices: Sequence[int], size: float) -> Seconds:
        """Of one half if nothing else is under way, without latency."""
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
        """Of the links from each region to all others that the devices are in."""
        if len(self._bandwidth) == 1:
            return {0: self._bandwidth[0][0]}
        there = Counter(self.regions[device] for device in devices)
        return {
            a: min(self._bandwidth[a][b] for b in there if a != b or there[a] > 1) for a in there
        }

    def sent(self, devices: Sequence[int], size: float) -> Iterator[tuple[int, int, float]]:
        """Bytes from region to region of both halves."""
        if size <= SMALL:
            owner = self.regions[devices[0]]
            for other in devices[1:]:
                yield owner, self.regions[other], size
                yield self.regions[other], owner, size
            return
        there = Counter(self.regions[device] for device in devices)
        share = 2 * size / len(devices)
        for a, here in there.items():
            for b, others in there.items():
                if pairs := here * (others - (a == b)):
                    yield a, b, pairs * share

    def apply_change(self, change: LinkChange) -> list[tuple[int, int, Seconds, BytesPerSecond]]:
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

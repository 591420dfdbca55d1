"""How long the replicas of each stage need to agree on their gradients, by how they do it.

Every member of a group owns one part of the buffer. In a first half all send each owner its part,
in a second one each owner sends what it made of them to all (`run/average/exchange.py`). All links
are used at once, so the slowest one decides; but no device sends faster in all than its uplink. A
transfer begins when its sender hears that it is awaited, so it takes a latency each way. Where a
coordinator says who averages with whom (`GroupSync`), it is asked before, and told after.

For comparison there are two others: a ring, which is what all-reduce mostly means elsewhere, in
which every part crosses the slowest link of the ring; and DT-FM's sharded servers (eq. 2), which
serve one peer after the other.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import device_links
from polyrhythm.describe.cluster import Cluster
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

Matrix = NDArray[np.float64]
# Buffers up to this have one owner, the first member of their group: it takes 0.1 ms at 1 Gbit/s,
# about as long as any message.
SMALL: Bytes = 16 * 2**10
BUCKET: Bytes = 4 * 2**20  # of what is gathered while a forward runs
GROUP_SIZE = 4  # what policies that average in groups aim at
_NUM_DRAWS = 16  # of groups, for a mean
_MAX_EXACT = 8  # members of a ring whose best order is found for certain
_NUM_IMPROVED = 8  # of larger rings, that are worked on


class Sync(StrEnum):
    ALL_REDUCE = "all_reduce"  # in two halves, over all links at once
    DECOUPLED = "decoupled"  # the same, behind the last backward and the next forward
    GROUPS = "groups"  # some of the replicas at a time; nobody waits for all
    RING = "ring"
    SEQUENTIAL = "sequential"


_COORDINATED = (Sync.ALL_REDUCE, Sync.GROUPS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Links:
    """Between devices, row = from, column = to, in the cluster's order."""

    latency: Matrix
    bandwidth: Matrix
    uplinks: Matrix  # bytes per second that each device sends at most, to all others together

    @classmethod
    def of(cls, cluster: Cluster) -> "Links":
        latency, bandwidth = device_links(cluster)
        return cls(latency=latency, bandwidth=bandwidth, uplinks=np.array(uplinks_of(cluster)))

    @cached_property
    def both_ways(self) -> Matrix:
        """The bandwidth of the slower direction of each link; 0 for a device and itself."""
        both = np.minimum(self.bandwidth, self.bandwidth.T)
        np.fill_diagonal(both, 0.0)
        return both

    def transfer(self, source: int, target: int, size: float) -> Seconds:
        return float(self.latency[source, target] + size / self.bandwidth[source, target])


def uplinks_of(cluster: Cluster) -> list[BytesPerSecond]:
    """Of each device; one that does not say has that of its fastest link."""
    sizes = Counter(device.region for device in cluster.devices)
    fastest = {}
    for here, row in zip(cluster.regions, cluster.bandwidth, strict=True):
        others = [
            bandwidth
            for there, bandwidth in zip(cluster.regions, row, strict=True)
            if sizes[there] > (here == there)
        ]
        fastest[here] = max(others, default=0.0) or math.inf  # one alone sends nothing
    return [
        fastest[device.region] if device.uplink is None else device.uplink
        for device in cluster.devices
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroup:
    """Devices that hold the same layers, and the bytes of their gradients."""

    members: tuple[int, ...]
    size: float


def reduce_scatter_times(
    groups: Sequence[ReplicaGroup], links: Links, sync: Sync, *, coordinator: int | None = None
) -> tuple[Seconds, ...]:
    """One half, the reduce-scatter or the all-gather, of each group; all groups at once.

    With a coordinator, on that device, one word to it and one back.
    """
    scatter_times = _reduce_scatter_times(groups, links, sync)
    if coordinator is None or sync not in _COORDINATED:
        return scatter_times
    words = (links.latency + links.latency.T)[coordinator]
    return tuple(
        half + max((float(words[m]) for m in group.members if m != coordinator), default=0.0)
        if len(group.members) > 1
        else half
        for group, half in zip(groups, scatter_times, strict=True)
    )


def _reduce_scatter_times(
    groups: Sequence[ReplicaGroup], links: Links, sync: Sync
) -> tuple[Seconds, ...]:
    if sync is Sync.RING:
        return tuple(_ring(group, links) for group in groups)
    if sync is Sync.SEQUENTIAL:
        return tuple(_sequential(group, links) for group in groups)
    if sync is Sync.GROUPS:
        return tuple(_in_groups(group, links) for group in groups)
    # Two devices may be in several groups together: what they send adds up.
    sent = np.zeros(links.latency.shape)
    for group in groups:
        sent[np.ix_(group.members, group.members)] += group.size / len(group.members)
    np.fill_diagonal(sent, 0.0)
    return tuple(_exchange(group.members, sent, links) for group in groups)


def _exchange(members: Sequence[int], sent: Matrix, links: Links) -> Seconds:
    """All members at once; `sent` bytes from each device to each other one, in one half.

    What a member sends to devices of other groups goes through the same uplink.
    """
    if len(members) == 1:
        return 0.0
    among, apart = np.ix_(members, members), ~np.eye(len(members), dtype=bool)
    bandwidth = np.where(apart, links.bandwidth[among], np.inf)
    both_ways = (links.latency + links.latency.T)[among]
    each = np.where(apart, both_ways, 0.0) + sent[among] / bandwidth
    in_all = (sent.sum(axis=1) / links.uplinks)[list(members)]
    return float(max(each.max(), in_all.max()))


def _sequential(group: ReplicaGroup, links: Links) -> Seconds:
    share = group.size / len(group.members)
    return max(
        sum(links.transfer(a, b, share) for b in group.members if b != a) for a in group.members
    )


def _ring(group: ReplicaGroup, links: Links) -> Seconds:
    """The best of all rings; of many members, the best that going to the nearest one next finds."""
    size, share = len(group.members), group.size / len(group.members)
    if size == 1:
        return 0.0
    takes = [
        [links.transfer(a, b, share) if a != b else 0.0 for b in group.members]
        for a in group.members
    ]
    if size <= _MAX_EXACT:
        return (size - 1) * _best_slowest(np.array(takes))
    rings = sorted(
        (_nearest_next(start, takes) for start in range(size)),
        key=lambda ring: _slowness(ring, takes),
    )
    improved = (_improved(ring, takes) for ring in rings[:_NUM_IMPROVED])
    return (size - 1) * min(_slowness(ring, takes)[0] for ring in improved)


def _best_slowest(takes: Matrix) -> Seconds:
    """The slowest link of the best ring, from paths by the set of members that they visit."""
    size = len(takes)
    best = np.full((1 << size, size), np.inf)
    best[1, 0] = 0.0
    for visited in range(3, 1 << size, 2):
        for last in range(1, size):
            if visited & (1 << last):
                before = best[visited & ~(1 << last)]
                best[visited, last] = np.maximum(before, takes[:, last]).min()
    return float(np.maximum(best[-1], takes[:, 0]).min())


def _nearest_next(start: int, takes: Sequence[Sequence[Seconds]]) -> list[int]:
    ring, left = [start], [member for member in range(len(takes)) if member != start]
    while left:
        nearest = min(left, key=lambda other: takes[ring[-1]][other])
        ring.append(nearest)
        left.remove(nearest)
    return ring


def _slowness(ring: Sequence[int], takes: Sequence[Sequence[Seconds]]) -> tuple[Seconds, Seconds]:
    """The slowest link, and all of them; the same to the last bit wherever the ring begins."""
    links = [takes[a][b] for a, b in pairwise([*ring, ring[0]])]
    return max(links), math.fsum(links)


def _improved(ring: list[int], takes: Sequence[Sequence[Seconds]]) -> list[int]:
    """Without its slowest link, as long as another way to go round does with faster ones."""
    size = len(ring)
    while True:
        first = max(range(size), key=lambda i: takes[ring[i - 1]][ring[i]])
        ring = ring[first:] + ring[:first]  # the slowest link closes it
        others = [ring[:i][::-1] + ring[i:] for i in range(2, size)]  # a stretch turned round
        others += [[*ring[1:i], ring[0], *ring[i:]] for i in range(2, size)]  # an end moved
        others += [[*ring[:i], ring[-1], *ring[i:-1]] for i in range(1, size - 1)]
        better = min(others, key=lambda other: _slowness(other, takes))
        if _slowness(better, takes) >= _slowness(ring, takes):
            return ring
        ring = better


def _in_groups(group: ReplicaGroup, links: Links) -> Seconds:
    """The mean over groups as a policy may draw them."""
    size = min(GROUP_SIZE, len(group.members))
    draw = random.Random(len(group.members))
    scatter_times = []
    for _ in range(_NUM_DRAWS):
        members = draw.sample(group.members, size)
        drawn = ReplicaGroup(members=tuple(members), size=group.size)
        scatter_times.append(_reduce_scatter_times([drawn], links, Sync.ALL_REDUCE)[0])
    return fmean(scatter_times)

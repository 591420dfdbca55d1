"""Compute how long the replicas of each stage need to average their gradients, by algorithm.

Every member of a group owns one shard of the buffer. In the reduce-scatter all members send each
owner its shard, in the all-gather each owner sends its result to all (`run/averaging/exchange.py`).
All links are used at once, so the slowest one decides; but no device sends faster in total than its
uplink. A transfer starts when its sender learns that the receive is posted, so it takes a latency
each way. If a coordinator forms the groups (`GroupSync`), it is asked before, and notified after.
Between GPUs of one site, messages of stages go over NCCL, and so do decoupled averages; all others
go over gloo. NCCL does not use the uplink, which is a network card.

For comparison there are two others: a ring, the common all-reduce elsewhere, in which every shard
crosses the slowest link of the ring; and DT-FM's sharded servers (eq. 2), which serve one peer
after the other.
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

from polyrhythm.cost.dtfm import by_device, device_links
from polyrhythm.describe.cluster import Cluster
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

Matrix = NDArray[np.float64]
# Buffers up to this size have one owner, the first member of their group: sending one takes 0.1 ms
# at 1 Gbit/s, about as long as any message.
SMALL: Bytes = 16 * 2**10
BUCKET: Bytes = 4 * 2**20  # of the all-gather during a forward
GROUP_SIZE = 4  # members per group in this estimate; group policies aim at 3 by default
_NUM_DRAWS = 16  # of groups, for a mean
_MAX_EXACT = 8  # members of a ring whose order is optimised exactly
_NUM_IMPROVED = 8  # starts that are improved, for larger rings


class Sync(StrEnum):
    ALL_REDUCE = "all_reduce"  # reduce-scatter and all-gather, over all links at once
    DECOUPLED = "decoupled"  # the same, overlapped with the last backward and the next forward
    GROUPS = "groups"  # some of the replicas at a time; no replica waits for all
    RING = "ring"
    SEQUENTIAL = "sequential"


_COORDINATED = (Sync.ALL_REDUCE, Sync.GROUPS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Links:
    """Links between devices, row = from, column = to, in the cluster's order."""

    latency: Matrix
    bandwidth: Matrix
    uplinks: Matrix  # bytes per second that each device sends at most, to all others together
    gloo: "Links | None" = None  # the same without NCCL; None if no pair uses it

    @classmethod
    def of(cls, cluster: Cluster) -> "Links":
        """Return the links of messages between stages: over NCCL inside sites, if measured."""
        latency, bandwidth = device_links(cluster)
        uplinks = np.array(uplinks_of(cluster))
        gloo = cls(latency=latency, bandwidth=bandwidth, uplinks=uplinks)
        if not (cluster.nccl_latency and cluster.nccl_bandwidth):
            return gloo
        sites = np.array(cluster.sites)
        nccl_bandwidth = by_device(cluster, cluster.nccl_bandwidth)
        over_nccl = (sites[:, None] == sites[None, :]) & (nccl_bandwidth > 0)
        nccl_latency = by_device(cluster, cluster.nccl_latency)
        return cls(
            latency=np.where(over_nccl, nccl_latency, latency),
            bandwidth=np.where(over_nccl, nccl_bandwidth, bandwidth),
            uplinks=uplinks,
            gloo=gloo,
        )

    def of_averages(self, sync: Sync) -> "Links":
        """Return the links of averages: only those of `decoupled` go over NCCL."""
        return self if self.gloo is None or sync is Sync.DECOUPLED else self.gloo

    @cached_property
    def uses_uplink(self) -> Matrix:
        """1.0 for pairs whose messages share the sender's uplink: those over gloo; else 0.0."""
        if self.gloo is None:
            return np.ones(self.bandwidth.shape)
        return np.where(self.bandwidth == self.gloo.bandwidth, 1.0, 0.0)

    @cached_property
    def both_ways(self) -> Matrix:
        """The bandwidth of the slower direction of each link; 0 for a device and itself."""
        both = np.minimum(self.bandwidth, self.bandwidth.T)
        np.fill_diagonal(both, 0.0)
        return both

    def transfer(self, source: int, target: int, size: float) -> Seconds:
        return float(self.latency[source, target] + size / self.bandwidth[source, target])


def uplinks_of(cluster: Cluster) -> list[BytesPerSecond]:
    """Return the uplink of each device; by default the bandwidth of its fastest link."""
    sizes = Counter(device.region for device in cluster.devices)
    fastest = {}
    for here, row in zip(cluster.regions, cluster.bandwidth, strict=True):
        others = [
            bandwidth
            for there, bandwidth in zip(cluster.regions, row, strict=True)
            if sizes[there] > (here == there)
        ]
        fastest[here] = max(others, default=0.0) or math.inf  # a single device sends nothing
    return [
        fastest[device.region] if device.uplink is None else device.uplink
        for device in cluster.devices
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroup:
    """Devices with the same layers, and the bytes of their gradients."""

    members: tuple[int, ...]
    size: float


def reduce_scatter_times(
    groups: Sequence[ReplicaGroup], links: Links, sync: Sync, *, coordinator: int | None = None
) -> tuple[Seconds, ...]:
    """Return the time of each group's reduce-scatter (or all-gather), with all groups at once.

    With a coordinator on a device, add one message to it and one back.
    """
    links = links.of_averages(sync)
    scatter_times = _reduce_scatter_times(groups, links, sync)
    if coordinator is None or sync not in _COORDINATED:
        return scatter_times
    round_trips = (links.latency + links.latency.T)[coordinator]
    return tuple(
        time + max((float(round_trips[m]) for m in group.members if m != coordinator), default=0.0)
        if len(group.members) > 1
        else time
        for group, time in zip(groups, scatter_times, strict=True)
    )


def _reduce_scatter_times(
    groups: Sequence[ReplicaGroup], links: Links, sync: Sync
) -> tuple[Seconds, ...]:
    alone = {Sync.RING: _ring, Sync.SEQUENTIAL: _sequential, Sync.GROUPS: _in_groups}.get(sync)
    if alone is not None:
        return tuple(alone(group, links) for group in groups)
    # Two devices may share several groups: their traffic adds up.
    sent = np.zeros(links.latency.shape)
    for group in groups:
        sent[np.ix_(group.members, group.members)] += group.size / len(group.members)
    np.fill_diagonal(sent, 0.0)
    return tuple(_exchange(group.members, sent, links) for group in groups)


def _exchange(members: Sequence[int], sent: Matrix, links: Links) -> Seconds:
    """Return the time of a reduce-scatter among `members`; `sent[a, b]` are bytes of all groups.

    A member's traffic to devices of other groups shares its uplink.
    """
    if len(members) == 1:
        return 0.0
    among, apart = np.ix_(members, members), ~np.eye(len(members), dtype=bool)
    bandwidth = np.where(apart, links.bandwidth[among], np.inf)
    both_ways = (links.latency + links.latency.T)[among]
    each = np.where(apart, both_ways, 0.0) + sent[among] / bandwidth
    in_all = ((sent * links.uses_uplink).sum(axis=1) / links.uplinks)[list(members)]
    return float(max(each.max(), in_all.max()))


def _sequential(group: ReplicaGroup, links: Links) -> Seconds:
    share = group.size / len(group.members)
    return max(
        sum(links.transfer(a, b, share) for b in group.members if b != a) for a in group.members
    )


def _ring(group: ReplicaGroup, links: Links) -> Seconds:
    """Return the time of the best ring; for many members, of the best nearest-neighbour ring."""
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
    """Return the slowest link of the best ring, by dynamic programming over sets of members."""
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
    """Return the slowest link and the sum of all, bit-identical for every start of the ring."""
    links = [takes[a][b] for a, b in pairwise([*ring, ring[0]])]
    return max(links), math.fsum(links)


def _improved(ring: list[int], takes: Sequence[Sequence[Seconds]]) -> list[int]:
    """Replace the slowest link by faster ones while a local change achieves that."""
    size = len(ring)
    while True:
        first = max(range(size), key=lambda i: takes[ring[i - 1]][ring[i]])
        ring = ring[first:] + ring[:first]  # the slowest link closes the ring
        others = [ring[:i][::-1] + ring[i:] for i in range(2, size)]  # reverse a segment
        others += [[*ring[1:i], ring[0], *ring[i:]] for i in range(2, size)]  # move an end
        others += [[*ring[:i], ring[-1], *ring[i:-1]] for i in range(1, size - 1)]
        better = min(others, key=lambda other: _slowness(other, takes))
        if _slowness(better, takes) >= _slowness(ring, takes):
            return ring
        ring = better


def _in_groups(group: ReplicaGroup, links: Links) -> Seconds:
    """Return the mean over random groups, as a policy may form them."""
    size = min(GROUP_SIZE, len(group.members))
    draw = random.Random(len(group.members))
    scatter_times = []
    for _ in range(_NUM_DRAWS):
        members = draw.sample(group.members, size)
        drawn = ReplicaGroup(members=tuple(members), size=group.size)
        scatter_times.append(_reduce_scatter_times([drawn], links, Sync.ALL_REDUCE)[0])
    return fmean(scatter_times)

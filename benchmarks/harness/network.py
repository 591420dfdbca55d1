"""Clusters for a lab, and changes of its links: all at once, or at random."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations_with_replacement, product

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.lab.agent import PACKET, SEGMENT
from polyrhythm.lab.lab import Lab
from polyrhythm.types import BytesPerSecond, Seconds

WIRE_OVERHEAD = PACKET / SEGMENT  # bytes on the wire per byte that TCP carries
PREEMPTED_SHARE = 0.4  # of draws

_REGION = "lab"
_FAST_LATENCY: Seconds = 0.0002  # of the network over which connections are made
_FAST_BANDWIDTH: BytesPerSecond = 125e6


def uniform_cluster(hosts: Iterable[str], latency: Seconds, bandwidth: BytesPerSecond) -> Cluster:
    return Cluster(
        name=_REGION,
        devices=tuple(Device(name=name, region=_REGION) for name in hosts),
        regions=(_REGION,),
        latency=((latency,),),
        bandwidth=((bandwidth,),),
    )


def set_links(
    lab: Lab,
    latency: Seconds,
    bandwidth: BytesPerSecond,
    *,
    between: tuple[str, str] = (_REGION, _REGION),
    one_way: bool = False,
) -> None:
    """Change all links of a uniform cluster, or those between two hosts or regions."""
    source, target = between
    lab.change(
        LinkChange(
            at=0.0,
            source=source,
            target=target,
            latency=latency,
            bandwidth=bandwidth,
            one_way=one_way,
        )
    )


def lab_cluster(cluster: Cluster) -> Cluster:
    """Add room for packet headers, which a lab counts: n bytes then take n / bandwidth."""
    wire = (tuple(rate * WIRE_OVERHEAD for rate in row) for row in cluster.bandwidth)
    return replace(cluster, bandwidth=tuple(wire))


def make_links_fast(lab: Lab) -> None:
    """Give all links of a lab a low latency: making connections takes many messages."""
    for pair in combinations_with_replacement(lab.cluster.regions, 2):
        set_links(lab, _FAST_LATENCY, _FAST_BANDWIDTH, between=pair)


def restore_links(lab: Lab) -> None:
    """Give all links the latency and bandwidth of the lab's cluster."""
    cluster = lab.cluster
    for (i, a), (j, b) in product(enumerate(cluster.regions), repeat=2):
        speed = cluster.latency[i][j], cluster.bandwidth[i][j]
        set_links(lab, *speed, between=(a, b), one_way=True)


def preemptions(
    links: Mapping[tuple[str, str], tuple[BytesPerSecond, BytesPerSecond]],
    *,
    dwell: Seconds,
    until: Seconds,
    seed: int,
) -> list[LinkChange]:
    """Draw for each direction if it is preempted, again after random dwell times; sort by time.

    `links`: the bandwidth of each direction while it is free, and while it is preempted.
    """
    draw, changes = random.Random(seed), list[LinkChange]()
    for (source, target), (free, preempted) in links.items():
        at = 0.0
        while at < until:
            rate = preempted if draw.random() < PREEMPTED_SHARE else free
            changes.append(
                LinkChange(at=at, source=source, target=target, bandwidth=rate, one_way=True)
            )
            at += draw.expovariate(1 / dwell)
    return sorted(changes, key=lambda change: change.at)

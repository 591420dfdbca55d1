"""Splits regions: every device becomes a region, so that a scenario can change single links."""

from collections.abc import Iterator
from dataclasses import replace

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.simulate.job import SimulatedJob


def split_regions(job: SimulatedJob) -> SimulatedJob:
    """Return the job with one region per device, if a link change names a device."""
    cluster, changes = job.cluster, job.scenario.link
    if all({change.source, change.target} <= set(cluster.regions) for change in changes):
        return job
    pairs = tuple(pair for change in changes for pair in _device_changes(change, cluster))
    nodes = job.nodes or tuple(device.region for device in cluster.devices)
    scenario = replace(job.scenario, link=pairs)
    return replace(job, cluster=_region_per_device(cluster), scenario=scenario, nodes=nodes)


def _region_per_device(cluster: Cluster) -> Cluster:
    index = {region: i for i, region in enumerate(cluster.regions)}
    rows = [index[device.region] for device in cluster.devices]
    names = tuple(device.name for device in cluster.devices)
    prices = cluster.egress_price_per_gb
    return replace(
        cluster,
        devices=tuple(replace(device, region=device.name) for device in cluster.devices),
        regions=names,
        latency=tuple(tuple(cluster.latency[a][b] for b in rows) for a in rows),
        bandwidth=tuple(tuple(cluster.bandwidth[a][b] for b in rows) for a in rows),
        latency_spread=(),
        bandwidth_spread=(),
        egress_price_per_gb=tuple(prices[row] for row in rows) if prices else (),
    )


def _device_changes(change: LinkChange, cluster: Cluster) -> Iterator[LinkChange]:
    """Yield the change for every pair of devices that it affects, per direction."""
    sources, targets = _devices_in(change.source, cluster), _devices_in(change.target, cluster)
    directions = [(sources, targets)]
    if not change.one_way and sources != targets:
        directions.append((targets, sources))
    for senders, receivers in directions:
        for a in senders:
            for b in receivers:
                if a != b:
                    yield replace(change, source=a, target=b, one_way=True)


def _devices_in(name: str, cluster: Cluster) -> list[str]:
    if name in cluster.regions:
        return [device.name for device in cluster.devices if device.region == name]
    return [name]

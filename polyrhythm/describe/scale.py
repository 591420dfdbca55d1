"""Scale a cluster and a scenario: shorter times, smaller messages, fewer devices.

`time_scale` is rehearsal seconds per real second and `byte_scale` rehearsal bytes per real byte. A
message with `byte_scale` times the bytes takes `time_scale` times as long, so every ratio of times
stays the same; code that emulates compute must scale its seconds by `time_scale` itself.
"""

from collections import Counter
from dataclasses import replace

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import LinkChange, Scenario, Slow
from polyrhythm.describe.units import check_amount
from polyrhythm.errors import DescriptionError
from polyrhythm.types import BytesPerSecond, Seconds


def scaled_cluster(cluster: Cluster, *, time_scale: float, byte_scale: float) -> Cluster:
    """Return the cluster for a rehearsal: latencies and bandwidths are scaled, devices are not.

    Speed is a ratio already. Memory decides what a plan may place where; a rehearsal carries out
    the plan of the real cluster, so it keeps the real memory.
    """
    _check_scales(time_scale, byte_scale)
    rate_scale = byte_scale / time_scale
    return replace(
        cluster,
        devices=tuple(
            device if device.uplink is None else replace(device, uplink=device.uplink * rate_scale)
            for device in cluster.devices
        ),
        latency=tuple(tuple(latency * time_scale for latency in row) for row in cluster.latency),
        bandwidth=tuple(tuple(rate * rate_scale for rate in row) for row in cluster.bandwidth),
    )


def scaled_scenario(scenario: Scenario, *, time_scale: float, byte_scale: float) -> Scenario:
    """Return the scenario for a rehearsal: its times and links are scaled.

    Factors and probabilities are ratios already. Raises DescriptionError for a trace without
    trace_duration, since the scenario does not know its recorded length.
    """
    _check_scales(time_scale, byte_scale)
    return replace(
        scenario,
        slow=tuple(_scaled_slow(slow, i, time_scale) for i, slow in enumerate(scenario.slow)),
        link=tuple(_scaled_change(change, time_scale, byte_scale) for change in scenario.link),
        pause=tuple(
            replace(pause, at=pause.at * time_scale, until=pause.until * time_scale)
            for pause in scenario.pause
        ),
        kill=tuple(replace(kill, at=kill.at * time_scale) for kill in scenario.kill),
        join=tuple(replace(join, at=join.at * time_scale) for join in scenario.join),
    )


def fewer_devices(cluster: Cluster, num_devices: int) -> Cluster:
    """Return a smaller cluster: each region keeps its share, at least one device if possible.

    A region keeps its first devices in their order; a region without devices is dropped.
    """
    if not 1 <= num_devices <= len(cluster.devices):
        raise DescriptionError(
            f"{num_devices} of the {len(cluster.devices)} devices of cluster {cluster.name!r}",
            expected=f"1 to {len(cluster.devices)}",
            fix="ask for a number of devices that the cluster has",
        )
    places = _shares(cluster, num_devices)
    devices = []
    for device in cluster.devices:
        if places[device.region]:
            places[device.region] -= 1
            devices.append(device)
    left = {device.region for device in devices}
    kept = [i for i, region in enumerate(cluster.regions) if region in left]
    prices = cluster.egress_price_per_gb
    return replace(
        cluster,
        devices=tuple(devices),
        regions=tuple(cluster.regions[i] for i in kept),
        latency=_part(cluster.latency, kept),
        bandwidth=_part(cluster.bandwidth, kept),
        latency_spread=_part(cluster.latency_spread, kept),
        bandwidth_spread=_part(cluster.bandwidth_spread, kept),
        egress_price_per_gb=tuple(prices[i] for i in kept) if prices else (),
    )


def _part(matrix: tuple[tuple[float, ...], ...], kept: list[int]) -> tuple[tuple[float, ...], ...]:
    """Return the kept rows and columns of a matrix, which may be empty."""
    return tuple(tuple(matrix[i][j] for j in kept) for i in kept) if matrix else ()


def _shares(cluster: Cluster, num_devices: int) -> Counter[str]:
    """Return how many devices each region keeps: one each, the rest by Sainte-Lague's method.

    No region is given more than it has: its quotient is above 1/2 while it has room and below
    1/2 once it is full.
    """
    sizes = Counter(device.region for device in cluster.devices)
    regions = [region for region in cluster.regions if sizes[region]]
    shares: Counter[str] = Counter()
    for _ in range(num_devices):
        # Ties go to the region that is listed first: max keeps the first of equals.
        neediest = max(
            regions,
            key=lambda region: (not shares[region], sizes[region] / (2 * shares[region] + 1)),
        )
        shares[neediest] += 1
    return shares


def _scaled_slow(slow: Slow, index: int, time_scale: float) -> Slow:
    if slow.trace is not None and slow.trace_duration is None and time_scale != 1:
        raise DescriptionError(
            f"slow[{index}]: the trace {slow.trace!r} has no trace_duration to scale",
            expected="a time for the whole recording",
            fix='add trace_duration, such as "9h", to the entry',
        )
    return replace(
        slow,
        start=slow.start * time_scale,
        until=_scaled(slow.until, time_scale),
        trace_duration=_scaled(slow.trace_duration, time_scale),
    )


def _scaled_change(change: LinkChange, time_scale: float, byte_scale: float) -> LinkChange:
    bandwidth: BytesPerSecond | None = _scaled(change.bandwidth, byte_scale / time_scale)
    latency: Seconds | None = _scaled(change.latency, time_scale)
    return replace(change, at=change.at * time_scale, latency=latency, bandwidth=bandwidth)


def _scaled(amount: float | None, scale: float) -> float | None:
    return None if amount is None else amount * scale


def _check_scales(time_scale: float, byte_scale: float) -> None:
    check_amount("time_scale", time_scale, zero=False)
    check_amount("byte_scale", byte_scale, zero=False)

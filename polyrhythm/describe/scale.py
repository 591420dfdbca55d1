"""Scale a cluster and a scenario: shorter times, smaller messages, fewer devices.

`time_scale` is rehearsal seconds per real second and `byte_scale` rehearsal bytes per real byte. A
message with `byte_scale` times the bytes takes `time_scale` times as long, so every ratio of times
stays the same; code that emulates compute must scale its seconds by `time_scale` itself.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any, get_type_hints

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import Scenario
from polyrhythm.describe.units import check_amount, kind_in
from polyrhythm.errors import DescriptionError
from polyrhythm.types import BytesPerSecond, Seconds


def scaled_cluster(cluster: Cluster, *, time_scale: float, byte_scale: float) -> Cluster:
    """Return the cluster for a rehearsal: latencies and bandwidths are scaled, devices are not.

    Speed is a ratio already. Memory decides what a plan may place where; a rehearsal carries out
    the plan of the real cluster, so it keeps the real memory.
    """
    scaled: Cluster = _scaled(cluster, _scales(time_scale, byte_scale))
    return scaled


def scaled_scenario(scenario: Scenario, *, time_scale: float, byte_scale: float) -> Scenario:
    """Return the scenario for a rehearsal: its times and links are scaled.

    Factors and probabilities are ratios already. Raises DescriptionError for a trace without
    trace_duration, since the scenario does not know its recorded length.
    """
    scales = _scales(time_scale, byte_scale)
    for index, slow in enumerate(scenario.slow):
        if slow.trace is not None and slow.trace_duration is None and time_scale != 1:
            raise DescriptionError(
                f"slow[{index}]: the trace {slow.trace!r} has no trace_duration to scale",
                expected="a time for the whole recording",
                fix='add trace_duration, such as "9h", to the entry',
            )
    scaled: Scenario = _scaled(scenario, scales)
    return scaled


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
        nccl_latency=_part(cluster.nccl_latency, kept),
        nccl_bandwidth=_part(cluster.nccl_bandwidth, kept),
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


def _scales(time_scale: float, byte_scale: float) -> dict[object, float]:
    """Return the factor of each kind of quantity; others stay as they are."""
    check_amount("time_scale", time_scale, zero=False)
    check_amount("byte_scale", byte_scale, zero=False)
    return {Seconds: time_scale, BytesPerSecond: byte_scale / time_scale}


def _scaled(value: Any, scales: Mapping[object, float], scale: float | None = None) -> Any:
    """Scale a record's quantities by their types, also those in records and tuples within it."""
    if isinstance(value, tuple):
        return tuple(_scaled(each, scales, scale) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        kinds = _kinds(type(value)).items()
        changes = {
            name: _scaled(getattr(value, name), scales, scales.get(kind)) for name, kind in kinds
        }
        return replace(value, **changes)
    return value if value is None or scale is None else value * scale


@cache
def _kinds(record: type) -> dict[str, object | None]:
    hints = get_type_hints(record, include_extras=True)
    return {name: kind_in(hint) for name, hint in hints.items()}

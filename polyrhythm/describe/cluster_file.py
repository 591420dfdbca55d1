"""Read a cluster file: devices singly or by count, links as two matrices or one by one.

`docs/describe.md` shows both forms. They give equal clusters, so other files do not know which one
was used.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from polyrhythm.describe.cluster import Cluster, Device, Link
from polyrhythm.describe.read import read, unknown
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

MAX_DEVICES = 100_000  # in one entry; more is a typing error


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that the file describes."""
    form = read(path, _ClusterForm)
    try:
        return form.cluster()
    except DescriptionError as error:
        raise error.at(str(path)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceForm:
    """One device with a name, or `count` equal ones that are numbered in their region."""

    name: str | None = None
    region: str | None = None  # None: the device is its own region
    host: str | None = None
    count: int = 1
    memory: Bytes | None = None
    speed: float = 1.0
    price_per_hour: float | None = None
    flops: float | None = None
    flops_spread: float | None = None
    uplink: BytesPerSecond | None = None

    def __post_init__(self) -> None:
        if not (self.name or self.region):
            raise DescriptionError(
                "a device without a name",
                expected="a name, or a region and a count",
                fix='add name = "gpu0", or region = "Oregon" and count = 8',
            )
        if not 1 <= self.count <= MAX_DEVICES or (self.name and self.count > 1):
            raise DescriptionError(
                f"count is {self.count}" + (f" for the name {self.name!r}" if self.name else ""),
                expected=f"1 to {MAX_DEVICES}, and 1 for a device with a name",
                fix="correct count, or leave the name out to have the devices numbered",
            )
        self.device(number=0)  # refuses an invalid device while its location in the file is known

    def device(self, number: int) -> Device:
        """Return the device, or the one with this number in its region."""
        region = self.region or self.name
        assert region is not None, "__post_init__ refuses an entry without name and region"
        name = self.name or f"{region}/{number}"
        return Device(**{**_given(self, Device), "name": name, "region": region})


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkForm:
    source: str = field(metadata={"key": "from"})
    target: str = field(metadata={"key": "to"})
    latency: Seconds
    bandwidth: BytesPerSecond
    one_way: bool = False

    def __post_init__(self) -> None:
        Link(latency=self.latency, bandwidth=self.bandwidth)  # refuses an invalid link


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterForm:
    name: str
    source: str = ""
    devices: tuple[_DeviceForm, ...]
    regions: tuple[str, ...] | None = None  # None: those of the devices, in their order
    latency: tuple[tuple[Seconds, ...], ...] | None = None
    bandwidth: tuple[tuple[BytesPerSecond, ...], ...] | None = None
    links: tuple[_LinkForm, ...] = ()
    measured_at: str = ""
    latency_spread: tuple[tuple[float, ...], ...] = ()
    bandwidth_spread: tuple[tuple[float, ...], ...] = ()
    nccl_latency: tuple[tuple[Seconds, ...], ...] = ()
    nccl_bandwidth: tuple[tuple[BytesPerSecond, ...], ...] = ()
    egress_price_per_gb: tuple[float, ...] = ()
    flops_dtype: str = ""

    def __post_init__(self) -> None:
        matrices = [m for m in (self.latency, self.bandwidth) if m is not None]
        spread = self.latency_spread or self.bandwidth_spread
        if spread and not matrices:
            raise DescriptionError(
                "a spread without the matrix that it is the spread of",
                expected="latency and bandwidth as matrices in the same file",
                fix="leave the spread out, or give all links as matrices",
            )
        if matrices and (self.links or len(matrices) < 2):
            raise DescriptionError(
                "matrices and [[links]] in one file" if self.links else "only one of two matrices",
                expected="latency and bandwidth as matrices, or [[links]]",
                fix="use only one of the two forms",
            )

    def cluster(self) -> Cluster:
        devices = _numbered(self.devices)
        regions = self.regions
        if regions is None:
            regions = tuple(dict.fromkeys(device.region for device in devices))
        table = {**_given(self, Cluster), "devices": devices, "regions": regions}
        if self.latency is None:
            table["latency"], table["bandwidth"] = _matrices(self.links, devices, regions)
        return Cluster(**table)


def _given(form: "_DeviceForm | _ClusterForm", kind: type[Device | Cluster]) -> dict[str, Any]:
    """Return the values of a form for all fields of `kind`."""
    return {each.name: getattr(form, each.name) for each in fields(kind)}


def _numbered(entries: tuple[_DeviceForm, ...]) -> tuple[Device, ...]:
    devices: list[Device] = []
    next_number: Counter[str | None] = Counter()  # two entries of one region count on
    for entry in entries:
        for _ in range(entry.count):
            devices.append(entry.device(next_number[entry.region]))
            next_number[entry.region] += not entry.name
    return tuple(devices)


def _matrices(
    links: tuple[_LinkForm, ...], devices: tuple[Device, ...], regions: tuple[str, ...]
) -> tuple[tuple[tuple[Seconds, ...], ...], tuple[tuple[BytesPerSecond, ...], ...]]:
    """Return latency and bandwidth over regions; every pair must have a link."""
    num_devices = Counter(device.region for device in devices)
    # A region with one device has no link inside; Cluster allows zeros there.
    table = {(a, a): (0.0, 0.0) for a in regions if num_devices[a] < 2}
    for pair, i in _entry_of_pair(links, devices, regions).items():
        table[pair] = links[i].latency, links[i].bandwidth
    for a, b in itertools.product(regions, regions):
        if (a, b) not in table:
            raise DescriptionError(
                f"no link from {a!r} to {b!r}" + (" (inside the region)" if a == b else ""),
                expected="a link for every pair of regions, and inside a region of several devices",
                fix=f'add a [[links]] table with from = "{a}" and to = "{b}"',
            )
    latency = tuple(tuple(table[a, b][0] for b in regions) for a in regions)
    return latency, tuple(tuple(table[a, b][1] for b in regions) for a in regions)


def _entry_of_pair(
    links: tuple[_LinkForm, ...], devices: tuple[Device, ...], regions: tuple[str, ...]
) -> dict[tuple[str, str], int]:
    """Map each pair of regions to its entry in `links`; refuse two entries for one pair."""
    entry_of: dict[tuple[str, str], int] = {}
    for i, link in enumerate(links):
        a = _region(link.source, devices, regions, f"links[{i}].from")
        b = _region(link.target, devices, regions, f"links[{i}].to")
        for pair in [(a, b)] if link.one_way or a == b else [(a, b), (b, a)]:
            if pair in entry_of:
                raise DescriptionError(
                    f"links[{i}]: {pair[0]!r} to {pair[1]!r} is in links[{entry_of[pair]}] already",
                    expected="one link per direction",
                    fix="remove one of them, or make both one_way = true",
                )
            entry_of[pair] = i
    return entry_of


def _region(host: str, devices: tuple[Device, ...], regions: tuple[str, ...], where: str) -> str:
    """Return the region that `host` names, or the region whose only device it names."""
    if host in regions:
        return host
    region = {device.name: device.region for device in devices}.get(host)
    if region is None:
        known = dict.fromkeys([*regions, *(device.name for device in devices)])
        raise unknown("region or device", host, known).at(where)
    if sum(device.region == region for device in devices) > 1:
        raise DescriptionError(
            f"{where}: device {host!r} shares the region {region!r} with others",
            expected="a region, or a device that is alone in its region",
            fix=f"link {region!r} instead, or give {host!r} a region of its own",
        )
    return region

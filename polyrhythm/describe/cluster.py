"""A cluster: devices in regions, and latency and bandwidth between regions.

Latency and bandwidth are matrices over regions (row = from, column = to): 64 devices in 8 regions
need 64 links, not 4096, and devices of one region are alike for a planner. The diagonal is the
link inside a region; a region with fewer than two devices has none, and its entries may be 0.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from polyrhythm.describe.bundled_files import bundled, locate
from polyrhythm.describe.read import unknown
from polyrhythm.describe.sample import check_measured_at
from polyrhythm.describe.units import check_amount
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Bytes, BytesPerSecond, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, or a machine without one."""

    name: str
    region: str
    host: str | None = None  # the machine that has it
    memory: Bytes | None = None
    speed: float = 1.0  # relative to the device that a model was profiled on
    price_per_hour: float | None = None  # in any currency, the same for all devices
    flops: float | None = None  # operations per second, forward and backward, as `probe` measures
    flops_spread: float | None = None  # see Sample
    uplink: BytesPerSecond | None = None  # total to all others; None: that of its fastest link

    def __post_init__(self) -> None:
        check_amount(f"speed of {self.name}", self.speed, zero=False)
        check_amount(f"memory of {self.name}", self.memory, Bytes, zero=False)
        check_amount(f"price_per_hour of {self.name}", self.price_per_hour)
        check_amount(f"flops of {self.name}", self.flops, zero=False)
        check_amount(f"flops_spread of {self.name}", self.flops_spread)
        check_amount(f"uplink of {self.name}", self.uplink, BytesPerSecond, zero=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two devices: n bytes take latency + n / bandwidth."""

    latency: Seconds  # alpha: fixed cost of one message, one way
    bandwidth: BytesPerSecond

    def __post_init__(self) -> None:
        check_amount("latency", self.latency, Seconds)
        check_amount("bandwidth", self.bandwidth, BytesPerSecond, zero=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    name: str
    source: str = ""  # who measured this, and when
    devices: tuple[Device, ...]
    regions: tuple[str, ...]
    latency: tuple[tuple[Seconds, ...], ...]
    bandwidth: tuple[tuple[BytesPerSecond, ...], ...]
    measured_at: str = ""  # ISO 8601; empty if not measured
    latency_spread: tuple[tuple[float, ...], ...] = ()  # see Sample; empty if not measured
    bandwidth_spread: tuple[tuple[float, ...], ...] = ()
    # Between GPUs of one machine, over NCCL; 0 for other pairs, empty if there are none.
    nccl_latency: tuple[tuple[Seconds, ...], ...] = ()
    nccl_bandwidth: tuple[tuple[BytesPerSecond, ...], ...] = ()
    egress_price_per_gb: tuple[float, ...] = ()  # of traffic that leaves each region; empty if free
    flops_dtype: str = ""  # dtype of all flops, such as bfloat16

    def __post_init__(self) -> None:
        check_measured_at(self.measured_at)
        if not self.devices:
            raise DescriptionError(
                f"cluster {self.name!r} has no devices",
                expected="at least one",
                fix="add a [[devices]] table",
            )
        _check_unique("device", [device.name for device in self.devices])
        _check_unique("region", self.regions)
        for device in self.devices:
            if device.region not in self.regions:
                raise unknown("region", device.region, self.regions).at(f"device {device.name!r}")
        self._check_one_meaning_per_name()
        _check_square("latency", self.latency, len(self.regions))
        _check_square("bandwidth", self.bandwidth, len(self.regions))
        self._check_links()
        for name in ("latency_spread", "bandwidth_spread", "nccl_latency", "nccl_bandwidth"):
            _check_optional(name, getattr(self, name), len(self.regions))
        self._check_prices()

    def link(self, a: str, b: str) -> Link:
        """Return the link from device `a` to another device `b`."""
        if a == b:
            raise DescriptionError(
                f"link from {a!r} to itself",
                expected="two devices",
                fix="skip what a device sends to itself: it costs nothing",
            )
        return self._region_link(self._region_index(a), self._region_index(b))

    @property
    def sites(self) -> tuple[str, ...]:
        """The site of each device: inside it GPUs communicate over NCCL, between sites over gloo.

        It is the region; of a device that is alone in its region, as after a probe, the host.
        """
        num_devices = Counter(device.region for device in self.devices)
        return tuple(
            (device.host or device.region) if num_devices[device.region] == 1 else device.region
            for device in self.devices
        )

    @classmethod
    def load(cls, source: str | Path) -> "Cluster":
        """Read a .toml or .json file, or one of `bundled_networks()` by its name."""
        # Imported late: the file form builds clusters, so it imports this module.
        from polyrhythm.describe.cluster_file import read_cluster

        with locate("network", source, "networks") as path:
            return read_cluster(path)

    def _region_index(self, device_name: str) -> int:
        # A scan: an index as a field would be written into every file and message.
        for device in self.devices:
            if device.name == device_name:
                return self.regions.index(device.region)
        raise unknown("device", device_name, [device.name for device in self.devices])

    def _region_link(self, row: int, column: int) -> Link:
        return Link(latency=self.latency[row][column], bandwidth=self.bandwidth[row][column])

    def _check_one_meaning_per_name(self) -> None:
        """Refuse a device with the name of a region, unless it is that region's only device."""
        num_devices = Counter(device.region for device in self.devices)
        for device in self.devices:
            alone = device.name == device.region and num_devices[device.region] == 1
            if device.name in self.regions and not alone:
                raise DescriptionError(
                    f"device {device.name!r} has the name of a region that it is not",
                    expected="a name of its own for a device that shares its region",
                    fix=f"rename the device, for example to '{device.region}/0'",
                )

    def _check_prices(self) -> None:
        if len(self.egress_price_per_gb) not in (0, len(self.regions)):
            raise DescriptionError(
                f"egress_price_per_gb has {len(self.egress_price_per_gb)} prices",
                expected=f"one for each of the {len(self.regions)} regions, or none",
                fix="give the price of a gigabyte that leaves each region, in their order",
            )
        for price in self.egress_price_per_gb:
            check_amount("egress_price_per_gb", price)

    def _check_links(self) -> None:
        num_devices = Counter(device.region for device in self.devices)
        for row, a in enumerate(self.regions):
            for column, b in enumerate(self.regions):
                try:
                    if a == b and num_devices[a] < 2:  # no such link: any value is allowed
                        check_amount("latency", self.latency[row][row], Seconds)
                        check_amount("bandwidth", self.bandwidth[row][row], BytesPerSecond)
                    else:
                        self._region_link(row, column)
                except DescriptionError as error:
                    raise error.at(f"link from {a!r} to {b!r}") from None


def bundled_networks() -> tuple[str, ...]:
    """Return the names of the bundled clusters."""
    return bundled("networks")


def _check_unique(what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise DescriptionError(
                f"{count} {what}s are named {name!r}",
                expected=f"one {what} per name",
                fix="rename all but one of them",
            )


def _check_square(what: str, matrix: tuple[tuple[float, ...], ...], size: int) -> None:
    odd_rows = [i for i, row in enumerate(matrix) if len(row) != size]
    if len(matrix) == size and not odd_rows:
        return
    columns = [f"row {i} has {len(matrix[i])} columns" for i in odd_rows[:1]]
    raise DescriptionError(
        ", ".join([f"{what} has {len(matrix)} rows", *columns]),
        expected=f"{size} x {size}, one row and one column per region",
        fix=f"give {what} a value for every pair of regions",
    )


def _check_optional(what: str, matrix: tuple[tuple[float, ...], ...], size: int) -> None:
    if matrix:
        _check_square(what, matrix, size)
    for row in matrix:
        for value in row:
            check_amount(what, value)

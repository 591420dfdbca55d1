"""The five networks of section 4, and who is where: at random, or as the scheduler says.

Planning uses the published planner's tables (`describe/networks`), as the paper does. What then
runs, runs on the network of the paper's text: in the data centres of cases 1 and 2 the machines'
own, 100 Gbit/s inside of a machine and 25 or 10 to the others, which all its GPUs share; in case 3
10 Gbit/s within an organisation. The tables differ there: they have 25 and 10 Gbit/s as 3.125 and
1.25, and 5 for case 3.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import PUBLISHED, PairTimes, device_links, pair_times
from polyrhythm.cost.sync import Links
from polyrhythm.describe.cluster import Cluster
from polyrhythm.types import BytesPerSecond

Layout = tuple[tuple[int, ...], ...]  # [stage][pipeline]: a device
Flow = tuple[int, int]  # from a device to a device

NUM_STAGES = 8
SEEDS = (2022, 2023, 2024)  # of random layouts, appendix B.1
_GBIT: BytesPerSecond = 1e9 / 8
_INSIDE = 100 * _GBIT  # of a machine


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    name: str  # of the bundled table
    title: str
    latency: NDArray[np.float64]  # from device to device
    bandwidth: NDArray[np.float64]  # of a transfer alone
    machines: tuple[tuple[int, ...], ...]  # their GPUs
    outside: BytesPerSecond  # of a machine to all others together

    @cached_property
    def machine_of(self) -> tuple[int, ...]:
        where = {gpu: index for index, gpus in enumerate(self.machines) for gpu in gpus}
        return tuple(where[gpu] for gpu in range(len(where)))

    @cached_property
    def busy_links(self) -> Links:
        """While every GPU sends to another machine."""
        sizes = np.array([len(self.machines[machine]) for machine in self.machine_of])
        share = self.outside / np.maximum(sizes[:, None], sizes)
        apart = np.not_equal.outer(self.machine_of, self.machine_of)
        return self._links(np.where(apart, np.minimum(self.bandwidth, share), self.bandwidth))

    def links(self, flows: Iterable[Flow]) -> Links:
        """While these transfers take place, or the same back; other links are as if alone."""
        bandwidth = self.bandwidth.copy()
        for (a, b), rate in self.rates(flows).items():
            bandwidth[a, b] = bandwidth[b, a] = rate
        return self._links(bandwidth)

    def rates(self, flows: Iterable[Flow]) -> dict[Flow, BytesPerSecond]:
        """Of transfers at one time; those that leave or reach a machine share its network."""
        flows = list(flows)
        ends = [(self.machine_of[a], self.machine_of[b]) for a, b in flows]
        leaving = Counter(a for a, b in ends if a != b)
        reaching = Counter(b for a, b in ends if a != b)
        rates = {}
        for flow, (a, b) in zip(flows, ends, strict=True):
            shared = self.outside / max(leaving[a], reaching[b]) if a != b else np.inf
            rates[flow] = min(float(self.bandwidth[flow]), shared)
        return rates

    def _links(self, bandwidth: NDArray[np.float64]) -> Links:
        unlimited = np.full(len(bandwidth), np.inf)  # what is shared is in the bandwidth
        return Links(latency=self.latency, bandwidth=bandwidth, uplinks=unlimited)


def networks() -> tuple[Network, ...]:
    """Cases 1 to 5."""
    return (
        _data_centre("case1_datacenter_ondemand", "data centre, on demand", 25 * _GBIT),
        _data_centre("case2_datacenter_spot", "data centre, spot", 10 * _GBIT),
        _emulated("case3_multi_datacenter", "two data centres", inside_region=10 * _GBIT),
        _emulated("case4_regional", "four regions"),
        _emulated("case5_worldwide", "world-wide"),
    )


def planning_times(name: str) -> PairTimes:
    """What the published planner reckons with, for every depth and batch."""
    latency, bandwidth = device_links(Cluster.load(name))
    return pair_times(latency, bandwidth, PUBLISHED, num_stages=NUM_STAGES)


def random_ranks(seed: int, num_devices: int) -> list[int]:
    """Of each device, as the published script draws them: the first one stays, others shuffle."""
    others = np.arange(1, num_devices)
    np.random.RandomState(seed).shuffle(others)
    return [0, *others.tolist()]


def random_order(seed: int, num_devices: int) -> tuple[int, ...]:
    """Devices by rank. "We use the same random layouts" for Megatron (appendix B.2)."""
    return tuple(np.argsort(random_ranks(seed, num_devices)).tolist())


def random_layout(seed: int, num_devices: int) -> Layout:
    """DT-FM without its scheduler: ranks in a row make a pipeline."""
    by_rank = np.array(random_order(seed, num_devices))
    return tuple(map(tuple, by_rank.reshape(-1, NUM_STAGES).T.tolist()))


def launched(seed: int, network: Network) -> tuple[int, ...]:
    """Another reading for Megatron: devices by rank as launchers number them.

    Machines are as drawn, but the GPUs of one follow one another. With the stated layouts the
    (2, 4, 8) that the paper finds best in case 1 has halves of layers on different machines.
    """
    ranks = random_ranks(seed, len(network.machine_of))
    machines = sorted(network.machines, key=lambda gpus: ranks[gpus[0]])
    return tuple(gpu for gpus in machines for gpu in gpus)


def _data_centre(name: str, title: str, outside: BytesPerSecond) -> Network:
    cluster = Cluster.load(name)
    machines: dict[str, list[int]] = {}
    for index, device in enumerate(cluster.devices):
        alone = device.region == "standalone"  # 32 machines of one GPU in one region
        machines.setdefault(device.name if alone else device.region, []).append(index)
    of_gpus = tuple(map(tuple, machines.values()))
    latency, _ = device_links(cluster)
    bandwidth = np.full(latency.shape, outside)
    for gpus in of_gpus:
        bandwidth[np.ix_(gpus, gpus)] = _INSIDE
    return Network(
        name=name,
        title=title,
        latency=latency,
        bandwidth=bandwidth,
        machines=of_gpus,
        outside=outside,
    )


def _emulated(name: str, title: str, inside_region: BytesPerSecond | None = None) -> Network:
    """Every GPU a machine, every link held at its own speed."""
    cluster = Cluster.load(name)
    latency, bandwidth = device_links(cluster)
    if inside_region is not None:
        regions = [device.region for device in cluster.devices]
        bandwidth = np.where(np.equal.outer(regions, regions), inside_region, bandwidth)
    return Network(
        name=name,
        title=title,
        latency=latency,
        bandwidth=bandwidth,
        machines=tuple((gpu,) for gpu in range(len(latency))),
        outside=np.inf,
    )

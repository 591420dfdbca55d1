"""What the benchmark of the lab measures: clusters, pairs of their hosts, and how long."""

from dataclasses import dataclass

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.lab.meter import MeasureWindow, Pair
from polyrhythm.types import BytesPerSecond, Seconds

MEGABIT: BytesPerSecond = 125e3
UNLIMITED: BytesPerSecond = 1e12
RING_LATENCY: Seconds = 0.020

_RATES = (1, 10, 50, 200)  # Mbit/s
_LATENCIES = (1, 20, 75, 150)  # ms, one way


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Pairs of hosts that are measured at once."""

    part: str
    cluster: Cluster
    pairs: tuple[Pair, ...]
    window: MeasureWindow | None = None  # None: as the links need it


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    experiments: tuple[Experiment, ...]
    rings: tuple[Experiment, ...]  # each asks more of the switch than the one before
    unlimited: Experiment
    num_rounds: int  # of each experiment, that count
    tries: int
    patience: Seconds  # after which nothing is repeated


def single_pairs(*cells: tuple[float, float]) -> Experiment:
    """For each (Mbit/s, ms one way) two hosts: they are a region, and it is the link inside it."""
    regions = tuple(f"{mbps:g} Mbit/s, {latency:g} ms" for mbps, latency in cells)
    return Experiment(
        part="grid",
        cluster=Cluster(
            name="single pairs",
            devices=tuple(
                Device(name=f"{region}: {end}", region=region) for region in regions for end in "ab"
            ),
            regions=regions,
            latency=tuple((latency * 1e-3,) * len(cells) for _, latency in cells),
            bandwidth=tuple((mbps * MEGABIT,) * len(cells) for mbps, _ in cells),
        ),
        pairs=tuple((f"{region}: a", f"{region}: b") for region in regions),
    )


def ring(num_hosts: int, mbps: float, window: MeasureWindow) -> Experiment:
    """Every host sends to the next, all at once."""
    hosts = [f"host {number}" for number in range(num_hosts)]
    return Experiment(
        part=f"ring{num_hosts}",
        cluster=_alike(hosts, RING_LATENCY, mbps * MEGABIT),
        pairs=tuple(zip(hosts, hosts[1:] + hosts[:1], strict=True)),
        window=window,
    )


def unlimited(num_pairs: int, window: MeasureWindow) -> Experiment:
    """Pairs at no distance, whose links carry whatever the switch does."""
    hosts = [f"host {number}" for number in range(2 * num_pairs)]
    return Experiment(
        part="limit",
        cluster=_alike(hosts, 0.0, UNLIMITED),
        pairs=tuple(zip(hosts[::2], hosts[1::2], strict=True)),
        window=window,
    )


def _alike(hosts: list[str], latency: Seconds, bandwidth: BytesPerSecond) -> Cluster:
    return Cluster(
        name=f"{len(hosts)} hosts",
        devices=tuple(Device(name=host, region="all") for host in hosts),
        regions=("all",),
        latency=((latency,),),
        bandwidth=((bandwidth,),),
    )


FULL = Plan(
    experiments=(
        # What is measured at once is far below the switch's limit: 44, 200, 400, 400, 320 Mbit/s.
        single_pairs(*((mbps, latency) for mbps in _RATES[:2] for latency in _LATENCIES)),
        single_pairs(*((_RATES[2], latency) for latency in _LATENCIES)),
        single_pairs(*((_RATES[3], latency) for latency in _LATENCIES[:2])),
        single_pairs(*((_RATES[3], latency) for latency in _LATENCIES[2:])),
        ring(16, 20, MeasureWindow(1.0, 4.0)),
    ),
    rings=tuple(ring(16, mbps, MeasureWindow(1.0, 2.0)) for mbps in (20, 50, 100, 200, 400)),
    unlimited=unlimited(4, MeasureWindow(1.0, 2.0)),
    num_rounds=3,
    tries=6,
    patience=240.0,
)
QUICK = Plan(
    experiments=(single_pairs((10, 1), (50, 20)), ring(16, 20, MeasureWindow(0.5, 0.5))),
    rings=(ring(16, 20, MeasureWindow(1.0, 0.5)),),
    unlimited=unlimited(2, MeasureWindow(0.3, 0.5)),
    num_rounds=1,
    tries=2,
    patience=6.0,
)

"""DT-FM's cost of a layout: gradients within each stage, activations between stages.

A layout has one row of devices per stage and one column per pipeline. Devices of a row average
their gradients, all rows at once, so the slowest device of all decides. Neighbours in a column
exchange activations and their gradients, one hop after another, and the slowest column of a hop
decides. In eq. 1 only the rows are given: `plan/dtfm/path.py` finds the best columns and
order of rows. `layout_cost` prices a layout with given columns and order.

Source: Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments",
arXiv:2206.01288, equations 1 to 4. Departures: none in the equations. The factor 2 is inside of a
hop, as printed; the published code has it outside, which is the same. `PUBLISHED` reproduces the
published planner: it counts activations in GiB but bandwidth in 1e9 bit/s, has 2024 for 2048
tokens, and takes 61.035 sequences per pipeline whatever the batch. Latency in ms and bandwidth in
Gbit/s, as it stores them, are read into seconds and bytes per second with nothing lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyrhythm.describe.cluster import Cluster
from polyrhythm.errors import DescriptionError, PlanError
from polyrhythm.types import Seconds

Matrix = NDArray[np.float64]
Groups = Sequence[Sequence[int]]  # of devices: one per stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes sent in one step."""

    gradient_bytes: float  # c_DP: the gradients of one stage
    activation_bytes: float  # c_PP: the activations of one pipeline's share of the batch

    def __post_init__(self) -> None:
        if not (self.gradient_bytes >= 0 and self.activation_bytes >= 0):
            raise DescriptionError(
                f"{self.gradient_bytes:g} bytes of gradients, {self.activation_bytes:g} of "
                "activations",
                expected="0 or more of each",
                fix="give the bytes of one stage's gradients and of one boundary's activations",
            )


PUBLISHED = Traffic(
    gradient_bytes=1.3e9 * 4 * 3 / 24,  # fp32, 3 of 24 layers
    # GiB taken for GB, see above
    activation_bytes=2024 * 2048 * 2 * (1e6 / 2048 / 8) / 2**30 * 1e9,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairTimes:
    """Seconds that each pair of devices needs, symmetric, 0 for a device and itself."""

    sync: Matrix  # as members of one stage: the summand of eq. 2
    hop: Matrix  # as neighbours in a pipeline: the term of eq. 3
    num_stages: int  # D_PP

    @property
    def num_devices(self) -> int:
        return len(self.sync)

    @property
    def num_pipelines(self) -> int:
        """D_DP: how many devices share a stage."""
        return self.num_devices // self.num_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCost:
    layout: tuple[tuple[int, ...], ...]  # layout[stage][pipeline] is a device
    sync: Seconds  # DATAP-COST
    hops: tuple[Seconds, ...]  # between neighbouring stages; their sum is PIPELINEP-COST

    @property
    def total(self) -> Seconds:
        return self.sync + sum(self.hops)


def device_links(cluster: Cluster) -> tuple[Matrix, Matrix]:
    """Latency (s) and bandwidth (bytes/s) from device to device, in the cluster's order."""
    return by_device(cluster, cluster.latency), by_device(cluster, cluster.bandwidth)


def by_device(cluster: Cluster, matrix: Sequence[Sequence[float]]) -> Matrix:
    """A matrix over devices, in the cluster's order, from one over regions."""
    regions = {region: index for index, region in enumerate(cluster.regions)}
    of_device = np.array([regions[device.region] for device in cluster.devices])
    table: Matrix = np.array(matrix)[np.ix_(of_device, of_device)]
    return table


def pair_times(
    latency: Matrix, bandwidth: Matrix, traffic: Traffic, *, num_stages: int
) -> PairTimes:
    """Return both weights of all pairs; a link is the mean of its two directions, as in section 2.

    Raises PlanError if the number of stages does not divide the number of devices,
    DescriptionError for an invalid link.
    """
    num_devices = len(latency)
    if num_stages < 1 or num_devices % num_stages or not num_devices:
        raise PlanError(
            f"{num_stages} stages for {num_devices} devices",
            expected="a number of stages that divides the number of devices",
            fix=f"use one of {_divisors(num_devices)} stages, or other devices",
        )
    apart = ~np.eye(num_devices, dtype=bool)
    latency, bandwidth = (latency + latency.T) / 2, (bandwidth + bandwidth.T) / 2
    _check_links(latency, bandwidth, apart)
    # A device sends nothing to itself, and its own link may be given as 0.
    seconds_per_byte = np.divide(1.0, bandwidth, out=np.zeros_like(bandwidth), where=apart)
    latency = np.where(apart, latency, 0.0)
    share = traffic.gradient_bytes / (num_devices // num_stages)
    return PairTimes(
        sync=2 * (latency + share * seconds_per_byte),
        hop=2 * (latency + traffic.activation_bytes * seconds_per_byte),
        num_stages=num_stages,
    )


def group_sync(group: Sequence[int], times: PairTimes) -> Seconds:
    """Eq. 2: every device exchanges a share with every other one; the slowest decides."""
    return float(times.sync[np.ix_(group, group)].sum(axis=1).max())


def layout_cost(layout: Groups, times: PairTimes) -> LayoutCost:
    """Return the cost of these columns in this order. Raises PlanError unless all devices occur."""
    sizes = [len(row) for row in layout]
    devices = sorted(device for row in layout for device in row)
    if sizes != [times.num_pipelines] * times.num_stages or devices != [*range(times.num_devices)]:
        raise PlanError(
            f"a layout with stages of {sizes} for {times.num_devices} devices",
            expected=f"{times.num_stages} stages of {times.num_pipelines}, every device once",
            fix="assign every device to one stage and one pipeline",
        )
    rows = np.array(layout)
    return LayoutCost(
        layout=tuple(tuple(map(int, row)) for row in rows),
        sync=max(group_sync(row, times) for row in rows),
        hops=tuple(map(float, times.hop[rows[:-1], rows[1:]].max(axis=1))),
    )


def _check_links(latency: Matrix, bandwidth: Matrix, apart: NDArray[np.bool_]) -> None:
    good = (latency >= 0) & (bandwidth > 0) & np.isfinite(latency)  # a NaN is not good either
    if bad := np.argwhere(apart & ~good).tolist():
        i, j = bad[0]
        raise DescriptionError(
            f"link of devices {i} and {j}: latency {latency[i, j]:g} s, "
            f"bandwidth {bandwidth[i, j]:g} bytes/s",
            expected="a latency of 0 or more, and a bandwidth above 0",
            fix="measure it, or leave out a device that others cannot reach",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)

"""DT-FM's cost: the printed equations, the published planner's figures, and refused input."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan.cases import BEST, published
from polyrhythm.cost.dtfm import (
    PUBLISHED,
    PairTimes,
    Traffic,
    device_links,
    layout_cost,
    pair_times,
)
from polyrhythm.describe.cluster import Cluster
from polyrhythm.errors import DescriptionError, PlanError
from polyrhythm.plan.dtfm.matching import bottleneck
from polyrhythm.plan.dtfm.path import layout_of_groups
from tests.pure.dtfm_cases import slow_cost, small_times


@given(small_times(), st.randoms(use_true_random=False))
def test_the_cost_is_that_of_the_equations(times: PairTimes, rng: random.Random) -> None:
    devices = list(range(times.num_devices))
    rng.shuffle(devices)
    size = times.num_pipelines
    groups = [tuple(devices[i : i + size]) for i in range(0, len(devices), size)]
    found = layout_of_groups(np.array(groups), times)
    assert found.total == pytest.approx(slow_cost(times)(groups))
    assert sorted(map(sorted, found.layout)) == sorted(map(sorted, groups))
    assert layout_cost(found.layout, times) == found


def test_the_constants_are_those_of_the_published_planner() -> None:
    assert pytest.approx(0.65e9) == PUBLISHED.gradient_bytes
    assert pytest.approx(0.47124922275543213e9) == PUBLISHED.activation_bytes


def in_regions(rows: list[list[int]], name: str) -> np.ndarray:
    """Return a layout of a cluster's devices from the regions of each stage."""
    cluster = Cluster.load(name)
    left = {
        region: [i for i, device in enumerate(cluster.devices) if device.region == region]
        for region in cluster.regions
    }
    return np.array([[left[cluster.regions[region]].pop() for region in row] for row in rows])


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("case1_datacenter_ondemand", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("case3_multi_datacenter", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("case4_regional", [0, 0, 1, 1, 2, 2, 3, 3]),
        ("case5_worldwide", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_known_layouts_cost_as_in_the_published_planner(name: str, stage: list[int]) -> None:
    found = layout_of_groups(in_regions([stage] * 8, name), published(name))
    assert found.total == pytest.approx(BEST[name], abs=5e-5)


def test_the_spot_cluster_needs_half_its_stages_for_single_devices() -> None:
    name = "case2_datacenter_spot"
    nodes, singles = [[0, 1, 2, 3, 4, 5, 6, 7]] * 4, [[8] * 8] * 4
    found = layout_of_groups(in_regions(nodes + singles, name), published(name))
    assert found.total == pytest.approx(BEST[name], abs=5e-5)


def test_a_link_is_the_mean_of_its_directions() -> None:
    latency, bandwidth = np.array([[0, 1.0], [3, 0]]), np.array([[0, 10.0], [30, 0]])
    traffic = Traffic(gradient_bytes=40, activation_bytes=100)
    times = pair_times(latency, bandwidth, traffic, num_stages=1)
    assert times.sync[0, 1] == times.sync[1, 0] == 2 * (2 + 40 / 2 / 20)
    assert times.hop[0, 1] == 2 * (2 + 100 / 20)
    assert times.hop[0, 0] == 0


def test_devices_have_the_links_of_their_regions() -> None:
    latency, bandwidth = device_links(Cluster.load("case5_worldwide"))
    assert latency[0, 8] == pytest.approx(0.067)  # Oregon, Virginia
    assert bandwidth[0, 8] == pytest.approx(0.79e9 / 8)
    assert bandwidth[0, 1] == pytest.approx(2e9 / 8)


def test_returned_matching_has_the_reported_cost() -> None:
    """The published code returned the solution after the last feasible one: 70.22 for 63.62."""
    times = published("case5_worldwide", shuffle=0, noise=0)
    weights = times.hop[:8, 8:16]
    hop, pairing = bottleneck(weights)
    assert weights[range(8), pairing].max() == hop
    assert sorted(pairing) == list(range(8))


@pytest.mark.parametrize("num_stages", [0, 3, 128])
def test_stages_must_share_the_devices_evenly(num_stages: int) -> None:
    with pytest.raises(PlanError, match="1, 2, 4, 8"):
        published("case5_worldwide", num_stages=num_stages)


@pytest.mark.parametrize(
    ("latency", "bandwidth"), [(-1.0, 1.0), (np.nan, 1.0), (0.0, 0.0), (0.0, np.nan)]
)
def test_impossible_links_are_refused(latency: float, bandwidth: float) -> None:
    ones = np.ones((4, 4))
    with pytest.raises(DescriptionError, match="devices 0 and 1"):
        pair_times(ones * latency, ones * bandwidth, PUBLISHED, num_stages=2)


@pytest.mark.parametrize(
    "layout", [[[0, 1], [2, 2]], [[0, 1, 2, 3]], [[0, 1], [2, 4]], [[0, 1, 2], [3]]]
)
def test_a_layout_has_every_device_once(layout: list[list[int]]) -> None:
    times = pair_times(np.ones((4, 4)), np.ones((4, 4)), PUBLISHED, num_stages=2)
    with pytest.raises(PlanError, match="every device once"):
        layout_cost(layout, times)


def test_traffic_is_not_negative() -> None:
    with pytest.raises(DescriptionError, match="0 or more"):
        Traffic(gradient_bytes=-1, activation_bytes=0)

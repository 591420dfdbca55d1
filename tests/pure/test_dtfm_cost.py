"""DT-FM's cost: the printed equations, the published planner's figures, and refused input."""

import random
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan.cases import BEST, published
from polyrhythm.cost.dtfm import (
    PUBLISHED,
    PairTimes,
    Traffic,
    best_layout,
    best_matching,
    best_order,
    device_links,
    layout_cost,
    pair_times,
)
from polyrhythm.describe.cluster import Cluster
from polyrhythm.errors import DescriptionError, PlanError
from tests.pure.dtfm_cases import slow_cost, small_times


@given(small_times(), st.randoms(use_true_random=False))
def test_the_cost_is_that_of_the_equations(times: PairTimes, rng: random.Random) -> None:
    devices = list(range(times.num_devices))
    rng.shuffle(devices)
    size = times.num_pipelines
    groups = [tuple(devices[i : i + size]) for i in range(0, len(devices), size)]
    found = best_layout(groups, times)
    assert found.total == pytest.approx(slow_cost(times)(groups))
    assert sorted(map(sorted, found.layout)) == sorted(map(sorted, groups))
    assert layout_cost(found.layout, times) == found


@given(st.integers(3, 5), st.integers(0, 2**32 - 1))
def test_the_matching_is_the_best_of_all(size: int, number: int) -> None:
    hop = np.random.default_rng(number).integers(1, 6, (2 * size, 2 * size)).astype(float)
    times = PairTimes(sync=hop, hop=hop, num_stages=2)
    left, right = range(size), range(size, 2 * size)
    found, pairing = best_matching(left, right, times)
    assert found == min(hop[left, other].max() for other in permutations(right))
    assert found == hop[left, list(pairing)].max()
    assert sorted(pairing) == list(right)


def test_the_constants_are_those_of_the_published_planner() -> None:
    assert pytest.approx(0.65e9) == PUBLISHED.gradient_bytes
    assert pytest.approx(0.47124922275543213e9) == PUBLISHED.activation_bytes


def in_regions(rows: list[list[int]], name: str) -> list[list[int]]:
    """Return a layout of a cluster's devices from the regions of each stage."""
    cluster = Cluster.load(name)
    left = {
        region: [i for i, device in enumerate(cluster.devices) if device.region == region]
        for region in cluster.regions
    }
    return [[left[cluster.regions[region]].pop() for region in row] for row in rows]


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
    found = best_layout(in_regions([stage] * 8, name), published(name))
    assert found.total == pytest.approx(BEST[name], abs=5e-5)


def test_the_spot_cluster_needs_half_its_stages_for_single_devices() -> None:
    name = "case2_datacenter_spot"
    nodes, singles = [[0, 1, 2, 3, 4, 5, 6, 7]] * 4, [[8] * 8] * 4
    found = best_layout(in_regions(nodes + singles, name), published(name))
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
    left, right = list(range(8)), list(range(8, 16))
    hop, pairing = best_matching(left, right, times)
    assert times.hop[left, list(pairing)].max() == hop
    assert sorted(pairing) == right


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


def test_an_exact_order_of_too_many_stages_is_refused() -> None:
    with pytest.raises(PlanError, match="at most 16"):
        best_order(np.ones((17, 17)))


def test_traffic_is_not_negative() -> None:
    with pytest.raises(DescriptionError, match="0 or more"):
        Traffic(gradient_bytes=-1, activation_bytes=0)

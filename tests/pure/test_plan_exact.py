"""Device classes and the exact search over types of stage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan.cases import BEST, published
from polyrhythm.cost.dtfm import PairTimes, group_sync
from polyrhythm.plan.dtfm.exact import (
    device_classes,
    num_stage_types,
    search_exactly,
    stage_types,
    type_sync,
)
from tests.pure.dtfm_cases import brute_force, small_times


@pytest.mark.parametrize(
    ("name", "num_classes"),
    [
        ("case1_datacenter_ondemand", 8),
        ("case2_datacenter_spot", 9),
        ("case3_multi_datacenter", 2),
        ("case4_regional", 4),
        ("case5_worldwide", 8),
    ],
)
def test_regions_are_classes(name: str, num_classes: int) -> None:
    assert len(device_classes(published(name, shuffle=1)).members) == num_classes


def test_unequal_links_make_each_device_its_own_class() -> None:
    assert len(device_classes(published("case4_regional", noise=0)).members) == 64


@given(small_times())
def test_devices_of_a_class_are_interchangeable(times: PairTimes) -> None:
    for members in device_classes(times).members:
        order = np.arange(times.num_devices)
        order[list(members)] = np.roll(members, 1)
        for weights in (times.sync, times.hop):
            assert np.array_equal(weights, weights[np.ix_(order, order)])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 6))
def test_stage_types_are_counted_without_enumerating_them(counts: list[int], size: int) -> None:
    types = stage_types(np.array(counts), size)
    assert num_stage_types(np.array(counts), size) == len(types)
    assert len({tuple(row) for row in types.tolist()}) == len(types)
    assert all(sum(row) == size for row in types.tolist())
    assert (types <= counts).all()


def test_a_type_costs_what_its_stages_cost() -> None:
    times = published("case4_regional")
    classes = device_classes(times)
    types = stage_types(classes.counts, 8)
    for counts, sync in list(zip(types, type_sync(types, classes), strict=True))[::20]:
        group = [d for members, n in zip(classes.members, counts, strict=True) for d in members[:n]]
        assert sync == pytest.approx(group_sync(group, times))


@given(small_times(max_devices=6))
def test_the_exact_search_finds_the_best_layout(times: PairTimes) -> None:
    found = search_exactly(times)
    assert found.complete
    assert found.better is not None
    best = brute_force(times)
    assert found.better.total == pytest.approx(best)
    nothing = search_exactly(times, below=best)
    assert nothing.complete
    assert nothing.better is None


def test_the_published_regions_are_solved_exactly() -> None:
    for name in ("case3_multi_datacenter", "case4_regional"):
        found = search_exactly(published(name, shuffle=0), below=BEST[name] + 1)
        assert found.complete
        assert found.better is not None
        assert found.better.total == pytest.approx(BEST[name], abs=5e-5)


def test_truncated_search_is_marked_incomplete() -> None:
    assert not search_exactly(published("case4_regional"), max_nodes=1000).complete
    assert not search_exactly(published("case5_worldwide")).complete  # too many types

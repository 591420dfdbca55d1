"""Clusters: both file forms give equal clusters, and invalid ones are refused."""

import json
import math
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.describe.cluster import Cluster, Device, Link
from polyrhythm.errors import DescriptionError

PAIR = Cluster(
    name="pair",
    devices=(
        Device(name="a/0", region="a"),
        Device(name="a/1", region="a"),
        Device(name="b", region="b"),
    ),
    regions=("a", "b"),
    latency=((0.001, 0.01), (0.02, 0.0)),
    bandwidth=((1e9, 1e6), (2e6, 0.0)),
)


def load(file: dict[str, Any]) -> Cluster:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.json"
        path.write_text(json.dumps(file))
        return Cluster.load(path)


def refusal(file: dict[str, Any]) -> str:
    with pytest.raises(DescriptionError) as caught:
        load(file)
    place, _, wrong = caught.value.wrong.partition("cluster.json: ")
    assert place
    return wrong


def link(source: str, target: str, **more: Any) -> dict[str, Any]:
    return {"from": source, "to": target, "latency": "1ms", "bandwidth": "1Gbit/s", **more}


@st.composite
def matrix_files(draw) -> dict[str, Any]:
    """Draw a cluster in matrix form, with zeros inside regions of one device."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    regions = [f"region {i}" for i in range(len(counts))]

    def matrix(number) -> list[list[float]]:
        return [
            [0 if i == j and counts[i] == 1 else draw(number) for j in range(len(counts))]
            for i in range(len(counts))
        ]

    return {
        "name": "random",
        "devices": [
            {"region": region, "count": count, "memory_gib": draw(st.integers(1, 80))}
            for region, count in zip(regions, counts, strict=True)
        ],
        "regions": regions,
        "latency_ms": matrix(st.floats(0, 300)),
        "bandwidth_gbps": matrix(st.floats(0.001, 100)),
    }


def as_links(file: dict[str, Any], draw) -> dict[str, Any]:
    """Return the same cluster as [[links]] in any order; equal directions may share an entry."""
    latency, bandwidth = file["latency_ms"], file["bandwidth_gbps"]
    links = []
    for i, source in enumerate(file["regions"]):
        for j, target in enumerate(file["regions"]):
            alike = (latency[i][j], bandwidth[i][j]) == (latency[j][i], bandwidth[j][i])
            if (i == j and bandwidth[i][i] == 0) or (alike and i > j):
                continue
            alone = file["devices"][i]["count"] == 1
            links.append(
                {
                    "from": f"{source}/0" if alone and draw(st.booleans()) else source,
                    "to": target,
                    "latency_ms": latency[i][j],
                    "bandwidth_gbps": bandwidth[i][j],
                    "one_way": not alike,
                }
            )
    kept = {key: file[key] for key in ("name", "devices", "regions")}
    return {**kept, "links": draw(st.permutations(links))}


@settings(deadline=None)  # a file per example: slow on a busy machine
@given(matrix_files(), st.booleans(), st.data())
def test_matrices_and_links_give_equal_clusters(file, symmetric, data):
    if symmetric:
        for key in ("latency_ms", "bandwidth_gbps"):
            rows = file[key]
            file[key] = [
                [rows[min(i, j)][max(i, j)] for j in range(len(rows))] for i in range(len(rows))
            ]
    cluster = load(file)
    assert load(as_links(file, data.draw)) == cluster


@settings(deadline=None)  # a file per example: slow on a busy machine
@given(matrix_files())
def test_link_is_directed_from_row_to_column(file):
    cluster = load(file)
    for a in cluster.devices:
        for b in cluster.devices:
            if a != b:
                i, j = cluster.regions.index(a.region), cluster.regions.index(b.region)
                found = cluster.link(a.name, b.name)
                assert found.latency == pytest.approx(file["latency_ms"][i][j] / 1e3)
                assert found.bandwidth == pytest.approx(file["bandwidth_gbps"][i][j] * 125e6)


def test_counted_devices_are_numbered_consecutively_in_their_region():
    file = {
        "name": "mixed",
        "devices": [
            {"region": "a", "count": 2, "memory": "24GiB"},
            {"name": "odd", "region": "a"},
            {"region": "b"},
            {"region": "a", "speed": 0.5, "price_per_hour": 1.2},
        ],
        "links": [link("a", "b"), link("a", "a")],
    }
    devices = load(file).devices
    assert [device.name for device in devices] == ["a/0", "a/1", "odd", "b/0", "a/2"]
    assert Counter(device.region for device in devices) == {"a": 4, "b": 1}
    assert devices[0].memory == 24 * 2**30
    assert (devices[4].memory, devices[4].speed, devices[4].price_per_hour) == (None, 0.5, 1.2)


def test_device_without_region_is_its_own_region():
    file = {"name": "n", "devices": [{"name": "x"}, {"name": "y"}], "links": [link("y", "x")]}
    assert load(file).regions == ("x", "y")
    matrices = {"latency_ms": [[0, 1], [1, 0]], "bandwidth_gbps": [[0, 1], [1, 0]]}
    assert load({"name": "n", "devices": file["devices"], **matrices}) == load(file)


def test_one_device_needs_no_links():
    assert load({"name": "n", "devices": [{"name": "x"}]}).bandwidth == ((0.0,),)


TWO = {"name": "two", "devices": [{"region": "a", "count": 2}, {"name": "b"}]}
LATENCY = {"latency_ms": [[1, 1], [1, 1]]}
BANDWIDTH = {"bandwidth_gbps": [[1, 1], [1, 1]]}
ALL_LINKS = [link("a", "a"), link("a", "b")]


@pytest.mark.parametrize(
    ("file", "wrong"),
    [
        ({**TWO, **LATENCY, **BANDWIDTH, "links": ALL_LINKS}, "matrices and [[links]] in one file"),
        ({**TWO, **LATENCY}, "only one of two matrices"),
        (
            {**TWO, "links": ALL_LINKS, "latency_spread": [[0, 0], [0, 0]]},
            "a spread without the matrix that it is the spread of",
        ),
        (
            {**TWO, **LATENCY, **BANDWIDTH, "bandwidth_spread": [[0.1], [0.1, 0]]},
            "bandwidth_spread has 2 rows, row 0 has 1 columns",
        ),
        (
            {**TWO, **LATENCY, **BANDWIDTH, "latency_spread": [[0.1, -0.5], [0.1, 0]]},
            "latency_spread is -0.5",
        ),
        (TWO, "no link from 'a' to 'a' (inside the region)"),
        ({**TWO, "links": [link("a", "a")]}, "no link from 'a' to 'b'"),
        (
            {**TWO, "links": [link("a", "a"), link("a", "b", one_way=True)]},
            "no link from 'b' to 'a'",
        ),
        (
            {**TWO, "links": [*ALL_LINKS, link("b", "a", one_way=True)]},
            "links[2]: 'b' to 'a' is in links[1] already",
        ),
        (
            {**TWO, "links": [*ALL_LINKS, link("a", "bb")]},
            "links[2].to: unknown region or device 'bb'",
        ),
        (
            {**TWO, "links": [link("a/1", "b")]},
            "links[0].from: device 'a/1' shares the region 'a' with others",
        ),
        ({**TWO, "links": [link("a", "b", bandwidth="0GB/s")]}, "links[0]: bandwidth is 0kbit/s"),
        ({**TWO, "links": [link("a", "b", latency="-1ms")]}, "links[0]: latency is -1ms"),
        ({**TWO, "devices": []}, "cluster 'two' has no devices"),
        ({**TWO, "devices": [{"speed": 1}]}, "devices[0]: a device without a name"),
        ({**TWO, "devices": [{"region": "a", "count": 0}]}, "devices[0]: count is 0"),
        (
            {**TWO, "devices": [{"name": "a", "count": 2}]},
            "devices[0]: count is 2 for the name 'a'",
        ),
        ({**TWO, "devices": [{"name": "a", "speed": 0}]}, "devices[0]: speed of a is 0"),
        (
            {**TWO, "regions": ["a", "c"], **LATENCY, **BANDWIDTH},
            "device 'b': unknown region 'b'",
        ),
    ],
)
def test_invalid_cluster_file_is_refused(file, wrong):
    assert refusal(file) == wrong


@pytest.mark.parametrize(
    ("change", "wrong", "expected"),
    [
        ({"latency": ((0.0, 0.0),)}, "latency has 1 rows", "2 x 2"),
        ({"latency": ((0.0, 0.0), (0.0,))}, "latency has 2 rows, row 1 has 1 columns", "2 x 2"),
        ({"bandwidth": ((1.0,),) * 3}, "bandwidth has 3 rows, row 0 has 1 columns", "2 x 2"),
        (
            {"bandwidth": ((1e9, 0.0), (1e6, 1e9))},
            "link from 'a' to 'b': bandwidth is 0kbit/s",
            "more than 0",
        ),
        (
            {"bandwidth": ((0.0, 1e6), (1e6, 1e9))},
            "link from 'a' to 'a': bandwidth is 0kbit/s",
            "more than 0",
        ),
        (
            {"bandwidth": ((1e9, 1e6), (-125.0, 1e9))},
            "link from 'b' to 'a': bandwidth is -1kbit/s",
            "more than 0",
        ),
        (
            {"bandwidth": ((1e9, 1e6), (1e6, -125.0))},
            "link from 'b' to 'b': bandwidth is -1kbit/s",
            "0 or more",
        ),
        (
            {"latency": ((0.0, 0.0), (-0.005, 0.0))},
            "link from 'b' to 'a': latency is -5ms",
            "0 or more",
        ),
        (
            {"latency": ((0.0, math.nan), (0.0, 0.0))},
            "link from 'a' to 'b': latency is nan",
            "finite",
        ),
        (
            {"bandwidth": ((1e9, math.inf), (1e6, 1e9))},
            "link from 'a' to 'b': bandwidth is inf",
            "finite",
        ),
        ({"regions": ("a", "a")}, "2 regions are named 'a'", "one region per name"),
        ({"regions": ("a", "c")}, "device 'b': unknown region 'b'", "one of a, c"),
        ({"devices": ()}, "cluster 'pair' has no devices", "at least one"),
        ({"devices": PAIR.devices * 2}, "2 devices are named 'a/0'", "one device per name"),
        (
            {"devices": (Device(name="a", region="b"), Device(name="x", region="a"))},
            "device 'a' has the name of a region that it is not",
            "a name of its own",
        ),
    ],
)
def test_impossible_cluster_is_refused_where_it_is_built(change, wrong, expected):
    with pytest.raises(DescriptionError) as caught:
        replace(PAIR, **change)
    assert caught.value.wrong == wrong
    assert expected in caught.value.expected


@pytest.mark.parametrize(
    "change",
    [
        {"memory": 0},
        {"speed": 0.0},
        {"speed": -1.0},
        {"speed": math.nan},
        {"price_per_hour": -0.1},
        {"price_per_hour": math.inf},
    ],
)
def test_impossible_device_is_refused(change):
    with pytest.raises(DescriptionError, match=f"{next(iter(change))} of gpu0 is"):
        Device(name="gpu0", region="a", **change)


def test_link_between_devices_follows_its_direction():
    assert PAIR.link("a/0", "a/1") == Link(latency=0.001, bandwidth=1e9)
    assert PAIR.link("a/0", "b") == Link(latency=0.01, bandwidth=1e6)
    assert PAIR.link("b", "a/1") == Link(latency=0.02, bandwidth=2e6)


def test_link_of_an_unknown_device_or_to_itself_is_refused():
    with pytest.raises(DescriptionError, match="unknown device 'a/2'") as caught:
        PAIR.link("a/2", "b")
    assert caught.value.fix in ("did you mean 'a/0'?", "did you mean 'a/1'?")
    with pytest.raises(DescriptionError, match="link from 'b' to itself"):
        PAIR.link("b", "b")


def test_cluster_is_a_plain_value():
    assert hash(replace(PAIR)) == hash(PAIR)
    with pytest.raises(AttributeError):
        PAIR.name = "other"

"""Scaling keeps every ratio of times, and a smaller cluster has the larger one's proportions."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.describe.cluster import Cluster, Device, Link
from polyrhythm.describe.scale import fewer_devices, scaled_cluster, scaled_scenario
from polyrhythm.describe.scenario import Join, Kill, LinkChange, Pause, Scenario, Slow
from polyrhythm.describe.slowness import Slowness
from polyrhythm.describe.trace import Trace
from polyrhythm.errors import DescriptionError

WORLD = Cluster.load("case5_worldwide")
SPOT = Cluster.load("case2_datacenter_spot")  # 8 regions of 4, and one of 32
STORY = Scenario(
    name="story",
    seed=5,
    slow=(
        Slow(device="a", factor=2.0, start=3.0, until=90.0),
        Slow(device="*", probability=0.1, sleep_factor=3.0),
        Slow(device="b", trace="t", trace_worker=0, trace_duration=40.0),
    ),
    link=(
        LinkChange(at=5.0, source="a", target="b", latency=0.01, bandwidth=1e6, one_way=True),
        LinkChange(at=6.0, source="a", target="b", up=False),
    ),
    pause=(Pause(device="a", at=7.0, until=8.0),),
    kill=(Kill(device="b", at=9.0),),
    join=(Join(device="b", at=10.0),),
)

scales = st.floats(1e-4, 1e4)
exact_scales = st.sampled_from([2.0**i for i in range(-8, 9)])  # no rounding: exactly equal


@st.composite
def clusters(draw) -> Cluster:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    regions = tuple(f"region {i}" for i in range(len(sizes)))
    names = [region for region, size in zip(regions, sizes, strict=True) for _ in range(size)]
    shuffled = draw(st.permutations(names))

    def matrix(numbers) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(draw(numbers) for _ in regions) for _ in regions)

    return Cluster(
        name="random",
        devices=tuple(Device(name=f"d{i}", region=region) for i, region in enumerate(shuffled)),
        regions=regions,
        latency=matrix(st.integers(0, 1000).map(lambda ms: ms / 1e3)),
        bandwidth=matrix(st.floats(1e3, 1e10)),
        latency_spread=matrix(st.floats(0, 1)) if draw(st.booleans()) else (),
        nccl_bandwidth=matrix(st.floats(0, 1e12)) if draw(st.booleans()) else (),
    )


def message_time(link: Link, num_bytes: float) -> float:
    return link.latency + num_bytes / link.bandwidth


@given(clusters(), scales, scales, st.floats(0, 1e9))
def test_scaled_message_takes_time_scale_times_as_long(cluster, time_scale, byte_scale, num_bytes):
    scaled = scaled_cluster(cluster, time_scale=time_scale, byte_scale=byte_scale)
    for a, b in zip(cluster.devices, cluster.devices[1:], strict=False):
        before = message_time(cluster.link(a.name, b.name), num_bytes)
        after = message_time(scaled.link(a.name, b.name), num_bytes * byte_scale)
        assert after == pytest.approx(before * time_scale, rel=1e-9)


@given(clusters())
def test_scale_of_one_changes_nothing(cluster):
    assert scaled_cluster(cluster, time_scale=1, byte_scale=1) == cluster
    assert scaled_scenario(STORY, time_scale=1, byte_scale=1) == STORY


@given(clusters(), exact_scales, exact_scales, exact_scales, exact_scales)
def test_scalings_compose(cluster, time_1, time_2, byte_1, byte_2):
    twice = scaled_cluster(
        scaled_cluster(cluster, time_scale=time_1, byte_scale=byte_1),
        time_scale=time_2,
        byte_scale=byte_2,
    )
    at_once = {"time_scale": time_1 * time_2, "byte_scale": byte_1 * byte_2}
    assert twice == scaled_cluster(cluster, **at_once)
    story = scaled_scenario(STORY, time_scale=time_1, byte_scale=byte_1)
    story = scaled_scenario(story, time_scale=time_2, byte_scale=byte_2)
    assert story == scaled_scenario(STORY, **at_once)


def test_scaled_cluster_keeps_its_devices_with_their_memory():
    devices = (
        Device(name="a/0", region="a", memory=2**30, speed=0.5, price_per_hour=1.0),
        Device(name="b", region="b"),
    )
    pair = Cluster(
        name="pair",
        devices=devices,
        regions=("a", "b"),
        latency=((0.0, 0.1), (0.2, 0.0)),
        bandwidth=((0.0, 1e6), (2e6, 0.0)),  # one device each: nothing inside, and nothing scaled
    )
    assert scaled_cluster(pair, time_scale=0.5, byte_scale=0.125) == replace(
        pair, latency=((0.0, 0.05), (0.1, 0.0)), bandwidth=((0.0, 0.25e6), (0.5e6, 0.0))
    )


def test_scaled_scenario_scales_only_times_and_links():
    assert scaled_scenario(STORY, time_scale=0.5, byte_scale=0.125) == Scenario(
        name="story",
        seed=5,
        slow=(
            Slow(device="a", factor=2.0, start=1.5, until=45.0),
            Slow(device="*", probability=0.1, sleep_factor=3.0),
            Slow(device="b", trace="t", trace_worker=0, trace_duration=20.0),
        ),
        link=(
            LinkChange(
                at=2.5, source="a", target="b", latency=0.005, bandwidth=0.25e6, one_way=True
            ),
            LinkChange(at=3.0, source="a", target="b", up=False),
        ),
        pause=(Pause(device="a", at=3.5, until=4.0),),
        kill=(Kill(device="b", at=4.5),),
        join=(Join(device="b", at=5.0),),
    )


seconds = st.integers(0, 39_000).map(lambda ms: ms / 1e3)


@given(exact_scales, st.lists(st.tuples(seconds, seconds), max_size=20))
def test_delays_of_a_scaled_scenario_are_scaled_delays(time_scale, actions):
    traces = {"t": Trace(name="t", workers=(((0.2, 1.0), (0.5, 0.5), (0.4, 0.9)),))}
    scaled = scaled_scenario(STORY, time_scale=time_scale, byte_scale=1)
    for device in "ab":
        real = Slowness.of(STORY, device, traces=traces)
        rehearsed = Slowness.of(scaled, device, traces=traces)
        for now, work in actions:
            expected = time_scale * real.delay(now, work, 3 * work)
            times = (now * time_scale, work * time_scale, 3 * work * time_scale)
            assert rehearsed.delay(*times) == expected


def test_trace_without_duration_cannot_be_scaled():
    story = Scenario(name="s", slow=(Slow(device="a", trace="sdpipe_16gpu"),))
    assert scaled_scenario(story, time_scale=1, byte_scale=0.1) == story
    with pytest.raises(DescriptionError, match=r"slow\[0\]: the trace 'sdpipe_16gpu' has no"):
        scaled_scenario(story, time_scale=0.1, byte_scale=1)


@pytest.mark.parametrize("scale", [0, -1, math.inf, math.nan])
@pytest.mark.parametrize("which", ["time_scale", "byte_scale"])
def test_impossible_scale_is_refused(which, scale):
    both = {"time_scale": 1.0, "byte_scale": 1.0, which: scale}
    with pytest.raises(DescriptionError, match=f"{which} is"):
        scaled_cluster(WORLD, **both)
    with pytest.raises(DescriptionError, match=f"{which} is"):
        scaled_scenario(STORY, **both)


def sizes(cluster: Cluster) -> dict[str, int]:
    return dict(Counter(device.region for device in cluster.devices))


@given(clusters(), st.data())
def test_fewer_devices_are_spread_like_all_of_them(cluster, data):
    num_devices = data.draw(st.integers(1, len(cluster.devices)))
    fewer = fewer_devices(cluster, num_devices)
    before, after = sizes(cluster), sizes(fewer)
    assert sum(after.values()) == num_devices
    assert len(after) == min(num_devices, len(before))
    assert set(fewer.regions) == set(after)
    for a in after:
        assert after[a] <= before[a]
        for b in after:  # moving a device to another region would not improve the proportions
            assert after[a] == 1 or (after[a] - 0.5) / before[a] <= (after[b] + 0.5) / before[b]
    if num_devices < len(before):
        assert min(before[a] for a in after) >= max(before[b] for b in set(before) - set(after))


@given(clusters(), st.data())
def test_fewer_devices_are_the_first_of_each_region_and_keep_their_links(cluster, data):
    fewer = fewer_devices(cluster, data.draw(st.integers(1, len(cluster.devices))))
    assert list(fewer.devices) == [d for d in cluster.devices if d in fewer.devices]
    assert list(fewer.regions) == [r for r in cluster.regions if r in fewer.regions]
    for region, count in sizes(fewer).items():
        every = [device for device in cluster.devices if device.region == region]
        assert [d for d in fewer.devices if d.region == region] == every[:count]
    for a in fewer.devices:
        for b in fewer.devices:
            if a != b:
                assert fewer.link(a.name, b.name) == cluster.link(a.name, b.name)
    kept = [cluster.regions.index(region) for region in fewer.regions]
    for i, row in enumerate(fewer.latency_spread):
        assert row == tuple(cluster.latency_spread[kept[i]][j] for j in kept)
    assert bool(fewer.latency_spread) == bool(cluster.latency_spread)
    for i, row in enumerate(fewer.nccl_bandwidth):
        assert row == tuple(cluster.nccl_bandwidth[kept[i]][j] for j in kept)


@given(clusters())
def test_choosing_all_devices_gives_the_same_cluster(cluster):
    assert fewer_devices(cluster, len(cluster.devices)) == cluster


@pytest.mark.parametrize(("num_devices", "per_region"), [(8, 1), (16, 2), (24, 3)])
def test_worldwide_network_keeps_as_many_devices_in_each_region(num_devices, per_region):
    assert set(sizes(fewer_devices(WORLD, num_devices)).values()) == {per_region}


@pytest.mark.parametrize(("num_devices", "largest"), [(9, 1), (16, 8), (32, 16)])
def test_large_region_keeps_its_share(num_devices, largest):
    fewer = sizes(fewer_devices(SPOT, num_devices))
    assert len(fewer) == 9
    assert fewer["standalone"] == largest


def test_with_fewer_devices_than_regions_the_largest_then_the_first_stay():
    assert fewer_devices(WORLD, 2).regions == ("Oregon", "Virginia")
    assert fewer_devices(SPOT, 2).regions == ("spot_instance_0", "standalone")


def test_region_without_devices_is_dropped():
    lone = replace(
        WORLD, devices=tuple(device for device in WORLD.devices if device.region == "Tokyo")
    )
    fewer = fewer_devices(lone, 8)
    assert fewer.regions == ("Tokyo",)
    assert fewer.link("Tokyo/0", "Tokyo/1") == WORLD.link("Tokyo/0", "Tokyo/1")


@pytest.mark.parametrize("num_devices", [0, -1, 65])
def test_impossible_number_of_devices_is_refused(num_devices):
    with pytest.raises(DescriptionError, match=f"{num_devices} of the 64 devices"):
        fewer_devices(WORLD, num_devices)

"""Times of averaging gradients, compared with plain computations."""

from dataclasses import replace
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.cost.dtfm import Traffic, group_sync, pair_times
from polyrhythm.cost.sync import GROUP_SIZE, Links, ReplicaGroup, Sync, reduce_scatter_times
from polyrhythm.describe.cluster import Cluster, Device
from tests.pure.step_cases import even_links, links_of, random_links, seeds


def half(members: tuple[int, ...], size: float, links: Links, sync: Sync) -> float:
    return reduce_scatter_times([ReplicaGroup(members=members, size=size)], links, sync)[0]


def best_ring(num_members: int, share: float, links: Links) -> float:
    """Return the time of the best ring by trying every order."""
    return min(
        (num_members - 1) * max(links.transfer(a, b, share) for a, b in pairwise((0, *order, 0)))
        for order in permutations(range(1, num_members))
    )


@given(seeds, st.integers(2, 6), st.floats(0, 20))
def test_an_exchange_takes_its_slowest_pair_or_its_fullest_uplink(
    seed: int, num_members: int, size: float
) -> None:
    links = random_links(np.random.default_rng(seed), num_members)
    share = size / num_members
    everyone = range(num_members)
    slowest = max(
        links.latency[a, b] + links.latency[b, a] + share / links.bandwidth[a, b]
        for a, b in permutations(everyone, 2)
    )
    fullest = max(
        (num_members - 1) * share / max(links.bandwidth[a, b] for b in everyone if b != a)
        for a in everyone
    )
    expected = max(slowest, fullest)
    assert half(tuple(everyone), size, links, Sync.ALL_REDUCE) == pytest.approx(expected)


@pytest.mark.parametrize("slow", [(0, 1), (1, 0)])
def test_the_slower_direction_of_a_link_decides(slow: tuple[int, int]) -> None:
    links = even_links(3, bandwidth=10.0)
    links.latency[slow], links.bandwidth[slow] = 0.5, 0.1
    assert half((0, 1, 2), 6.0, links, Sync.ALL_REDUCE) == pytest.approx(0.5 + 2 / 0.1)


@given(st.integers(1, 12), st.floats(0, 1e9), st.floats(1, 1e9))
def test_exchange_over_equal_links_matches_the_closed_form(
    num_members: int, size: float, bandwidth: float
) -> None:
    links = even_links(num_members, bandwidth=bandwidth)
    found = half(tuple(range(num_members)), size, links, Sync.ALL_REDUCE)
    assert found == pytest.approx((num_members - 1) / num_members * size / bandwidth)


def test_traffic_of_several_stages_adds_up() -> None:
    links = even_links(4, latency=0.25, bandwidth=2.0)
    groups = [ReplicaGroup(members=(0, 1), size=8.0), ReplicaGroup(members=(1, 0), size=4.0)]
    apart = ReplicaGroup(members=(2, 3), size=8.0)
    found = reduce_scatter_times([*groups, apart], links, Sync.ALL_REDUCE)
    assert found == pytest.approx([0.5 + 6 / 2, 0.5 + 6 / 2, 0.5 + 4 / 2])


def test_a_device_with_other_peers_for_each_stage_sends_to_all_through_one_uplink() -> None:
    links = even_links(3, bandwidth=2.0)
    groups = [ReplicaGroup(members=(0, 1), size=8.0), ReplicaGroup(members=(0, 2), size=8.0)]
    assert reduce_scatter_times(groups, links, Sync.ALL_REDUCE) == pytest.approx([8 / 2, 8 / 2])


@given(seeds, st.integers(1, 6), st.floats(0, 20))
def test_sequential_sync_equals_dtfm_over_symmetric_links(
    seed: int, num_members: int, size: float
) -> None:
    links = random_links(np.random.default_rng(seed), num_members, symmetric=True)
    members = tuple(range(num_members))
    traffic = Traffic(gradient_bytes=size, activation_bytes=0)
    times = pair_times(links.latency, links.bandwidth, traffic, num_stages=1)
    found = half(members, size, links, Sync.SEQUENTIAL)
    assert 2 * found == pytest.approx(group_sync(members, times))


@given(seeds, st.integers(2, 6), st.floats(0, 20), st.booleans())
def test_a_ring_is_the_best_of_all_orders(
    seed: int, num_members: int, size: float, symmetric: bool
) -> None:
    links = random_links(np.random.default_rng(seed), num_members, symmetric=symmetric)
    found = half(tuple(range(num_members)), size, links, Sync.RING)
    assert found == pytest.approx(best_ring(num_members, size / num_members, links))


def test_large_ring_is_near_the_best() -> None:
    orders = np.array([(0, *order, 0) for order in permutations(range(1, 9))])
    shares = []
    for seed in range(12):
        links = random_links(np.random.default_rng(seed), 9)
        best = 8 * links.latency[orders[:, :-1], orders[:, 1:]].max(axis=1).min()
        shares.append(half(tuple(range(9)), 0.0, links, Sync.RING) / best)
    assert min(shares) > 1 - 1e-9
    assert np.mean(shares) < 1.15


@pytest.mark.parametrize("seed", range(5))
def test_hidden_fast_ring_is_nearly_found(seed: int) -> None:
    """24 members are too many for every order; the links of one ring take 1 s, others 1.1 to 3."""
    rng = np.random.default_rng(seed)
    hidden = rng.permutation(24)
    latency = rng.uniform(1.1, 3, (24, 24))
    latency[hidden, np.roll(hidden, -1)] = latency[np.roll(hidden, -1), hidden] = 1.0
    links = links_of(latency, np.ones((24, 24)))
    assert 23 <= half(tuple(range(24)), 0.0, links, Sync.RING) <= 23 * 1.3


@given(seeds, st.integers(2, 6), st.floats(0, 20))
def test_groups_lie_between_the_fastest_and_the_slowest(
    seed: int, num_members: int, size: float
) -> None:
    links = random_links(np.random.default_rng(seed), num_members)
    together = min(GROUP_SIZE, num_members)
    scatter_times = [
        half(members, size, links, Sync.ALL_REDUCE)
        for members in combinations(range(num_members), together)
    ]
    found = half(tuple(range(num_members)), size, links, Sync.GROUPS)
    assert min(scatter_times) * (1 - 1e-9) <= found <= max(scatter_times) * (1 + 1e-9)
    assert found == half(tuple(range(num_members)), size, links, Sync.GROUPS)


def test_groups_of_many_members_differ_between_draws() -> None:
    """One far member is in some draws and not in others."""
    links = even_links(8)
    links.latency[0, :] = links.latency[:, 0] = 100.0
    assert 1 < half(tuple(range(8)), 1.0, links, Sync.GROUPS) < 199


@given(seeds, st.integers(1, 6), st.sampled_from(Sync), st.floats(0, 20), st.floats(1, 3))
def test_more_bytes_and_slower_links_never_take_less(
    seed: int, num_members: int, sync: Sync, size: float, more: float
) -> None:
    rng = np.random.default_rng(seed)
    links = random_links(rng, num_members)
    members = tuple(range(num_members))
    before = half(members, size, links, sync) * (1 - 1e-9)
    assert half(members, size * more, links, sync) >= before
    a, b = rng.integers(num_members, size=2)
    links.latency[a, b] *= more
    links.bandwidth[a, b] /= more
    assert half(members, size, links, sync) >= before


@pytest.mark.parametrize("sync", Sync)
def test_coordinator_latency_is_that_of_the_farthest_member(sync: Sync) -> None:
    """One message each way, from devices 0 and 1 to 2; without replicas there is none."""
    links = even_links(3, latency=0.5)
    links.latency[1, 2] = 2.0
    groups = [ReplicaGroup(members=(0, 1), size=4.0), ReplicaGroup(members=(2,), size=4.0)]
    plain = reduce_scatter_times(groups, links, sync)
    asked = reduce_scatter_times(groups, links, sync, coordinator=2)
    words = 2.0 + 0.5 if sync in (Sync.ALL_REDUCE, Sync.GROUPS) else 0.0
    assert asked == pytest.approx([plain[0] + words, plain[1]])
    own = reduce_scatter_times(groups[:1], links, sync, coordinator=0)
    assert own == pytest.approx([plain[0] + (1.0 if words else 0.0)])


@pytest.mark.parametrize("sync", Sync)
def test_single_replica_needs_no_sync(sync: Sync) -> None:
    assert half((1,), 100.0, even_links(2, latency=1.0), sync) == 0


@pytest.mark.parametrize("sync", Sync)
def test_the_only_device_of_a_cluster_has_no_link(sync: Sync) -> None:
    """The entry of a single device may be 0."""
    links = links_of(np.zeros((1, 1)), np.zeros((1, 1)))
    assert half((0,), 100.0, links, sync) == 0


def test_device_links_are_those_of_their_regions() -> None:
    cluster = Cluster.load("case5_worldwide")
    links = Links.of(cluster)
    for a, b in [(0, 1), (0, 63), (63, 0), (20, 40)]:
        link = cluster.link(cluster.devices[a].name, cluster.devices[b].name)
        takes = link.latency + 1e6 / link.bandwidth
        assert links.transfer(a, b, 1e6) == pytest.approx(takes)


def test_a_ring_through_a_real_cluster_is_no_slower_than_one_in_the_order_of_its_regions() -> None:
    """Many links are equal, so that many rings are equally good."""
    links = Links.of(Cluster.load("case5_worldwide"))
    in_order = max(links.transfer(a, b, 1e6) for a, b in pairwise([*range(64), 0]))
    assert half(tuple(range(64)), 64e6, links, Sync.RING) <= 63 * in_order


def two_hosts(*, nccl: bool = True, hosts: bool = True) -> Cluster:
    """Two hosts of two GPUs, as probed: 1 s and 1 B/s over gloo, 0.1 s and 100 B/s over NCCL."""
    names = ("a/0", "a/1", "b/0", "b/1")

    def matrix(inside: float, outside: float) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(0.0 if a == b else inside if a[0] == b[0] else outside for b in names)
            for a in names
        )

    return Cluster(
        name="two hosts",
        devices=tuple(
            Device(name=name, region=name, host=name[0] if hosts else None) for name in names
        ),
        regions=names,
        latency=matrix(1.0, 1.0),
        bandwidth=matrix(1.0, 1.0),
        nccl_latency=matrix(0.1, 0.0) if nccl else (),
        nccl_bandwidth=matrix(100.0, 0.0) if nccl else (),
    )


def test_stages_of_one_site_send_over_nccl() -> None:
    links = Links.of(two_hosts())
    assert links.transfer(0, 1, 10.0) == pytest.approx(0.1 + 0.1)
    assert links.transfer(1, 2, 10.0) == pytest.approx(1.0 + 10.0), "between hosts"


def test_only_decoupled_averages_of_one_site_go_over_nccl() -> None:
    links = Links.of(two_hosts())
    assert half((0, 1), 20.0, links, Sync.DECOUPLED) == pytest.approx(2 * 0.1 + 0.1)
    assert half((0, 1), 20.0, links, Sync.ALL_REDUCE) == pytest.approx(2 * 1.0 + 10.0)
    # Two shares of 5 B leave each device through its network card, at 1 B/s.
    assert half((0, 1, 2, 3), 20.0, links, Sync.DECOUPLED) == pytest.approx(10.0)
    assert half((0, 1, 2, 3), 20.0, links, Sync.ALL_REDUCE) == pytest.approx(15.0)


@pytest.mark.parametrize("cluster", [two_hosts(nccl=False), two_hosts(hosts=False)])
def test_without_nccl_or_hosts_in_the_file_all_links_are_those_of_gloo(cluster: Cluster) -> None:
    links = Links.of(cluster)
    assert links.transfer(0, 1, 10.0) == pytest.approx(1.0 + 10.0)
    assert half((0, 1), 20.0, links, Sync.DECOUPLED) == pytest.approx(2 * 1.0 + 10.0)


def test_uplink_is_the_described_one_or_that_of_the_fastest_link() -> None:
    cluster = Cluster.load("case5_worldwide")
    fastest = max(
        cluster.link(cluster.devices[0].name, other.name).bandwidth for other in cluster.devices[1:]
    )
    devices = (cluster.devices[0], replace(cluster.devices[1], uplink=123.0), *cluster.devices[2:])
    links = Links.of(replace(cluster, devices=devices))
    assert links.uplinks[0] == pytest.approx(fastest)
    assert links.uplinks[1] == 123.0
    assert half((0, 1), 246.0, links, Sync.ALL_REDUCE) == pytest.approx(1.0)

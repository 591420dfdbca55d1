"""The bundled networks have the published numbers of DT-FM."""

import pytest

from polyrhythm.describe.cluster import Cluster, bundled_networks
from polyrhythm.errors import DescriptionError

GBIT = 125e6


@pytest.mark.parametrize("name", bundled_networks())
def test_network_has_its_name_its_source_and_64_devices(name):
    cluster = Cluster.load(name)
    assert cluster.name == name
    assert "DT-FM commit cda948f" in cluster.source
    assert "arXiv:2206.01288" in cluster.source
    assert len(cluster.devices) == 64


@pytest.mark.parametrize(
    ("name", "a", "b", "latency", "gbit"),
    [
        ("case1_datacenter_ondemand", "instance_0/0", "instance_0/7", 0.0, 100),
        ("case1_datacenter_ondemand", "instance_0/0", "instance_7/7", 0.0, 3.125),
        ("case2_datacenter_spot", "spot_instance_3/0", "spot_instance_3/3", 0.0, 100),
        ("case2_datacenter_spot", "standalone/0", "standalone/31", 0.0, 1.25),
        ("case3_multi_datacenter", "Ohio/31", "Virginia/0", 0.011, 1.12),
        ("case4_regional", "California/15", "Ohio/0", 0.052, 1.02),
        ("case5_worldwide", "Tokyo/0", "Seoul/7", 0.034, 1.1),
        ("case5_worldwide", "Seoul/3", "London/3", 0.238, 0.342),
        ("case5_worldwide", "Ireland/0", "Ireland/1", 0.005, 2),
    ],
)
def test_link_of_a_bundled_network_is_the_published_one(name, a, b, latency, gbit):
    link = Cluster.load(name).link(a, b)
    assert (link.latency, link.bandwidth) == (latency, gbit * GBIT)


def test_worldwide_devices_come_in_the_published_order():
    devices = Cluster.load("case5_worldwide").devices
    assert [device.name for device in devices[7:9]] == ["Oregon/7", "Virginia/0"]
    assert devices[-1].name == "Ireland/7"


def test_five_networks_are_bundled():
    assert [name[:5] for name in bundled_networks()] == [f"case{i}" for i in range(1, 6)]


def test_unknown_network_is_refused_with_the_nearest_name():
    with pytest.raises(DescriptionError, match="unknown network 'case5_worldwid'") as caught:
        Cluster.load("case5_worldwid")
    assert caught.value.fix == "did you mean 'case5_worldwide'?"

"""What-if sentences change a cluster or a scenario."""

import pytest

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import Kill, LinkChange, Scenario, Slow
from polyrhythm.errors import DescriptionError
from polyrhythm.simulate.what_if import what_if

EMPTY_SCENARIO = Scenario(name="calm")
CLUSTER = Cluster(
    name="three",
    devices=(
        Device(name="a0", region="Tokyo"),
        Device(name="a1", region="Tokyo"),
        Device(name="b-0", region="New-York"),
    ),
    regions=("Tokyo", "New-York"),
    latency=((0.001, 0.08), (0.09, 0.001)),
    bandwidth=((1e9, 1e8), (2e8, 1e9)),
)


def test_a_link_between_regions_changes_in_both_directions_and_no_other() -> None:
    cluster, scenario = what_if("link tokyo-New-York x0.5", CLUSTER, EMPTY_SCENARIO)
    assert cluster.bandwidth == ((1e9, 5e7), (1e8, 1e9))
    assert cluster.latency == CLUSTER.latency
    assert scenario == EMPTY_SCENARIO


def test_latency_changes_only_if_named() -> None:
    cluster, _ = what_if("link New-York-Tokyo latency x2", CLUSTER, EMPTY_SCENARIO)
    assert cluster.latency == ((0.001, 0.16), (0.18, 0.001))
    assert cluster.bandwidth == CLUSTER.bandwidth


def test_links_inside_a_region_can_change() -> None:
    cluster, _ = what_if("link Tokyo-Tokyo x3", CLUSTER, EMPTY_SCENARIO)
    assert cluster.bandwidth == ((3e9, 1e8), (2e8, 1e9))


def test_a_link_of_a_single_device_is_a_change_at_the_start() -> None:
    cluster, scenario = what_if("link a1-b-0 x0.1", CLUSTER, EMPTY_SCENARIO)
    assert cluster == CLUSTER
    assert scenario.link == (LinkChange(at=0.0, source="a1", target="b-0", bandwidth=1e7),)


def test_down_loses_the_link_at_the_start() -> None:
    _, scenario = what_if("link Tokyo-New-York down", CLUSTER, EMPTY_SCENARIO)
    assert scenario.link == (LinkChange(at=0.0, source="Tokyo", target="New-York", up=False),)


@pytest.mark.parametrize("name", ["b-0", "2"])
def test_device_is_given_by_name_or_index(name: str) -> None:
    _, scenario = what_if(f"device {name} slow x4", CLUSTER, EMPTY_SCENARIO)
    assert scenario.slow == (Slow(device="b-0", factor=4.0),)
    cluster, _ = what_if(f"device {name} speed x2", CLUSTER, EMPTY_SCENARIO)
    assert [device.speed for device in cluster.devices] == [1.0, 1.0, 2.0]
    _, scenario = what_if(f"device {name} gone", CLUSTER, EMPTY_SCENARIO)
    assert scenario.kill == (Kill(device="b-0", at=0.0),)


def test_existing_scenario_events_are_kept() -> None:
    before = Scenario(name="some", slow=(Slow(device="a0", factor=2.0),))
    _, scenario = what_if("device 1 slow x4", CLUSTER, before)
    assert scenario.slow == (*before.slow, Slow(device="a1", factor=4.0))


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("link Tokyo x2", "a link with one end"),
        ("link Tokyo-Osaka x2", "'Osaka'"),
        ("link Tokyo-New-York x0", "x0"),
        ("link Tokyo-New-York x-1", "x-1"),
        ("device 3 slow x4", "unknown device '3'"),
        ("device a0 slow x0.5", "write device a0 speed x2"),
        ("device a0 slower", "device a0 slower"),
        ("", '--what-if ""'),
    ],
)
def test_invalid_sentence_is_refused(sentence: str, wrong: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        what_if(sentence, CLUSTER, EMPTY_SCENARIO)
    assert wrong in str(caught.value)
    assert f'--what-if "{sentence}"' in str(caught.value)

"""Spot instances: at any time as many devices are alive as nodes were recorded."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.describe.scenario import Join, Kill, Scenario
from polyrhythm.describe.spot import SpotTrace, bundled_spot_traces, spot_scenario
from polyrhythm.errors import DescriptionError
from tests.grids import num_examples
from tests.pure.plan_examples import cluster

MANUAL = (Path(__file__).parents[2] / "docs" / "describe.md").read_text(encoding="utf-8")

moments = st.integers(0, 50).map(float)
lifetimes = st.sets(moments, min_size=1, max_size=6).map(lambda times: tuple(sorted(times)))
by_node = st.lists(lifetimes, min_size=1, max_size=8).map(
    lambda nodes: SpotTrace(name="nodes", nodes=tuple(nodes))
)
by_count = st.dictionaries(moments, st.integers(0, 6), max_size=10).map(
    lambda counts: SpotTrace(
        name="counts",
        times=tuple(sorted({0.0: 3} | counts)),
        counts=tuple(({0.0: 3} | counts)[time] for time in sorted({0.0: 3} | counts)),
    )
)
traces = st.one_of(by_node, by_count)


def recorded(trace: SpotTrace, now: float) -> int:
    """Return the number of recorded nodes after all events at `now`."""
    if trace.counts:
        return [n for time, n in zip(trace.times, trace.counts, strict=True) if time <= now][-1]
    return sum(sum(time <= now for time in times) % 2 for times in trace.nodes)


def alive(scenario: Scenario, devices: list[str], now: float) -> set[str]:
    """Return the devices alive at `now`; a device whose first event is a join starts absent."""
    there = set()
    for device in devices:
        events = sorted(
            (event for event in (*scenario.kill, *scenario.join) if event.device == device),
            key=lambda event: event.at,
        )
        past = [event for event in events if event.at <= now]
        is_there = (
            isinstance(past[-1], Join) if past else not isinstance((events or [None])[0], Join)
        )
        if is_there:
            there.add(device)
    return there


def names(number: int) -> list[str]:
    return [device.name for device in cluster({"spot": number}).devices]


@settings(max_examples=num_examples(40))  # each checks all times
@given(traces)
def test_number_of_devices_follows_the_trace(trace: SpotTrace) -> None:
    number = len(trace.places)
    if number == 0:
        assert spot_scenario(trace, cluster({"spot": 3})).kill == ()
        return
    scenario = spot_scenario(trace, cluster({"spot": number}))
    for now in range(52):
        assert len(alive(scenario, names(number), now)) == recorded(trace, now)


@given(traces, st.integers(1, 10))
def test_kill_and_join_alternate_for_every_device(trace: SpotTrace, number: int) -> None:
    scenario = spot_scenario(trace, cluster({"spot": number}))
    scenario.check(cluster({"spot": number}))
    for device in names(number):
        events = sorted(
            (event for event in (*scenario.kill, *scenario.join) if event.device == device),
            key=lambda event: event.at,
        )
        assert all(type(a) is not type(b) for a, b in pairwise(events))
        assert all(a.at < b.at for a, b in pairwise(events))
        assert all(event.at > 0 for event in events)


@given(traces, st.integers(1, 10), st.integers(1, 10))
def test_smaller_cluster_sees_the_events_of_the_first_devices_of_a_larger_one(
    trace: SpotTrace, small: int, large: int
) -> None:
    small, large = sorted((small, large))
    few = spot_scenario(trace, cluster({"spot": small}))
    many = spot_scenario(trace, cluster({"spot": large}))
    first = set(names(small))
    assert few.kill == tuple(event for event in many.kill if event.device in first)
    assert few.join == tuple(event for event in many.join if event.device in first)


@given(traces)
def test_devices_beyond_the_trace_are_never_lost(trace: SpotTrace) -> None:
    number = len(trace.places) + 3
    scenario = spot_scenario(trace, cluster({"spot": number}))
    beyond = set(names(number)[-3:])
    assert not beyond & {event.device for event in (*scenario.kill, *scenario.join)}


@given(traces, st.floats(0.5, 1e4))
def test_recording_is_scaled_to_a_duration(trace: SpotTrace, duration: float) -> None:
    where = cluster({"spot": 8})
    plain, squeezed = spot_scenario(trace, where), spot_scenario(trace, where, duration=duration)
    if trace.length == 0:
        assert plain == squeezed
        return
    assert [event.device for event in squeezed.kill] == [event.device for event in plain.kill]
    for kind in ("kill", "join"):
        before = [event.at for event in getattr(plain, kind)]
        after = [event.at for event in getattr(squeezed, kind)]
        assert after == pytest.approx([at * duration / trace.length for at in before])
        assert all(at <= duration * (1 + 1e-9) for at in after)


def test_new_node_takes_the_slot_that_was_empty_longest() -> None:
    trace = SpotTrace(name="x", nodes=((0, 10), (0, 5), (0,), (12, 20), (13,), (14,)))
    assert trace.places == ((0, 10, 13), (0, 5, 12, 20), (0,), (14,))
    scenario = spot_scenario(trace, cluster({"a": 5}))
    assert scenario == Scenario(
        name="x",
        kill=(Kill(device="a/1", at=5), Kill(device="a/0", at=10), Kill(device="a/1", at=20)),
        join=(Join(device="a/1", at=12), Join(device="a/0", at=13), Join(device="a/3", at=14)),
    )
    assert alive(scenario, names_of("a", 5), 0) == {"a/0", "a/1", "a/2", "a/4"}


def names_of(region: str, number: int) -> list[str]:
    return [f"{region}/{place}" for place in range(number)]


def test_if_only_counts_are_known_the_oldest_nodes_leave_first() -> None:
    trace = SpotTrace(name="x", times=(0, 1, 2, 3), counts=(3, 1, 2, 0))
    assert trace.places == ((0, 1, 2, 3), (0, 1), (0, 3))


def test_node_that_joins_at_the_time_of_a_loss_gets_a_new_slot() -> None:
    trace = SpotTrace(name="x", nodes=((0, 5), (5,)))
    assert trace.places == ((0, 5), (5,))


def test_recording_may_last_beyond_its_last_event() -> None:
    trace = SpotTrace(name="x", duration=100.0, nodes=((0, 50),))
    assert spot_scenario(trace, cluster({"a": 1}), duration=10).kill == (Kill(device="a/0", at=5),)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, "spot trace 'x' has 0 nodes, 0 times and 0 counts"),
        ({"nodes": ((0,),), "times": (0,), "counts": (1,)}, "1 nodes, 1 times and 1 counts"),
        ({"times": (0, 1), "counts": (1,)}, "0 nodes, 2 times and 1 counts"),
        ({"nodes": ((0,), ())}, "nodes[1] is empty"),
        ({"nodes": ((0, 5, 5),)}, "nodes[0]: 5s, then 5s"),
        ({"nodes": ((0, 5), (-1, 5))}, "nodes[1][0] is -1s"),
        ({"nodes": ((math.inf,),)}, "nodes[0][0] is inf"),
        ({"times": (1, 2), "counts": (1, 2)}, "times[0] is 1s"),
        ({"times": (0, 3, 2), "counts": (1, 2, 3)}, "times: 3s, then 2s"),
        ({"times": (0, 1), "counts": (1, -1)}, "counts[1] is -1"),
        ({"nodes": ((0, 60),), "duration": 50.0}, "duration is 50s"),
    ],
)
def test_invalid_recording_is_refused(change: dict, wrong: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        SpotTrace(name="x", **change)
    assert wrong in caught.value.wrong


@pytest.mark.parametrize("duration", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_duration_is_refused(duration: float) -> None:
    with pytest.raises(DescriptionError, match="duration is"):
        spot_scenario("bamboo_aws_p3", cluster({"a": 1}), duration=duration)


def test_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(DescriptionError, match="unknown spot trace 'bamboo_aws'") as caught:
        spot_scenario("bamboo_aws", cluster({"a": 1}))
    assert caught.value.fix == "did you mean 'bamboo_aws_p3'?"


def test_file_is_read_with_units_and_named_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nnodes_min = [[0, 2], [1]]\nduration = "1h"')
    assert SpotTrace.load(path) == SpotTrace(name="mine", nodes=((0, 120), (60,)), duration=3600)
    path.write_text('name = "mine"\ntimes_s = [0, 9]\ncounts = [2, "three"]')
    with pytest.raises(DescriptionError, match=r"mine.toml: counts\[1\]"):
        spot_scenario(path, cluster({"a": 1}))


def test_the_example_of_the_manual_loads(tmp_path: Path) -> None:
    [text] = re.findall(r"```json spot\n(.*?)```", MANUAL, re.DOTALL)
    (tmp_path / "spot.json").write_text(text)
    assert SpotTrace.load(tmp_path / "spot.json").name == json.loads(text)["name"]


@pytest.mark.parametrize("name", bundled_spot_traces())
def test_bundled_trace_names_its_source_and_licence(
    name: str,
) -> None:
    trace = SpotTrace.load(name)
    assert trace.name == name
    [repository] = re.findall(r"github\.com/[\w/]+", trace.source)
    [row] = re.findall(rf"^\| `{name}` .*$", MANUAL, re.MULTILINE)
    assert repository in row
    assert trace.licence in row


@pytest.mark.parametrize(
    ("name", "num_places", "hours", "most", "least"),
    [("bamboo_aws_p3", 32, 11.4, 32, 10), ("bamboo_gcp_a100", 64, 27.0, 64, 17)],
)
def test_bundled_trace_matches_the_publication(
    name: str, num_places: int, hours: float, most: int, least: int
) -> None:
    trace = SpotTrace.load(name)
    assert len(trace.places) == num_places
    assert trace.length / 3600 == pytest.approx(hours, abs=0.05)
    times = sorted({time for times in trace.places for time in times})
    there = [recorded(trace, time) for time in times]
    assert (max(there), min(there)) == (most, least)
    scenario = spot_scenario(name, cluster({"spot": num_places}), duration=60)
    kills = [event.device for event in scenario.kill]
    assert all(2 <= kills.count(device) <= 10 for device in names(num_places)), "its share each"


def test_aws_instances_were_preempted_167_times() -> None:
    scenario = spot_scenario("bamboo_aws_p3", cluster({"spot": 40}))
    assert len(scenario.kill) == 167
    assert len(scenario.join) == 177 - 18
    assert len(alive(scenario, names(32), 0)) == 18

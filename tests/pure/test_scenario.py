"""Scenarios: events are unambiguous, and their devices and regions exist."""

import math
from pathlib import Path

import pytest

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import Join, Kill, LinkChange, Pause, Scenario, Slow
from polyrhythm.errors import DescriptionError


def scenario(tmp_path: Path, text: str) -> Scenario:
    path = tmp_path / "scenario.toml"
    path.write_text(f'name = "s"\n{text}')
    return Scenario.load(path)


def test_scenario_is_read_event_by_event(tmp_path):
    read = scenario(
        tmp_path,
        """
        seed = 3
        slow = [
          {device = "a", factor = 2, start = "1min", until_s = 90},
          {device = "a", probability = 0.1, sleep_factor = 3},
          {device = "*", trace = "x.json", trace_worker = 2, trace_duration = "5min"},
          {device = "b", trace = "sdpipe_16gpu"},
        ]
        link = [{at_ms = 5, from = "a", to = "b", bandwidth_mbps = 8, one_way = true}]
        pause = [{device = "a", at = "1s", until = "2s"}]
        kill = [{device = "b", at = "3s"}]
        join = [{device = "b", at = "4s"}]
        """,
    )
    assert read == Scenario(
        name="s",
        seed=3,
        slow=(
            Slow(device="a", factor=2.0, start=60.0, until=90.0),
            Slow(device="a", probability=0.1, sleep_factor=3.0),
            Slow(
                device="*",
                trace=str(tmp_path / "x.json"),
                trace_worker=2,
                trace_duration=300.0,
            ),
            Slow(device="b", trace="sdpipe_16gpu"),
        ),
        link=(LinkChange(at=0.005, source="a", target="b", bandwidth=1e6, one_way=True),),
        pause=(Pause(device="a", at=1.0, until=2.0),),
        kill=(Kill(device="b", at=3.0),),
        join=(Join(device="b", at=4.0),),
    )


def test_scenario_may_be_empty(tmp_path):
    assert scenario(tmp_path, "") == Scenario(name="s")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[[slow]]\ndevice = 'a'", "slow[0]: 'a' is slowed in 0 ways"),
        ("[[slow]]\ndevice = 'a'\nfactor = 2\ntrace = 'x'", "slow[0]: 'a' is slowed in 2 ways"),
        (
            "[[slow]]\ndevice = 'a'\nfactor = 2\nprobability = 0.1\nsleep_factor = 3",
            "slow[0]: 'a' is slowed in 2 ways",
        ),
        (
            "[[slow]]\ndevice = 'a'\nprobability = 0.1",
            "slow[0]: only one of probability and sleep_factor",
        ),
        (
            "[[slow]]\ndevice = 'a'\nsleep_factor = 3",
            "slow[0]: only one of probability and sleep_factor",
        ),
        ("[[slow]]\ndevice = 'a'\nfactor = 0.5", "slow[0]: factor is 0.5"),
        (
            "[[slow]]\ndevice = 'a'\nprobability = 10\nsleep_factor = 3",
            "slow[0]: probability is 10",
        ),
        (
            "[[slow]]\ndevice = 'a'\nprobability = 0.1\nsleep_factor = -3",
            "slow[0]: sleep_factor is -3",
        ),
        ("[[slow]]\ndevice = 'a'\nfactor = 2\nstart_s = -1", "slow[0]: start is -1s"),
        ("[[slow]]\ndevice = 'a'\ntrace = 'sdpipe'", "slow[0].trace: unknown trace 'sdpipe'"),
        (
            "[[slow]]\ndevice = 'a'\nfactor = 2\ntrace_worker = 0",
            "slow[0]: trace_worker or trace_duration without a trace",
        ),
        (
            "[[slow]]\ndevice = 'a'\nfactor = 2\ntrace_duration_s = 9",
            "slow[0]: trace_worker or trace_duration without a trace",
        ),
        (
            "[[slow]]\ndevice = 'a'\ntrace = 'x.json'\ntrace_worker = -1",
            "slow[0]: trace_worker is -1",
        ),
        (
            "[[slow]]\ndevice = 'a'\ntrace = 'x.json'\ntrace_duration_s = 0",
            "slow[0]: trace_duration is 0s",
        ),
        (
            "[[slow]]\ndevice = 'a'\nfactor = 2\nstart_s = 9\nuntil_s = 5",
            "slow[0]: from 9s until 5s",
        ),
        ("[[pause]]\ndevice = 'a'\nat_s = 9\nuntil_s = 9", "pause[0]: from 9s until 9s"),
        ("[[kill]]\ndevice = 'a'\nat_s = -1", "kill[0]: at is -1s"),
        ("[[join]]\ndevice = 'a'\nat_s = -1", "join[0]: at is -1s"),
        (
            "[[link]]\nfrom = 'a'\nto = 'b'\nat_s = 1",
            "link[0]: the link from 'a' to 'b' does not change",
        ),
        (
            "[[link]]\nfrom = 'a'\nto = 'b'\nat_s = 1\nup = false\nlatency_ms = 1",
            "link[0]: the link from 'a' to 'b' is lost, but has values",
        ),
        (
            "[[link]]\nfrom = 'a'\nto = 'b'\nat_s = 1\nbandwidth_mbps = 0",
            "link[0]: bandwidth is 0kbit/s",
        ),
        (
            "[[link]]\nfrom = 'a'\nto = 'b'\nat_s = 1\nlatency_ms = -1",
            "link[0]: latency is -1ms",
        ),
        (
            "[[kill]]\ndevice = 'a'\nat_s = 1\n[[kill]]\ndevice = 'a'\nat_s = 5",
            "device 'a': kill at 1s, then kill at 5s",
        ),
        (
            "[[kill]]\ndevice = 'a'\nat_s = 5\n[[join]]\ndevice = 'a'\nat_s = 5",
            "device 'a': kill at 5s, then join at 5s",
        ),
    ],
)
def test_invalid_event_is_refused_with_its_location(tmp_path, text, wrong):
    with pytest.raises(DescriptionError) as caught:
        scenario(tmp_path, text)
    assert caught.value.wrong == f"{tmp_path / 'scenario.toml'}: {wrong}"


@pytest.mark.parametrize("probability", [math.nan, -0.1, 1.1])
def test_probability_is_a_fraction(probability):
    with pytest.raises(DescriptionError, match="probability is"):
        Slow(device="a", probability=probability, sleep_factor=3.0)


@pytest.mark.parametrize("until", [math.nan, math.inf])
def test_end_is_a_time_or_omitted(until):
    with pytest.raises(DescriptionError, match="until is"):
        Slow(device="a", factor=2.0, until=until)
    assert Slow(device="a", factor=2.0).until is None


def test_device_may_join_leave_and_rejoin():
    kills = (Kill(device="a", at=2.0), Kill(device="b", at=2.0), Kill(device="a", at=6.0))
    comes_back, comes = Join(device="a", at=4.0), Join(device="a", at=1.0)
    scenario = Scenario(name="s", kill=kills, join=(comes_back, comes))
    assert scenario.join == (comes_back, comes)
    with pytest.raises(DescriptionError, match="kill at 2s, then kill at 6s"):
        Scenario(name="s", kill=kills, join=(comes,))


WORLD = Cluster.load("case5_worldwide")


def test_all_devices_may_be_slowed_but_not_killed():
    Scenario(name="s", slow=(Slow(device="*", factor=2.0),)).check(WORLD)
    with pytest.raises(DescriptionError, match=r"kill\[0\].device: unknown device '\*'"):
        Scenario(name="s", kill=(Kill(device="*", at=0.0),)).check(WORLD)


def test_scenario_without_a_name_gets_that_of_its_file(tmp_path):
    path = tmp_path / "monday.toml"
    path.write_text("seed = 3\n")
    assert Scenario.load(path) == Scenario(name="monday", seed=3)


def test_unknown_scenario_is_refused_with_the_nearest_name():
    with pytest.raises(DescriptionError, match="unknown scenario 'sdpipe_c'") as caught:
        Scenario.load("sdpipe_c")
    assert caught.value.fix in ("did you mean 'sdpipe_a'?", "did you mean 'sdpipe_b'?")


@pytest.mark.parametrize(
    ("events", "wrong", "fix"),
    [
        (
            {"slow": (Slow(device="Tokyo/0", factor=2.0), Slow(device="Tokio/0", factor=2.0))},
            "slow[1].device: unknown device 'Tokio/0'",
            "did you mean 'Tokyo/0'?",
        ),
        (
            {"pause": (Pause(device="Tokyo/00", at=0.0, until=1.0),)},
            "pause[0].device: unknown device 'Tokyo/00'",
            "did you mean 'Tokyo/0'?",
        ),
        (
            {"kill": (Kill(device="Mars", at=0.0),)},
            "kill[0].device: unknown device 'Mars'",
            "correct or remove 'Mars'",
        ),
        (
            {"join": (Join(device="Ireland/8", at=0.0),)},
            "join[0].device: unknown device 'Ireland/8'",
            None,
        ),
        (
            {"link": (LinkChange(at=0.0, source="Tokio", target="Seoul", up=False),)},
            "link[0].from: unknown device or region 'Tokio'",
            "did you mean 'Tokyo'?",
        ),
        (
            {"link": (LinkChange(at=0.0, source="Tokyo/7", target="Soul", up=False),)},
            "link[0].to: unknown device or region 'Soul'",
            "did you mean 'Seoul'?",
        ),
        (
            {"link": (LinkChange(at=0.0, source="Tokyo/7", target="Tokyo/7", up=False),)},
            "link[0]: from device 'Tokyo/7' to itself",
            "name the device at the other end",
        ),
    ],
)
def test_event_for_an_unknown_target_is_refused(events, wrong, fix):
    with pytest.raises(DescriptionError) as caught:
        Scenario(name="s", **events).check(WORLD)
    assert caught.value.wrong == wrong
    assert fix is None or caught.value.fix == fix


def test_links_may_change_between_devices_regions_and_inside_a_region():
    pairs = [("Tokyo/0", "Seoul/0"), ("Tokyo", "Seoul/0"), ("Tokyo", "Seoul"), ("Tokyo", "Tokyo")]
    changes = [LinkChange(at=0.0, source=a, target=b, latency=0.0) for a, b in pairs]
    Scenario(name="s", link=tuple(changes)).check(WORLD)

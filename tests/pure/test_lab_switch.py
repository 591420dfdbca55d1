"""The pure parts of the switch: packets, lateness, and a scenario as commands."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import Join, Kill, LinkChange, Pause, Scenario
from polyrhythm.lab.channel import destination, wire_bytes
from polyrhythm.lab.commands import (
    ChangeLinks,
    CommandReply,
    GetReport,
    KillHost,
    PauseHost,
    ReviveHost,
    SwitchTiming,
    decode_command,
    decode_reply,
    encode,
)
from polyrhythm.lab.switch import LatenessHistogram
from polyrhythm.lab.timeline import link_command, scenario_commands


def packet(payload: int, *, target: int = 1, segment: int = 0, version: int = 4) -> bytes:
    """Return a TCP packet with timestamps and a virtio header; `segment` makes it a burst."""
    virtio = struct.pack("<BBHHHH", 0, 1 if segment else 0, 52, segment, 0, 0)
    ip = bytes([version << 4 | 5]) + bytes(15) + bytes([10, 77, 0, target + 1])
    tcp = bytes(12) + bytes([8 << 4]) + bytes(19)
    return virtio + ip + tcp + bytes(payload)


@given(st.integers(0, 60_000), st.integers(536, 1448))
def test_a_burst_counts_the_headers_of_every_segment(payload: int, segment: int) -> None:
    num_segments = max(1, -(-payload // segment))
    assert wire_bytes(packet(payload, segment=segment)) == payload + 52 * num_segments


def test_an_ordinary_packet_counts_as_it_is() -> None:
    assert wire_bytes(packet(100)) == 152


@pytest.mark.parametrize(
    ("data", "host"),
    [
        (packet(10, target=2), 2),
        (packet(10, target=3), None),  # not of this lab
        (packet(10, version=6), None),
        (b"", None),
        (packet(0)[:20], None),
    ],
)
def test_a_packet_goes_to_the_host_in_its_address(data: bytes, host: int | None) -> None:
    assert destination(data, num_hosts=3) == host


@given(st.lists(st.floats(0, 1), min_size=1), st.floats(0.01, 1))
def test_a_quantile_of_lateness_is_an_upper_bound_that_is_close(
    values: list[float], share: float
) -> None:
    lateness = LatenessHistogram()
    for value in values:
        lateness.add(value)
    exact = sorted(values)[max(0, -(-int(share * len(values) * 1e9) // 10**9) - 1)]
    assert exact * (1 - 1e-9) <= lateness.quantile(share) <= max(1.25 * max(exact, 1e-6), exact)


def test_nothing_was_late_when_nothing_was_delivered() -> None:
    assert LatenessHistogram().quantile(0.99) == 0


@pytest.mark.parametrize(
    ("late", "busy", "message"),
    [(1e-4, 0.5, None), (5e-3, 0.5, "2 ms late"), (1e-4, 0.95, "busy 95%")],
)
def test_late_or_busy_switch_reports_trouble(late: float, busy: float, message: str | None) -> None:
    trouble = SwitchTiming(late_p50=0, late_p99=late, late_max=late, busy=busy).trouble
    assert trouble is None if message is None else message in str(trouble)


def test_commands_and_replies_round_trip() -> None:
    for command in (ChangeLinks(pairs=((0, 1),), lost=True, at=2.5), GetReport(), KillHost(host=3)):
        assert decode_command(encode(command)) == command
    assert decode_reply(encode(CommandReply(refused="no"))) == CommandReply(refused="no")


NAMES = ("a1", "a2", "b1")
CLUSTER = Cluster(
    name="c",
    devices=tuple(Device(name=name, region=name[0]) for name in NAMES),
    regions=("a", "b"),
    latency=((0.1, 0.1), (0.1, 0.1)),
    bandwidth=((1e6, 1e6), (1e6, 1e6)),
)


@pytest.mark.parametrize(
    ("source", "target", "one_way", "pairs"),
    [
        ("a1", "b1", False, {(0, 2), (2, 0)}),
        ("a1", "b1", True, {(0, 2)}),
        ("a", "b", True, {(0, 2), (1, 2)}),
        ("a", "a", False, {(0, 1), (1, 0)}),
        ("b", "b", False, set()),
    ],
)
def test_a_link_change_reaches_every_pair_that_it_names(
    source: str, target: str, one_way: bool, pairs: set[tuple[int, int]]
) -> None:
    change = LinkChange(at=1, source=source, target=target, up=False, one_way=one_way)
    command = link_command(change, CLUSTER)
    assert set(command.pairs) == pairs
    assert command.lost is True


def test_scenario_becomes_timed_commands() -> None:
    scenario = Scenario(
        name="s",
        link=(LinkChange(at=1, source="a1", target="b1", latency=0.5),),
        pause=(Pause(device="a2", at=2, until=3),),
        kill=(Kill(device="b1", at=4),),
        join=(Join(device="b1", at=5),),
    )
    timed = sorted(
        scenario_commands(scenario, CLUSTER, start=100.0), key=lambda command: command.at or 0
    )
    assert timed == [
        ChangeLinks(pairs=((0, 2), (2, 0)), latency=0.5, at=101),
        PauseHost(host=1, paused=True, at=102),
        PauseHost(host=1, paused=False, at=103),
        KillHost(host=2, at=104),
        ReviveHost(host=2, at=105),
    ]


def test_device_that_joins_first_is_absent_at_start() -> None:
    scenario = Scenario(
        name="s",
        kill=(Kill(device="a1", at=1), Kill(device="a2", at=9)),
        join=(Join(device="a1", at=2), Join(device="a2", at=3)),
    )
    assert scenario.absent_at_start == {"a2"}

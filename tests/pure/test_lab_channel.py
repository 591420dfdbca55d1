"""A channel keeps its bandwidth, latency and order of packets under any change."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.lab.channel import MIN_QUEUE, QUEUE_TIME, Channel

sizes = st.integers(40, 65_000)
gaps = st.floats(0, 0.5)
bandwidths = st.floats(1e4, 1e9)
latencies = st.floats(0, 0.3)


def drain(channel: Channel) -> list[tuple[float, bytes]]:
    """Return all queued packets with their arrival times."""
    found = []
    while (due := channel.next_arrival()) < math.inf:
        found += list(channel.arrived(due))
    return found


def name(number: int) -> bytes:
    return number.to_bytes(4, "big")


@given(st.lists(st.tuples(gaps, sizes), min_size=1, max_size=20), bandwidths, latencies)
def test_packets_arrive_in_order_after_their_time_on_the_wire(
    offers: list[tuple[float, int]], bandwidth: float, latency: float
) -> None:
    channel = Channel(latency, bandwidth)
    now = free = 0.0
    expected = []
    for number, (gap, size) in enumerate(offers):
        now += gap
        if (free - now) * bandwidth > max(MIN_QUEUE, bandwidth * QUEUE_TIME) - 1:
            continue  # at the limit of the queue, which another test covers
        channel.offer(now, size, name(number))
        free = max(free, now) + size / bandwidth
        expected.append((free + latency, name(number)))
    arrived = drain(channel)
    assert [data for _, data in arrived] == [data for _, data in expected]
    for (due, _), (want, _) in zip(arrived, expected, strict=True):
        assert due == pytest.approx(want, rel=1e-9, abs=1e-9)
    assert channel.packets == len(expected)


@given(bandwidths, sizes)
def test_a_full_channel_carries_exactly_its_bandwidth(bandwidth: float, size: int) -> None:
    channel = Channel(0.01, bandwidth)
    for number in range(50):
        if channel.backlog(0.0) <= MIN_QUEUE / 2:
            channel.offer(0.0, size, name(number))
    arrivals = [due for due, _ in drain(channel)]
    if len(arrivals) > 1:
        carried = (len(arrivals) - 1) * size / (arrivals[-1] - arrivals[0])
        assert carried == pytest.approx(bandwidth, rel=1e-6)


def test_no_packet_is_delivered_before_its_arrival() -> None:
    channel = Channel(0.1, 1000.0)
    channel.offer(0.0, 500, b"x")
    assert list(channel.arrived(0.599)) == []
    assert [data for _, data in channel.arrived(0.6)] == [b"x"]
    assert channel.next_arrival() == math.inf


def test_a_backlog_longer_than_the_queue_is_dropped_and_counted() -> None:
    channel = Channel(0.0, 1e5)
    for number in range(20):
        channel.offer(0.0, 60_000, name(number))
    fits = math.ceil(MIN_QUEUE / 60_000)
    assert channel.drops == 20 - fits
    assert channel.peak_backlog <= MIN_QUEUE
    assert [data for _, data in drain(channel)] == [name(number) for number in range(fits)]


def test_lost_channel_drops_queued_and_new_packets() -> None:
    channel = Channel(1.0, 1e6)
    channel.offer(0.0, 1000, b"a")
    channel.change(0.5, lost=True)
    channel.offer(0.6, 1000, b"b")
    channel.change(0.7, lost=False)
    channel.offer(0.8, 1000, b"c")
    assert channel.drops == 2
    assert drain(channel) == [(pytest.approx(1.801), b"c")]


def test_held_channel_loses_nothing_and_resumes() -> None:
    channel = Channel(0.1, 1e4)
    channel.offer(0.0, 1000, b"a")  # leaves at 0.1, would arrive at 0.2
    channel.offer(0.0, 1000, b"b")
    channel.change(0.05, held=True)
    assert channel.next_arrival() == math.inf
    channel.offer(3.0, 1000, b"c")
    channel.change(5.0, held=False)
    times = {data: due for due, data in drain(channel)}
    assert list(times) == [b"a", b"b", b"c"]
    assert all(due >= 5.0 for due in times.values())
    assert channel.drops == 0


def test_sent_half_of_a_packet_counts_when_the_bandwidth_changes() -> None:
    channel = Channel(0.0, 1000.0)
    channel.offer(0.0, 1000, b"a")  # would leave at 1.0
    channel.change(0.5, bandwidth=100.0)  # 500 bytes are left: 5 s more
    assert drain(channel) == [(pytest.approx(5.5), b"a")]


def test_sent_packet_keeps_its_latency() -> None:
    channel = Channel(1.0, 1e6)
    channel.offer(0.0, 1000, b"a")
    channel.change(0.5, latency=0.0)
    channel.offer(0.5, 1000, b"b")
    assert drain(channel) == [(pytest.approx(1.001), b"a"), (pytest.approx(1.001), b"b")]


changes = st.fixed_dictionaries(
    {}, optional={"latency": latencies, "bandwidth": bandwidths, "held": st.booleans()}
)


@given(st.lists(st.tuples(gaps, st.one_of(sizes, changes)), max_size=30))
def test_order_is_kept_under_any_change(
    script: list[tuple[float, int | dict[str, float]]],
) -> None:
    channel = Channel(0.05, 1e6)
    now, sent, got = 0.0, [], []
    for number, (gap, step) in enumerate(script):
        now += gap
        got += list(channel.arrived(now))
        if isinstance(step, dict):
            channel.change(now, **step)
            assert channel.next_arrival() >= now
        else:
            before = channel.drops
            channel.offer(now, step, name(number))
            sent += [name(number)] * (channel.drops == before)
    channel.change(now, held=False)
    got += drain(channel)
    assert [data for _, data in got] == sent
    assert [due for due, _ in got] == sorted(due for due, _ in got)

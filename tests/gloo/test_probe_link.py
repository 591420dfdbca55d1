"""Latency and bandwidth of one direction from scripted message times, without a network."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from polyrhythm.run.probe import link
from polyrhythm.run.probe.link import PONG, SIZE
from polyrhythm.run.probe.probe import ProbeEffort
from polyrhythm.types import Bytes, BytesPerSecond, Seconds


@dataclass
class Clock:
    now: Seconds = 0.0

    def monotonic(self) -> Seconds:
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(link, "time", clock)
    return clock


@dataclass
class FakeChannel:
    """A PeerChannel whose peer has this latency and bandwidth, in virtual time."""

    clock: Clock
    timeout: Seconds = 60.0
    warmup: Seconds = 0.0  # additional time of the first round trip
    latency: Seconds = 0.01
    bandwidth: BytesPerSecond = 1e6
    names: tuple[str, str] = ("a", "b")
    num_echoes: int = 0
    sizes: list[Bytes] = field(default_factory=list)  # of requested streams

    def start_send(self, tensor: Tensor, to: int, *, tag: int, action: str) -> int:
        return 0

    def start_receive(self, tensor: Tensor, sender: int, *, tag: int, action: str) -> int:
        return tag

    def finish(self, work: int, peer: int, *, action: str, timeout: Seconds | None = None) -> None:
        if work >= PONG:
            duration = 2 * self.latency + (self.warmup if work == PONG else 0)
            assert duration <= (self.timeout if timeout is None else timeout), "timed out"
            self.clock.now += duration
            self.num_echoes += 1

    def finish_all(
        self, works: list[Any], peer: int, *, action: str, timeout: Seconds
    ) -> list[Seconds]:
        assert len(works) * self.sizes[-1] / self.bandwidth + self.latency <= timeout, "timed out"
        self.clock.now += 2 * self.latency
        times = []
        for _ in works:
            self.clock.now += self.sizes[-1] / self.bandwidth
            times.append(self.clock.now)
        return times

    def send(self, tensor: Tensor, to: int, *, tag: int, action: str) -> None:
        assert tag == SIZE
        self.sizes.append(int(tensor))

    def receive(self, tensor: Tensor, sender: int, *, tag: int, action: str) -> None:
        tensor.zero_()  # the target requests no streams


def test_first_echo_is_a_warmup(clock: Clock) -> None:
    channel = FakeChannel(clock, warmup=5.0)
    effort = ProbeEffort(pair_timeout=1, repeat=1)
    found = link.as_source(channel, 1, effort)  # type: ignore[arg-type]
    assert channel.num_echoes == 3
    assert found.median == pytest.approx(0.01)
    assert found.spread < 1e-6, "the median of three would hide the first"


@pytest.mark.parametrize(("repeat", "pair_timeout", "num_echoes"), [(1, 20, 11), (100, 20, 201)])
def test_number_of_echoes_follows_repeat_within_pair_timeout(
    clock: Clock, repeat: int, pair_timeout: Seconds, num_echoes: int
) -> None:
    channel = FakeChannel(clock)
    link.as_source(channel, 1, ProbeEffort(pair_timeout=pair_timeout, repeat=repeat))  # type: ignore[arg-type]
    assert channel.num_echoes == num_echoes


def test_echoes_stop_at_pair_timeout(clock: Clock) -> None:
    channel = FakeChannel(clock, latency=0.045, timeout=0.1)
    effort = ProbeEffort(seconds=0.001, repeat=1000, timeout=0.1, pair_timeout=4)
    assert link.as_source(channel, 1, effort).median == pytest.approx(0.045)  # type: ignore[arg-type]
    assert 1 < clock.now < 3


@pytest.mark.parametrize("latency", [1e-5, 0.01, 0.5, 20.0])
@pytest.mark.parametrize("bandwidth", [1e4, 1e6, 1e8, 1e10])
def test_bandwidth_excludes_latency_and_streams_stay_within_timeout(
    clock: Clock, latency: Seconds, bandwidth: BytesPerSecond
) -> None:
    effort = ProbeEffort(seconds=0.2, pair_timeout=200.0)
    channel = FakeChannel(clock, latency=latency, bandwidth=bandwidth)
    found = link.as_target(channel, 1, effort)  # type: ignore[arg-type]
    assert found.median == pytest.approx(bandwidth, rel=1e-3)
    assert found.spread < 1e-3
    *sizes, end = channel.sizes
    assert end == 0
    duration = 4 * sizes[-1] / bandwidth
    assert duration >= min(max(0.2, latency), effort.longest_stream) or sizes[-1] == link._LARGEST

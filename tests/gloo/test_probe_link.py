"""The figures of one direction, out of messages that take as long as a script says. No network."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from polyrhythm.run.probe import link
from polyrhythm.run.probe.effort import Effort
from polyrhythm.run.probe.talk import PONG, SIZE
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
class Scripted:
    """A Talk whose other end answers as one of this latency and bandwidth would."""

    clock: Clock
    deadline: Seconds = 60.0
    first: Seconds = 0.0  # the first round trip takes so much longer
    latency: Seconds = 0.01
    bandwidth: BytesPerSecond = 1e6
    names: tuple[str, str] = ("a", "b")
    num_echoes: int = 0
    sizes: list[Bytes] = field(default_factory=list)  # of streams, as they were asked for

    def start_send(self, tensor: Tensor, to: int, *, tag: int, action: str) -> int:
        return 0

    def start_receive(self, tensor: Tensor, sender: int, *, tag: int, action: str) -> int:
        return tag

    def finish(self, work: int, peer: int, *, action: str, within: Seconds | None = None) -> None:
        if work >= PONG:
            took = 2 * self.latency + (self.first if work == PONG else 0)
            assert took <= (self.deadline if within is None else within), "given up"
            self.clock.now += took
            self.num_echoes += 1

    def finish_all(
        self, works: list[Any], peer: int, *, action: str, within: Seconds
    ) -> list[Seconds]:
        assert len(works) * self.sizes[-1] / self.bandwidth + self.latency <= within, "given up"
        self.clock.now += 2 * self.latency
        times = []
        for _ in works:
            self.clock.now += self.sizes[-1] / self.bandwidth
            times.append(self.clock.now)
        return times

    def send(self, tensor: Tensor, to: int, *, tag: int, action: str, within: Seconds) -> None:
        assert tag == SIZE
        self.sizes.append(int(tensor))

    def receive(self, tensor: Tensor, sender: int, *, tag: int, action: str, within: float) -> None:
        tensor.zero_()  # no streams are wanted


def test_the_first_echo_does_not_count(clock: Clock) -> None:
    talk = Scripted(clock, first=5.0)
    impatient = Effort(patience=1, repeat=1)
    found = link.as_source(talk, 1, impatient)  # type: ignore[arg-type]
    assert talk.num_echoes == 3
    assert found.median == pytest.approx(0.01)
    assert found.spread < 1e-6, "of three, the median would hide the first"


@pytest.mark.parametrize(("repeat", "patience", "num_echoes"), [(1, 20, 11), (100, 20, 201)])
def test_echoes_are_as_many_as_asked_for_while_there_is_patience(
    clock: Clock, repeat: int, patience: Seconds, num_echoes: int
) -> None:
    talk = Scripted(clock)
    link.as_source(talk, 1, Effort(patience=patience, repeat=repeat))  # type: ignore[arg-type]
    assert talk.num_echoes == num_echoes


def test_each_echo_has_a_deadline_and_all_together_have_patience(clock: Clock) -> None:
    talk = Scripted(clock, latency=0.045, deadline=0.1)
    effort = Effort(seconds=0.001, repeat=1000, deadline=0.1, patience=4)
    assert link.as_source(talk, 1, effort).median == pytest.approx(0.045)  # type: ignore[arg-type]
    assert 1 < clock.now < 3


@pytest.mark.parametrize("latency", [1e-5, 0.01, 0.5, 20.0])
@pytest.mark.parametrize("bandwidth", [1e4, 1e6, 1e8, 1e10])
def test_a_bandwidth_is_free_of_latency_and_no_stream_passes_its_deadline(
    clock: Clock, latency: Seconds, bandwidth: BytesPerSecond
) -> None:
    effort = Effort(seconds=0.2, patience=200.0)
    talk = Scripted(clock, latency=latency, bandwidth=bandwidth)
    found = link.as_target(talk, 1, effort)  # type: ignore[arg-type]
    assert found.median == pytest.approx(bandwidth, rel=1e-3)
    assert found.spread < 1e-3
    *sizes, end = talk.sizes
    assert end == 0
    lasted = 4 * sizes[-1] / bandwidth
    assert lasted >= min(max(0.2, latency), effort.longest_stream) or sizes[-1] == link._LARGEST

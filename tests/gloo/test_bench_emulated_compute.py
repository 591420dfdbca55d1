"""Emulated compute sleeps as long as the compute and the scenario say, in forward and backward."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.harness import compute
from benchmarks.harness.compute import EmulatedCompute, EmulatedLayer
from polyrhythm.describe.scenario import Scenario, Slow
from polyrhythm.describe.slowness import Slowness


class Clock:
    """A clock which only sleeps move."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(compute, "time", clock)
    return clock


class Doubled(EmulatedLayer):
    """Gives its weight twice the value that the forward saw as gradient."""

    def gradient_fn(self, weight: Tensor) -> Callable[[], Tensor | None]:
        seen = weight.clone()
        return lambda: 2 * seen


def test_a_layer_sleeps_in_both_directions_and_passes_tensors_on(clock: Clock) -> None:
    layer = Doubled(torch.tensor([3.0]), EmulatedCompute(forward=1.0, backward=2.0, start=0.0))
    x = torch.ones(2, requires_grad=True)
    output = layer(x)
    assert clock.now == 101.0
    output.backward(torch.tensor([5.0, 7.0]))
    assert clock.now == 103.0
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 7.0]
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [6.0]


def test_a_layer_without_a_gradient_leaves_its_weight_alone() -> None:
    layer = EmulatedLayer(torch.ones(2), EmulatedCompute())
    layer(torch.ones(2)).sum().backward()
    assert layer.weight.grad is None


def test_nothing_takes_time_before_the_start_or_after_the_end(clock: Clock) -> None:
    emulated = EmulatedCompute(forward=1.0, backward=1.0)
    emulated.spend(1.0)
    assert clock.now == 100.0
    emulated.start, emulated.end = 100.0, 100.5
    assert emulated.spend(1.0) == clock.now == 100.5


def test_a_slow_device_takes_as_much_longer_as_the_scenario_says(clock: Clock) -> None:
    scenario = Scenario(slow=(Slow(device="d", factor=3.0, start=10.0),))
    slowness = Slowness.of(scenario, "d")
    emulated = EmulatedCompute(forward=1.0, backward=1.0, slowness=slowness, start=95.0)
    emulated.spend(1.0)
    assert clock.now == 101.0, "the entry starts at 105"
    clock.now = 105.0
    emulated.spend(1.0)
    assert clock.now == 108.0


def test_lateness_and_short_pauses_do_not_add_up(clock: Clock) -> None:
    emulated = EmulatedCompute(forward=1.0, backward=1.0, start=0.0, grace=0.1)
    done = emulated.spend(1.0, since=99.5)
    assert done == clock.now == 100.5
    clock.now += 0.05
    emulated.spend(1.0)
    assert clock.now == 101.5
    clock.now += 0.2
    emulated.spend(1.0)
    assert clock.now == pytest.approx(102.7)


def test_sleeps_are_real() -> None:
    start = time.monotonic()
    EmulatedCompute(start=0.0).spend(0.05)
    assert time.monotonic() - start >= 0.05

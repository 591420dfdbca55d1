"""EmulatedCompute sleeps for the delays of a scenario."""

import time
from pathlib import Path

import pytest

from polyrhythm.describe.scenario import Scenario, Slow
from polyrhythm.describe.slowness import Slowness
from polyrhythm.errors import LaunchError
from polyrhythm.run.emulated_compute import EmulatedCompute
from polyrhythm.types import Op


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the durations of all sleeps instead of sleeping."""
    durations: list[float] = []
    monkeypatch.setattr(time, "sleep", durations.append)
    return durations


def slow(**options: float) -> Slowness:
    return Slowness.of(Scenario(name="s", slow=(Slow(device="a", **options),)), "a")


def test_no_delay_without_scenario(slept: list[float]) -> None:
    compute = EmulatedCompute.from_environment({})
    assert compute.slow_down(Op.F, 1.0) == 0
    compute.emulate(Op.B, 0.25)
    assert sum(slept) == 0.25


def test_slow_down_sleeps_for_the_rest_of_the_factor(slept: list[float]) -> None:
    assert EmulatedCompute(slow(factor=4.0)).slow_down(Op.F, 0.5) == 1.5
    assert slept == [1.5]


def test_emulate_sleeps_for_work_and_delay(slept: list[float]) -> None:
    EmulatedCompute(slow(factor=4.0)).emulate(Op.F, 0.5)
    assert slept == [2.0]


def test_random_sleep_scales_with_forward_plus_backward() -> None:
    compute = EmulatedCompute(slow(probability=1.0, sleep_factor=3.0))
    assert compute.emulate(Op.F, 1.0) == pytest.approx(3 * (1 + 2)), "a backward counts as two"
    assert compute.emulate(Op.B, 1.5) == pytest.approx(3 * (1 + 1.5))
    assert compute.emulate(Op.F, 1.0) == pytest.approx(3 * (1 + 1.5))


def test_from_environment_reads_device_and_start_time(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('name = "s"\n[[slow]]\ndevice = "b"\nfactor = 2\nstart = "1h"\n')
    common = {"POLYRHYTHM_SCENARIO": str(path), "POLYRHYTHM_DEVICE_INDEX": "0"}
    now = time.monotonic()

    def delay(device: str, started_at: float, time_scale: str = "1") -> float:
        environ = {
            **common,
            "POLYRHYTHM_DEVICE": device,
            "POLYRHYTHM_STARTED_AT": str(started_at),
            "POLYRHYTHM_TIME_SCALE": time_scale,
        }
        return EmulatedCompute.from_environment(environ).slow_down(Op.F, 1.0)

    assert delay("a", now - 7200) == 0, "another device"
    assert delay("b", now) == 0, "not yet"
    assert delay("b", now - 7200) == 1
    assert delay("b", now - 720, time_scale="0.1") == 1, "an hour is six minutes"


def test_incomplete_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="POLYRHYTHM_DEVICE_INDEX"):
        EmulatedCompute.from_environment({"POLYRHYTHM_SCENARIO": "s.toml"})

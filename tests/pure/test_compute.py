"""A worker's compute is as slow as the scenario says, whoever asks."""

import time
from pathlib import Path

import pytest

from polyrhythm.describe.scenario import Scenario, Slow
from polyrhythm.describe.slowness import Slowness
from polyrhythm.errors import LaunchError
from polyrhythm.run.compute import Compute
from polyrhythm.types import Op


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What would have been slept."""
    durations: list[float] = []
    monkeypatch.setattr(time, "sleep", durations.append)
    return durations


def slow(**how: float) -> Slowness:
    return Slowness.of(Scenario(name="s", slow=(Slow(device="a", **how),)), "a")


def test_without_a_scenario_nobody_is_held_back(slept: list[float]) -> None:
    compute = Compute.from_environment({})
    assert compute.hold_back(Op.F, 1.0) == 0
    compute.emulate(Op.B, 0.25)
    assert sum(slept) == 0.25


def test_a_factor_holds_back_real_work_by_what_is_missing(slept: list[float]) -> None:
    assert Compute(slow(factor=4.0)).hold_back(Op.F, 0.5) == 1.5
    assert slept == [1.5]


def test_emulated_work_takes_the_work_and_the_delay(slept: list[float]) -> None:
    Compute(slow(factor=4.0)).emulate(Op.F, 0.5)
    assert slept == [2.0]


def test_a_random_sleep_is_measured_in_forward_plus_backward() -> None:
    compute = Compute(slow(probability=1.0, sleep_factor=3.0))
    assert compute.emulate(Op.F, 1.0) == pytest.approx(3 * (1 + 2)), "a backward is taken for two"
    assert compute.emulate(Op.B, 1.5) == pytest.approx(3 * (1 + 1.5))
    assert compute.emulate(Op.F, 1.0) == pytest.approx(3 * (1 + 1.5))


def test_a_process_of_a_lab_learns_from_its_environment_who_it_is(tmp_path: Path) -> None:
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
        return Compute.from_environment(environ).hold_back(Op.F, 1.0)

    assert delay("a", now - 7200) == 0, "another device"
    assert delay("b", now) == 0, "not yet"
    assert delay("b", now - 7200) == 1
    assert delay("b", now - 720, time_scale="0.1") == 1, "an hour is six minutes"


def test_half_an_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="POLYRHYTHM_DEVICE_INDEX"):
        Compute.from_environment({"POLYRHYTHM_SCENARIO": "s.toml"})

"""The benchmark of decoupled all-reduce runs and names what is asked; its times are not judged.

Bytes, state and weights are: they do not depend on what else the machine does.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from polyrhythm.bench.decoupled.ratios import BARS, of_smax, ratios_of, theory
from polyrhythm.bench.decoupled.settings import FULL_PLAN, QUICK_PLAN, Plan, Setting
from polyrhythm.bench.decoupled.steps import Measured, Row

PLANS = pytest.mark.parametrize("plan", [FULL_PLAN, QUICK_PLAN])


@pytest.mark.timeout(110)
def test_the_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrhythm", "bench", "decoupled", "--quick", "--out", "."]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "decoupled"
    assert set(result["ratios"]) == set(BARS)
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert result["ratios"]["state"] <= BARS["state"]
    figures = result["figures"]
    assert figures["state_2"] == pytest.approx(1 / 2, rel=0.02)
    for setting in QUICK_PLAN.settings:
        assert figures[f"{setting.name}_difference"] <= 1e-6
    rows = json.loads((tmp_path / "decoupled.json").read_text())["rows"]
    measured = {(row["setting"], row["side"]) for row in rows if "side" in row}
    assert measured == {(s.name, side.name) for s in QUICK_PLAN.settings for side in s.sides}
    halves = {(r["num_workers"], r["size"], r["whose"], r["what"]) for r in rows if "whose" in r}
    assert len(halves) == 2 * len(QUICK_PLAN.halves.sizes) * 7


@PLANS
def test_a_gather_takes_as_long_as_it_was_asked_to(plan: Plan) -> None:
    for setting in plan.settings:
        times = setting.times(setting.forward + setting.backward, setting.bandwidth)
        assert times.all_gather == pytest.approx(setting.all_gather)


@PLANS
def test_there_is_a_ratio_for_each_bar(plan: Plan) -> None:
    found = {setting.name: _measured(setting, {}) for setting in plan.settings}
    assert set(ratios_of(found)) == set(BARS)


def test_a_step_as_long_as_its_bound_is_all_of_what_is_possible() -> None:
    setting = FULL_PLAN.settings[0]
    times = setting.times(0.75, setting.bandwidth)
    steps = {"alone": 0.75, "ddp 0.5": times.coupled, "ours 0.5": times.decoupled}
    measured = _measured(setting, steps)
    assert of_smax(measured) == pytest.approx(1.0)
    assert measured.ratio("ddp", "ours") == pytest.approx(theory(measured))


def test_sides_are_compared_at_their_best_bucket_and_within_rounds() -> None:
    rows = [
        _row("ddp 1", 0, 2.0),
        _row("ddp 4", 0, 4.0),
        _row("ours 1", 0, 4.0),
        _row("ours 4", 0, 1.0),
        _row("ddp 1", 1, 6.0),
        _row("ours 4", 1, 2.0),
    ]
    measured = _measured(FULL_PLAN.settings[0], {}, tuple(rows))
    assert (measured.best("ddp"), measured.best("ours")) == ("ddp 1", "ours 4")
    assert measured.ratio("ddp", "ours") == 2.5


def _measured(
    setting: Setting, seconds: Mapping[str, float], rows: tuple[Row, ...] | None = None
) -> Measured:
    made = (_row(side.name, 0, seconds.get(side.name, 9.0)) for side in setting.sides)
    return Measured(
        setting=setting,
        rows=tuple(made) if rows is None else rows,
        goodput=setting.bandwidth,
        state=0.5,
        difference=0.0,
    )


def _row(side: str, number: int, seconds: float) -> Row:
    return Row(
        setting="speed",
        side=side,
        kind=side.split()[0],
        round=number,
        seconds=seconds,
        wire_bytes=1.0,
        trouble=None,
    )

"""The benchmark of decoupled all-reduce runs and reports every ratio; times are not judged.

Bytes, state and weights are judged: they do not depend on what else the machine does.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.decoupled.bench import BARS, first_guess, of_smax, ratios_of, theory
from benchmarks.decoupled.rounds import (
    DecoupledRow,
    MeasuredSetting,
    TunedBucket,
    better,
    contenders,
    goodput,
    to_repeat,
)
from benchmarks.decoupled.settings import (
    FULL_SUITE,
    MIB,
    QUICK_SUITE,
    DecoupledSetting,
    DecoupledSide,
    DecoupledSuite,
)
from benchmarks.harness.report import names_of
from polyrhythm.sync.fusion.tuner import FIRST, BucketCandidate, BucketMode
from polyrhythm.types import Seconds

SUITES = pytest.mark.parametrize("suite", [FULL_SUITE, QUICK_SUITE])


@pytest.mark.long
@pytest.mark.timeout(110)
def test_the_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrhythm", "bench", "decoupled", "--quick", "--out", "."]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "decoupled"
    assert set(result["ratios"]) == names_of(BARS)
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert next(bar for bar in BARS if bar.name == "state").is_met(result["ratios"]["state"])
    figures = result["figures"]
    assert 1 <= figures["tuned_trials"] <= 10
    assert figures["nested_gain"] > 0
    assert figures["state_2"] == pytest.approx(1 / 2, rel=0.02)
    for setting in QUICK_SUITE.settings:
        assert figures[f"{setting.name}_difference"] <= 1e-6
    rows = json.loads((tmp_path / "decoupled.json").read_text())["rows"]
    measured = {(row["setting"], row["side"]) for row in rows if "side" in row}
    assert measured == {(s.name, side.name) for s in QUICK_SUITE.settings for side in s.sides}
    measured_collectives = {
        (r["num_workers"], r["size"], r["whose"], r["what"]) for r in rows if "whose" in r
    }
    assert len(measured_collectives) == 2 * len(QUICK_SUITE.collectives.sizes) * 7


@SUITES
def test_an_all_gather_takes_as_long_as_the_setting_says(suite: DecoupledSuite) -> None:
    for setting in suite.settings:
        times = setting.times(setting.forward + setting.backward, setting.bandwidth)
        assert times.all_gather == pytest.approx(setting.all_gather)


@SUITES
def test_there_is_a_ratio_for_each_bar(suite: DecoupledSuite) -> None:
    found = {setting.name: _measured(setting, {}) for setting in suite.settings}
    assert set(ratios_of(found)) == names_of(BARS)


def test_a_step_as_long_as_its_bound_reaches_the_whole_theory() -> None:
    setting = FULL_SUITE.settings[0]
    times = setting.times(0.75, setting.bandwidth)
    ddp, ours = (next(s.name for s in setting.sides if s.kind == kind) for kind in ("ddp", "ours"))
    steps = {"alone": 0.75, ddp: times.coupled, ours: times.decoupled}
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
    measured = _measured(FULL_SUITE.settings[0], {}, tuple(rows))
    assert (measured.best("ddp"), measured.best("ours")) == ("ddp 1", "ours 4")
    assert measured.ratio("ddp", "ours") == 2.5


def test_a_side_that_one_noisy_step_held_back_has_a_second_round() -> None:
    sides = [DecoupledSide("ddp", size * MIB) for size in (1, 2, 4)] + [DecoupledSide("fsdp2")]
    first = [_row(*row) for row in [("ddp 1", 0, 1.0), ("ddp 2", 0, 1.14), ("ddp 4", 0, 1.2)]]
    first.append(_row("fsdp2", 0, 3.0))
    assert contenders(sides, [], 0) == sides
    assert _names(contenders(sides, first, 1)) == ["ddp 1", "ddp 2", "fsdp2"]
    second = [_row("ddp 1", 1, 1.2), _row("ddp 2", 1, 1.0), _row("fsdp2", 1, 3.0)]
    assert _names(contenders(sides, first + second, 2)) == ["ddp 1", "ddp 2"]
    second[1] = _row("ddp 2", 1, 1.3)
    assert _names(contenders(sides, first + second, 2)) == ["ddp 1"]


def test_a_side_that_left_a_round_does_not_come_back() -> None:
    sides = [DecoupledSide("ddp", size * MIB) for size in (1, 2)]
    rows = [_row("ddp 1", 0, 1.0), _row("ddp 2", 0, 9.0), _row("ddp 1", 1, 50.0)]
    assert _names(contenders(sides, rows, 2)) == ["ddp 1"]


def test_a_side_that_the_machine_disturbed_has_a_higher_limit() -> None:
    sides = [DecoupledSide("ddp", size * MIB) for size in (1, 2)]
    calm = _row("ddp 1", 0, 1.0)
    for doubt in ({"stolen": 0.2}, {"trouble": "late"}):
        for seconds, names in ((1.35, ["ddp 1", "ddp 2"]), (1.45, ["ddp 1"])):
            rows = [calm, _row("ddp 2", 0, seconds, **doubt)]
            assert _names(contenders(sides, rows, 1)) == names


def test_doubtful_steps_are_repeated_the_most_promising_first_and_a_few_times() -> None:
    calm, late = _row("ddp 1", 0, 1.0), _row("ddp 2", 0, 1.5, trouble="late")
    robbed = _row("ours 1", 0, 1.0, stolen=0.5)
    assert to_repeat([calm], {}) is None
    assert to_repeat([calm, late, robbed], {}) == "ours 1"
    assert to_repeat([calm, late, robbed], {"ours 1": 2}) == "ddp 2"
    assert to_repeat([calm, late, robbed], {"ours 1": 2, "ddp 2": 2}) is None
    assert to_repeat([late], {"a": 2, "b": 2, "c": 2}) is None


def test_the_trusted_or_else_the_shorter_of_two_measurements_counts() -> None:
    calm, late = _row("ddp 1", 0, 1.2), _row("ddp 1", 0, 1.0, trouble="late")
    assert better(late, calm) == better(calm, late) == calm
    later = _row("ddp 1", 0, 1.1, trouble="late")
    assert better(later, late) == late


def test_the_measured_bandwidth_never_exceeds_the_described_one() -> None:
    sizes = 1_000, 11_000
    assert goodput(sizes, [0.1, 0.3], [1.1, 2.1, 1.6], most=20_000.0) == pytest.approx(10_000.0)
    assert goodput(sizes, [1.0], [1.1], most=20_000.0) == 20_000.0
    assert goodput(sizes, [1.0], [0.9], most=20_000.0) == 20_000.0


def test_trials_that_repeat_a_candidate_are_counted() -> None:
    first, second, third = (
        BucketCandidate(FIRST),
        BucketCandidate(FIRST, BucketMode.ALL_REDUCE),
        BucketCandidate(5_000_000),
    )
    steps = [first] * 11 + [second] * 12 + [third] * 24 + [second]
    assert TunedBucket.of(steps, first) == TunedBucket(found=second, num_trials=4)
    assert TunedBucket.of([first] * 12, first) == TunedBucket(found=first, num_trials=1)


def test_the_first_guess_is_compared_within_its_round() -> None:
    rows = [_row("ours 1", 0, 1.0), _row("ours 25", 0, 1.5), _row("ours 1", 1, 3.0)]
    assert first_guess(_measured(FULL_SUITE.settings[0], {}, tuple(rows))) == 1.5


@SUITES
def test_sides_of_a_setting_have_different_names(suite: DecoupledSuite) -> None:
    for setting in suite.settings:
        assert len(set(_names(setting.sides))) == len(setting.sides)


def test_no_two_sides_of_the_grid_have_the_same_buckets() -> None:
    setting = next(s for s in FULL_SUITE.settings if s.name == "tuned")
    grid = [side for side in setting.sides if side.bucket is not None]
    held = {(min(s.bucket or 0, setting.size) // setting.layer_bytes, s.mode) for s in grid}
    assert len(held) == len(grid)


def _names(sides: Sequence[DecoupledSide]) -> list[str]:
    return [side.name for side in sides]


def _measured(
    setting: DecoupledSetting,
    seconds: Mapping[str, float],
    rows: tuple[DecoupledRow, ...] | None = None,
) -> MeasuredSetting:
    made = (_row(side.name, 0, seconds.get(side.name, 9.0)) for side in setting.sides)
    return MeasuredSetting(
        setting=setting,
        rows=tuple(made) if rows is None else rows,
        goodput=setting.bandwidth,
        state=0.5,
        difference=0.0,
    )


def _row(
    side: str,
    number: int,
    seconds: Seconds,
    *,
    stolen: float = 0.0,
    trouble: str | None = None,
) -> DecoupledRow:
    return DecoupledRow(
        setting="speed",
        side=side,
        kind=side.split()[0],
        round=number,
        seconds=seconds,
        wire_bytes=1.0,
        stolen=stolen,
        trouble=trouble,
    )

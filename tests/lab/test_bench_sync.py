"""The benchmark of synchronisation runs and reports every ratio; its figures are not judged."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.report import names_of
from benchmarks.sync.bench import (
    BARS,
    RATIOS,
    SyncPool,
    SyncRow,
    best,
    cluster,
    distance,
    mean_group_size,
    rate,
    ratio_to,
    ratios_of,
    row,
    run_together,
)
from benchmarks.sync.settings import (
    ALL_REDUCE,
    FULL_SUITE,
    HOMOGENEOUS,
    SyncSide,
    quick_suite,
)
from benchmarks.sync.worker import SyncAnswer
from polyrhythm.errors import LabError
from polyrhythm.lab.lab import Lab


@pytest.mark.long
@pytest.mark.timeout(110)
def test_the_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrhythm", "bench", "sync", "--quick", "--out", "."]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "sync"
    assert set(result["ratios"]) == names_of(BARS)
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert result["figures"]["dp5x_balanced_gradient_error"] <= 1e-6
    measured = {(row["setting"], row["side"]) for row in _rows(tmp_path)}
    planned = {(s.name, side.name) for s in quick_suite().settings for side in s.sides}
    assert measured == planned


def _rows(folder: Path) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads((folder / "sync.json").read_text())["rows"]
    return rows


@pytest.mark.timeout(60)
def test_a_worker_that_fails_ends_the_benchmark_with_its_reason() -> None:
    setting = quick_suite().settings[0]
    with (
        pytest.raises(LabError, match="unknown policy: 'nonsense'"),
        Lab(cluster(4)) as lab,
        SyncPool(lab, num_stages=2) as pool,
    ):
        run_together([pool], [(setting, SyncSide(name="wrong", policy="nonsense"))])
    assert all(child.status is not None for child in lab.children)


def test_every_ratio_compares_sides_that_are_measured() -> None:
    for suite in (FULL_SUITE, quick_suite()):
        measured = {(s.name, side.name) for s in suite.settings for side in s.sides}
        for ratio in RATIOS.values():
            assert (ratio.setting, ratio.other) in measured
            assert any((ratio.setting, side) in measured for side in ratio.sides)


@given(st.floats(0.01, 2.0), st.floats(0.0, 5.0), st.integers(2, 50))
def test_the_rate_of_a_steady_worker_does_not_depend_on_the_window(
    step: float, phase: float, num_steps: int
) -> None:
    done = [phase + step * number for number in range(num_steps)]
    assert rate(done, done[0], done[-1]) == pytest.approx(1 / step)
    assert rate(done, -1.0, done[-1] + 1.0) == pytest.approx(1 / step)


def test_one_completion_counts_as_one_step_in_the_window_and_none_as_zero() -> None:
    assert rate([3.0, 9.0], 2.0, 6.0) == 0.25
    assert rate([1.0, 9.0], 2.0, 6.0) == 0.0


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8), st.integers(1, 5))
def test_the_distance_of_equal_models_is_zero(model: list[float], num_models: int) -> None:
    assert distance([model] * num_models) == pytest.approx(0.0, abs=1e-9)


def test_the_distance_is_the_root_mean_square_from_the_mean_model() -> None:
    assert distance([[1.0, 5.0], [-1.0, 5.0]]) == pytest.approx(math.sqrt(0.5))


@given(st.lists(st.integers(1, 8), min_size=1))
def test_the_mean_group_size_counts_each_group_once(groups: list[int]) -> None:
    seen = [size for size in groups for _ in range(size) if size > 1]
    if seen:
        assert mean_group_size(seen, sum(groups)) == pytest.approx(sum(groups) / len(groups))


def test_stages_of_one_pipeline_count_their_samples_once() -> None:
    setting = next(s for s in FULL_SUITE.settings if s.num_stages > 1)
    done = [setting.warm_up + number for number in range(5)]
    answer = SyncAnswer(
        start=0.0,
        completions=done,
        weights=[0.0],
        group_sizes=[],
        gradient_error=0.0,
        cpu=0.0,
    )
    measured = row(setting, 0, ALL_REDUCE, [answer] * setting.num_workers)
    assert measured.samples_per_s == pytest.approx(16 * setting.num_pipelines)


def test_ratios_are_taken_between_rounds_with_the_same_seed() -> None:
    rows = [_row("all_reduce", 0, 1.0), _row("all_reduce", 1, 10.0), _row("age", 0, 3.0)]
    assert ratio_to(rows, "dp_b", "age", "all_reduce") == 3.0
    rows.append(_row("age", 1, 50.0))
    assert ratio_to(rows, "dp_b", "age", "all_reduce") == 4.0
    rows.append(_row("adaptive", 1, 60.0))
    assert best(rows, RATIOS["dp_b"]) == "adaptive"


def test_there_is_a_ratio_for_each_bar_but_the_scheduler() -> None:
    rows = [
        _row(side.name, 0, 1.0, setting.name)
        for setting in FULL_SUITE.settings
        for side in setting.sides
    ]
    assert names_of(BARS) - set(ratios_of(rows)) == {"scheduler_per_s", "scheduler_p99_ms"}


def test_a_calibrated_step_is_a_tenth_all_reduce() -> None:
    setting = HOMOGENEOUS.calibrated(0.05)
    assert setting.forward + setting.backward == pytest.approx(0.45)


def _row(side: str, number: int, samples_per_s: float, setting: str = "dp_b") -> SyncRow:
    return SyncRow(
        setting=setting,
        round=number,
        side=side,
        samples_per_s=samples_per_s,
        consensus_distance=0.0,
        loss=0.0,
        group_size=3.0,
        steps=(1, 1),
        gradient_error=0.0,
        cpu=0.0,
    )

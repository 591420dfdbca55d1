"""`bench predict --quick` runs and prints every ratio; the values are not judged."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.pipeline_job import JobTimes, StepRecord
from benchmarks.harness.report import names_of
from benchmarks.predict.bench import (
    BARS,
    PredictRow,
    RepeatBudget,
    ratios_and_figures,
    step_time,
)
from benchmarks.predict.setting import FULL
from polyrhythm.lab.commands import SwitchTiming


@pytest.mark.long
@pytest.mark.timeout(110)
def test_the_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrhythm", "bench", "predict", "--quick", "--out", "."]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "predict"
    assert set(result["ratios"]) == names_of(BARS)
    rows = json.loads((tmp_path / "predict.json").read_text())["rows"]
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in rows)


def test_three_schedules_run_with_three_policies_on_three_networks() -> None:
    kinds = {(each.schedule, each.sync.policy) for each in FULL.alternatives}
    assert len(FULL.networks) >= 3
    assert len({schedule for schedule, _ in kinds}) >= 3
    policies = {policy for _, policy in kinds}
    in_all = [p for p in policies if len([s for s, policy in kinds if policy == p]) >= 3]
    assert len(in_all) >= 3
    assert len({each.name for each in FULL.alternatives}) == len(FULL.alternatives)


def test_a_step_of_all_pipelines_counts_the_steps_of_unequal_pipelines_together() -> None:
    ends = [[1.0, 2.0, 3.0, 4.0], [2.0, 4.5]]  # the first one is twice as fast
    assert step_time(ends, replace(FULL, num_steps=3, num_warmup=1)) == (4.5 - 2.0) / 2


def test_a_step_is_recorded_once_all_stages_have_ended_it() -> None:
    record = StepRecord(num_stages=2, num_pipelines=2)
    for rank, step, moment in ((0, 0, 1.0), (1, 0, 2.0), (0, 1, 3.0), (3, 0, 4.0)):
        record.add(rank, step, moment)
    assert record.ends() == [[2.0], []]
    assert record.num_ended() == [1, 0]


ROW = PredictRow(
    network="a", alternative="x", predicted=1.0, measured=1.0, again=None, disturbed=False
)


def test_only_pairs_on_one_network_that_are_no_tie_are_ranked() -> None:
    rows = [
        ROW,
        replace(ROW, predicted=2.0, measured=2.0),
        replace(ROW, predicted=1.5, measured=2.01, again=2.05),  # a tie with the one before
        replace(ROW, predicted=0.5, measured=3.0),  # predicted to be the fastest, and the slowest
        replace(ROW, network="b", predicted=9.0, measured=9.0),
    ]
    ratios, figures = ratios_and_figures(rows)
    assert (figures["pairs"], figures["ties"]) == (6, 1)
    assert math.isclose(ratios["ranking"], 2 / 5)
    assert math.isclose(figures["ranking_with_ties"], 2 / 6)
    assert ratios["median_error"] == 0.0
    assert math.isclose(ratios["worst_error"], 2.5 / 3)
    assert math.isclose(figures["worst_spread"], 0.04 / 2.01)


def job(milliseconds: float) -> JobTimes:
    late = milliseconds / 1e3
    switch_timing = SwitchTiming(late_p50=0.0, late_p99=late, late_max=late, busy=0.1)
    return JobTimes(ends=((milliseconds,),), switch_timing=switch_timing)


class Runs:
    """Runs of a job, each late by so many milliseconds, on a clock that only they advance."""

    def __init__(self) -> None:
        self.now, self.duration, self.left = 0.0, 1.0, list[float]()

    def clock(self) -> float:
        return self.now

    def run(self) -> JobTimes:
        self.now += self.duration
        return job(self.left.pop(0))

    def least_late(self, budget: RepeatBudget, *late: float, duration: float = 1.0) -> JobTimes:
        self.left, self.duration = list(late), duration
        return budget.least_late(self.run)


def test_a_run_on_time_is_not_repeated() -> None:
    runs = Runs()
    assert runs.least_late(RepeatBudget(60, runs.clock), 1.0, 0.5) == job(1.0)
    assert runs.left == [0.5]


def test_late_runs_are_repeated_until_one_is_on_time() -> None:
    runs = Runs()
    assert runs.least_late(RepeatBudget(60, runs.clock), 9.0, 3.0, 1.5, 0.1) == job(1.5)
    assert runs.left == [0.1]


def test_of_five_late_runs_the_least_late_one_counts() -> None:
    runs = Runs()
    late = (9.0, 7.0, 3.0, 8.0, 5.0, 1.0)
    assert runs.least_late(RepeatBudget(60, runs.clock), *late) == job(3.0)
    assert runs.left == [1.0], "there is no sixth try"


def test_all_runs_share_one_budget() -> None:
    runs = Runs()
    budget = RepeatBudget(5, runs.clock)
    assert runs.least_late(budget, 9.0, 0.1, duration=2.0) == job(0.1)
    assert runs.least_late(budget, 9.0, 0.1, duration=4.0) == job(9.0), "3 s are left"
    assert runs.left == [0.1]
    assert runs.least_late(budget, 9.0, 0.1, duration=3.0) == job(0.1), "exactly one run long"

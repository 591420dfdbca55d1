"""The benchmark of predictions runs and names what is asked of it; its figures are not judged."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.predict.bench import AT_LEAST, AT_MOST
from benchmarks.predict.figures import figures
from benchmarks.predict.rows import Row
from benchmarks.predict.runs import step_time
from benchmarks.predict.setting import FULL
from benchmarks.sleeping.record import Record


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
    assert set(result["ratios"]) == {*AT_MOST, *AT_LEAST}
    rows = json.loads((tmp_path / "predict.json").read_text())["rows"]
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in rows)


def test_three_schedules_and_policies_meet_on_three_networks() -> None:
    kinds = {(each.schedule, each.averaging.policy) for each in FULL.alternatives}
    assert len(FULL.networks) >= 3
    assert len({schedule for schedule, _ in kinds}) >= 3
    policies = {policy for _, policy in kinds}
    in_all = [p for p in policies if len([s for s, policy in kinds if policy == p]) >= 3]
    assert len(in_all) >= 3
    assert len({each.name for each in FULL.alternatives}) == len(FULL.alternatives)


def test_a_step_is_over_when_all_pipelines_together_have_made_as_many() -> None:
    ends = [[1.0, 2.0, 3.0, 4.0], [2.0, 4.5]]  # the first one is twice as fast
    assert step_time(ends, num_steps=3, num_left_out=1) == (4.5 - 2.0) / 2


def test_a_step_is_recorded_once_all_stages_have_ended_it() -> None:
    record = Record(num_stages=2, num_pipelines=2)
    for rank, step, moment in ((0, 0, 1.0), (1, 0, 2.0), (0, 1, 3.0), (3, 0, 4.0)):
        record.add(rank, step, moment)
    assert record.ends() == [[2.0], []]
    assert record.num_ended() == [1, 0]


ROW = Row(network="a", alternative="x", predicted=1.0, measured=1.0, again=None, disturbed=False)


def test_pairs_are_ranked_on_one_network_and_ties_are_told() -> None:
    rows = [
        ROW,
        replace(ROW, predicted=2.0, measured=2.0),
        replace(ROW, predicted=1.5, measured=2.01, again=2.05),  # a tie with the one before
        replace(ROW, predicted=0.5, measured=3.0),  # predicted to be the fastest, and the slowest
        replace(ROW, network="b", predicted=9.0, measured=9.0),
    ]
    found = figures(rows)
    assert (found.num_pairs, found.num_ties) == (6, 1)
    assert math.isclose(found.ranking, 2 / 5)
    assert math.isclose(found.ranking_with_ties, 2 / 6)
    assert found.median_error == 0.0
    assert math.isclose(found.worst_error, 2.5 / 3)
    assert math.isclose(found.worst_spread, 0.04 / 2.01)

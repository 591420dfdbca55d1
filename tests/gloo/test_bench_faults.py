"""`bench faults`: its figures follow from the ends of steps; the quick one runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.bench import BARS, _split
from benchmarks.faults.job import Outcome
from benchmarks.harness.report import names_of
from tests.gloo.commands import run_forked


def test_steps_are_divided_at_the_first_one_of_the_second_epoch() -> None:
    ends = {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 7.0, 5: 9.0, 6: 11.0}
    events: list[dict[str, Any]] = [
        {"event": "Begin", "committed": None},
        {"event": "Begin", "committed": 3},
    ]
    outcome = Outcome(ends={1: ends}, faults_at=[3.5], losses={1: 0.5}, events=events)
    before, later = _split(outcome)
    assert (before, later) == ([1.0, 1.0], [2.0, 2.0])  # without the step that was cut


@pytest.mark.long
def test_the_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    done = run_forked("bench", "faults", "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ratios"].keys() == names_of(BARS)
    assert found["ratios"]["soak_lost"] == found["ratios"]["soak_hangs"] == 0

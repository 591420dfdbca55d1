"""`bench plan --quick` runs and prints every ratio; the values are not judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.report import names_of
from benchmarks.plan.bench import BARS


@pytest.mark.long
@pytest.mark.timeout(110)
def test_the_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrhythm", "bench", "plan", "--quick", "--out", "."]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "plan"
    assert set(result["ratios"]) == names_of(BARS)
    assert all(ratio >= 0 for ratio in result["ratios"].values())
    assert json.loads((tmp_path / "plan.json").read_text())["rows"]

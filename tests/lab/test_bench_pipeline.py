"""The benchmark of pipelines runs and reports every ratio; its figures are not judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.report import names_of
from benchmarks.pipeline.bench import BARS


@pytest.mark.long
@pytest.mark.timeout(110)
def test_the_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrhythm", "bench", "pipeline", "--quick", "--out", "."]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "pipeline"
    assert set(result["ratios"]) == names_of(BARS)
    assert all(ratio >= 0 for ratio in result["ratios"].values())
    rows = json.loads((tmp_path / "pipeline.json").read_text())["rows"]
    assert {row["side"] for row in rows} == {"torch", "1f1b", "auto", "kfkb:2"}

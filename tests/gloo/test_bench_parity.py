"""`bench parity --quick` runs each of its parts, and no part finds a difference."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.report import names_of
from benchmarks.parity.bench import BARS


@pytest.mark.long
@pytest.mark.timeout(240)
def test_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrhythm", "bench", "parity", "--quick", "--out", "."]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=230, check=False
    )
    assert done.returncode == 0, done.stderr
    ratios = json.loads(done.stdout.splitlines()[-1])["ratios"]
    assert set(ratios) == names_of(BARS)
    growth = ratios.pop("bytes_per_step")  # over too few steps to mean anything
    assert isinstance(growth, float)
    assert [
        bar.name for bar in BARS if bar.name in ratios and not bar.is_met(ratios[bar.name])
    ] == []
    cases = json.loads((tmp_path / "parity.json").read_text())["rows"]
    assert {"encoder on 1x2", "encoder on 1x2, then 2x1"} <= {row["case"] for row in cases}

"""`bench architectures --quick` splits a model with a plan, one without, and refuses one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.architectures.bench import BARS
from benchmarks.harness.report import names_of


@pytest.mark.long  # half a minute of imports; test_find_split.py covers what it counts
@pytest.mark.timeout(110)
def test_quick_benchmark_counts_equal_and_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrhythm", "bench", "architectures", "--quick"]
    done = subprocess.run(
        [*command, "--out", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ratios = json.loads(done.stdout.splitlines()[-1])["ratios"]
    assert set(ratios) == names_of(BARS)
    rows = json.loads((tmp_path / "architectures.json").read_text())["rows"]
    assert {row["name"]: row["result"] for row in rows} == {
        "LlamaConfig": "equal",
        "GPT2Config": "equal",
        "T5Config": "refused",
    }
    assert ratios["architectures_silent"] == 0

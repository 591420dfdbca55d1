"""`bench lab --quick` runs and prints every ratio; the values are not judged."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import benchmarks
from benchmarks.harness.report import names_of
from benchmarks.lab.bench import BARS


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    text = io.StringIO()
    benchmarks.run("lab", quick=True, out=tmp_path, console=Console(file=text, width=80))
    *table, last = text.getvalue().splitlines()
    result = json.loads(last)
    assert result["bench"] == "lab"
    assert set(result["ratios"]) == names_of(BARS)
    assert all(value >= 0 for value in result["ratios"].values())
    assert result["figures"]["rejected_rounds"] >= 0
    assert {"10 Mbit/s, 1 ms", "50 Mbit/s, 20 ms"} <= {line[:16].rstrip() for line in table}
    rows = json.loads((tmp_path / "lab.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"grid", "ring16"}

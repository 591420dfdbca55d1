"""The benchmark of the lab runs; what it finds on a busy machine is not judged here."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import benchmarks


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_quick_benchmark_ends_with_every_figure_as_json(tmp_path: Path) -> None:
    text = io.StringIO()
    benchmarks.run("lab", quick=True, out=tmp_path, console=Console(file=text, width=80))
    *table, last = text.getvalue().splitlines()
    found = json.loads(last)
    assert found["bench"] == "lab"
    assert set(found["ratios"]) == {
        "bandwidth_error",
        "rtt_error",
        "ring16_error",
        "switch_limit_mbps",
    }
    assert all(value >= 0 for value in found["ratios"].values())
    assert found["figures"]["rejected_rounds"] >= 0
    assert any("ring16_error" in line for line in table)
    rows = json.loads((tmp_path / "lab.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"grid", "ring16"}

"""The benchmark of averages measures every method in every case, and its means are right."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.average.bench import BARS, FULL, QUICK
from benchmarks.average.worker import (
    DESTROYED_GROUP,
    FRESH_GROUP,
    METHODS,
    AverageSetting,
    trials,
)

RATIOS = {
    "fresh_vs_pairs_4",
    "cached_vs_pairs_4",
    "fresh_vs_pairs_16",
    "cached_vs_pairs_16",
    "cache_hits",
}


@pytest.mark.long
@pytest.mark.timeout(100)
def test_the_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrhythm", "bench", "average", "--quick", "--out", "."]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "average"
    assert set(result["ratios"]) == {bar.name for bar in BARS} == RATIOS
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert result["ratios"]["cache_hits"] < 1
    rows = json.loads((tmp_path / "average.json").read_text())["rows"]
    samples = [row for row in rows if "method" in row]
    assert all(row["seconds"] > 0 for row in samples)
    measured = Counter((row["network"], row["method"], row["group_size"]) for row in samples)
    assert measured == {
        ("local", method, size): QUICK.num_rounds
        for method in (*METHODS, DESTROYED_GROUP)
        for size in QUICK.group_sizes
    }
    fresh, destroyed = (
        [row["seconds"] for row in samples if row["method"] == method]
        for method in (FRESH_GROUP, DESTROYED_GROUP)
    )
    assert all(before < after for before, after in zip(fresh, destroyed, strict=True))
    for cache in (row for row in rows if "hits" in row):
        assert 0 <= cache["hits"] <= cache["hits_unbounded"] < 1


@pytest.mark.parametrize("setting", [FULL, QUICK])
def test_every_method_has_the_same_groups_and_all_workers_know_them(
    setting: AverageSetting,
) -> None:
    planned = list(trials(setting))
    assert planned == list(trials(setting))
    assert [trial.number for trial in planned] == list(range(len(planned)))
    groups = {
        method: sorted((t.round, t.members) for t in planned if t.method == method)
        for method in METHODS
    }
    assert all(cases == groups[METHODS[0]] for cases in groups.values())
    assert {len(trial.members) for trial in planned} == {4, setting.num_workers}
    assert len({trial.round for trial in planned}) == setting.num_rounds + 1

"""The benchmark of averages measures every way in every case, and its means are right."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.average.bench import FULL, QUICK
from benchmarks.average.worker import DESTROYED_GROUP, FRESH_GROUP, WAYS, Plan, trials

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
    assert set(result["ratios"]) == RATIOS
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert result["ratios"]["cache_hits"] < 1
    rows = json.loads((tmp_path / "average.json").read_text())["rows"]
    samples = [row for row in rows if "way" in row]
    assert all(row["seconds"] > 0 for row in samples)
    measured = Counter((row["network"], row["way"], row["group_size"]) for row in samples)
    assert measured == {
        ("local", way, size): QUICK.num_rounds
        for way in (*WAYS, DESTROYED_GROUP)
        for size in QUICK.group_sizes
    }
    fresh, destroyed = (
        [row["seconds"] for row in samples if row["way"] == way]
        for way in (FRESH_GROUP, DESTROYED_GROUP)
    )
    assert all(before < after for before, after in zip(fresh, destroyed, strict=True))
    for cache in (row for row in rows if "hits" in row):
        assert 0 <= cache["hits"] <= cache["hits_unbounded"] < 1


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_every_way_has_the_same_groups_and_all_workers_know_them(plan: Plan) -> None:
    planned = list(trials(plan))
    assert planned == list(trials(plan))
    assert [trial.number for trial in planned] == list(range(len(planned)))
    by_way = {way: sorted((t.round, t.members) for t in planned if t.way == way) for way in WAYS}
    assert all(cases == by_way[WAYS[0]] for cases in by_way.values())
    assert {len(trial.members) for trial in planned} == {4, plan.num_workers}
    assert len({trial.round for trial in planned}) == plan.num_rounds + 1

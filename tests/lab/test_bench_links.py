"""The benchmark of new and broken links measures both in the lab, and its averages end."""

import pytest

from benchmarks.faults.links import BARS, measure_links


@pytest.mark.long
@pytest.mark.timeout(120)
def test_links_are_measured() -> None:
    found = measure_links(quick=True)
    assert set(found.ratios) == {bar.name for bar in BARS}
    assert all(ratio > 0 for ratio in found.ratios.values())
    assert all(row.value > 0 for row in found.rows)
    assert found.ratios["cold_connect"] > 1, "connections take time"
    assert not [trouble for trouble in found.troubles if "no packet" in trouble]

"""A probe inside a lab measures the described links."""

import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.write import write_cluster

pytestmark = pytest.mark.alone  # measures time

MEGABIT = 125e3
OF_LATENCY, OF_BANDWIDTH = 0.25, 0.15  # a described bandwidth counts headers too: 3.5 %


def described() -> Cluster:
    """Return a cluster with different bandwidths per direction, and equal latencies.

    A round trip cannot distinguish the latencies of two directions.
    """
    return Cluster(
        name="three sites",
        devices=tuple(Device(name=name, region=name) for name in "abc"),
        regions=("a", "b", "c"),
        latency=((0, 0.01, 0.04), (0.01, 0, 0.025), (0.04, 0.025, 0)),
        bandwidth=(
            (0, 80 * MEGABIT, 10 * MEGABIT),
            (40 * MEGABIT, 0, 5 * MEGABIT),
            (20 * MEGABIT, 8 * MEGABIT, 0),
        ),
    )


@pytest.mark.long
@pytest.mark.timeout(110)
def test_probe_measures_the_described_links(tmp_path: Path) -> None:
    write_cluster(described(), tmp_path / "described.toml")
    probe = [sys.executable, "-m", "polyrhythm", "probe", "-o", "found.toml", "--repeat", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "polyrhythm", "lab", "run", "described.toml", "--", *probe],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = Cluster.load(tmp_path / "found.toml")
    assert [device.name for device in found.devices] == ["a", "b", "c"]
    for pair in permutations("abc", 2):
        expected, link = described().link(*pair), found.link(*pair)
        assert link.latency == pytest.approx(expected.latency, rel=OF_LATENCY), pair
        assert link.bandwidth == pytest.approx(expected.bandwidth, rel=OF_BANDWIDTH), pair

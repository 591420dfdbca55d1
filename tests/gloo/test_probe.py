"""A probe as a user runs it, on loopback: every pair once, one at a time; who dies is named."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from polyrhythm.describe.cluster import Cluster
from polyrhythm.errors import PeerError
from polyrhythm.run.launch import LocalJob, Place
from polyrhythm.run.probe import probe as probing
from polyrhythm.run.probe.effort import Effort
from polyrhythm.run.probe.link import as_source, as_target
from polyrhythm.run.probe.probe import ProbeOptions, probe
from polyrhythm.run.probe.talk import Talk
from tests.gloo.test_demo import forked

pytestmark = pytest.mark.timeout(100)

QUICK = ["--seconds", "0.01", "--repeat", "3"]
WHEN = "2026-05-12T14:30:00+00:00"
EFFORT = Effort(seconds=0.005, repeat=2, patience=1, deadline=3)


def check(cluster: Cluster, num_devices: int) -> None:
    """Complete, and every number one that can be."""
    names = [device.name for device in cluster.devices]
    assert len(set(names)) == num_devices
    assert list(cluster.regions) == names
    for a, b in permutations(names, 2):
        link = cluster.link(a, b)
        assert 0 < link.latency < 10
        assert 0 < link.bandwidth < 1e12
    for matrix in (cluster.latency_spread, cluster.bandwidth_spread):
        assert [len(row) for row in matrix] == [num_devices] * num_devices
        assert all(math.isfinite(spread) and spread >= 0 for row in matrix for spread in row)
    assert cluster.devices[0].speed == 1
    for device in cluster.devices:
        assert device.flops is not None
        assert device.flops > 1e6
        assert device.speed == pytest.approx(
            device.flops / (cluster.devices[0].flops or 0), rel=0.01
        )
        assert device.memory is not None
        assert 2**20 < device.memory < 2**50


def test_local_processes_are_measured_into_a_file_that_loads(tmp_path: Path) -> None:
    done = forked("probe", "--local", "3", "-o", "here.toml", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(tmp_path / "here.toml")
    check(cluster, 3)
    assert cluster.name == "here"
    assert cluster.measured_at
    assert "3 processes on 1 machine" in cluster.source
    assert "here: 3 devices, 3 regions" in done.stdout
    assert "bandwidth, Mbit/s" in done.stdout
    assert "spread of bandwidth, %" in done.stdout
    assert f"measured at {cluster.measured_at}" in done.stdout
    assert done.stdout.endswith("written to here.toml\n")
    assert [path.name for path in tmp_path.iterdir()] == ["here.toml"]
    shown = forked("show", "cluster", "here.toml", cwd=tmp_path)
    assert shown.stdout in done.stdout


def test_torchruns_processes_are_measured_and_rank_0_speaks(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*torchrun, "-m", "polyrhythm", "probe", "--name", "two", *QUICK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(tmp_path / "cluster.toml")
    check(cluster, 2)
    assert cluster.name == "two"
    assert done.stdout.count("written to cluster.toml") == 1


def test_one_process_alone_is_a_cluster_without_links(tmp_path: Path) -> None:
    done = forked("probe", "--local", "1", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check(Cluster.load(tmp_path / "cluster.toml"), 1)


def noting(folder: Path, *, one_per_machine: bool) -> Callable[[Place], None]:
    """A probe that writes down when it was in which pair."""

    def work(place: Place) -> None:
        def note(measure: Callable[..., object]) -> Callable[..., object]:
            def measured(talk: Talk, other: int, effort: Effort) -> object:
                began = time.monotonic()
                found = measure(talk, other, effort)
                with (folder / f"{talk.rank}.txt").open("a") as file:
                    print(min(talk.rank, other), max(talk.rank, other), began, file=file, end=" ")
                    print(time.monotonic(), int(measure is as_source), file=file)
                return found

            return measured

        probing.as_source, probing.as_target = note(as_source), note(as_target)  # type: ignore[assignment]
        asked = ProbeOptions(
            cluster_name="test", measured_at=WHEN, effort=EFFORT, one_per_machine=one_per_machine
        )
        probe(place, f"d{place.rank}", asked)

    return work


@pytest.mark.parametrize("one_per_machine", [False, True])
def test_every_pair_has_its_turn_and_no_process_two_at_a_time(
    tmp_path: Path, one_per_machine: bool
) -> None:
    work = noting(tmp_path, one_per_machine=one_per_machine)
    with LocalJob(work, 4, output_folder=tmp_path / "out") as job:
        assert job.wait(80)
    turns: dict[int, list[list[float]]] = {
        rank: [list(map(float, line.split())) for line in path.read_text().splitlines()]
        for rank, path in enumerate(tmp_path / f"{rank}.txt" for rank in range(4))
    }
    for rank, own in turns.items():
        assert len(own) == 6, "three others, both directions"
        assert sum(turn[4] for turn in own) == 3, "in half of them it is the source"
        for before, after in pairwise(own):
            assert before[3] <= after[2], f"rank {rank} was in two pairs at once"
    every = sorted((turn[2], turn[3], (turn[0], turn[1])) for own in turns.values() for turn in own)
    overlap = any(
        began < ended and pair != other for (_, ended, pair), (began, _, other) in pairwise(every)
    )
    assert overlap != one_per_machine, "pairs of one machine, side by side only if they may"


def losing(folder: Path, how: signal.Signals) -> Callable[[Place], None]:
    """A probe of which rank 2 is lost in its second pair; the others write down whom they name."""

    def work(place: Place) -> None:
        num_pairs = 0

        def lost(talk: Talk, other: int, effort: Effort) -> object:
            nonlocal num_pairs
            num_pairs += 1
            if talk.rank == 2 and num_pairs == 2:
                os.kill(os.getpid(), how)
            return as_target(talk, other, effort)

        probing.as_target = lost  # type: ignore[assignment]
        try:
            asked = ProbeOptions(cluster_name="test", measured_at=WHEN, effort=EFFORT)
            probe(place, f"d{place.rank}", asked)
        except PeerError as error:
            (folder / f"{place.rank}.txt").write_text(error.peer)
            time.sleep(1)  # for the others to hear of it before the job ends

    return work


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_falls_silent_is_named_by_all(
    tmp_path: Path, how: signal.Signals
) -> None:
    others = [tmp_path / f"{rank}.txt" for rank in (0, 1, 3)]
    with LocalJob(losing(tmp_path, how), 4, output_folder=tmp_path / "out"):
        ends = time.monotonic() + 60
        while not all(path.exists() for path in others):
            assert time.monotonic() < ends, [path.name for path in others if path.exists()]
            time.sleep(0.1)
    assert [path.read_text() for path in others] == ["d2"] * 3


KILLED = """
import os, signal
from polyrhythm import cli
from polyrhythm.run.probe import probe
def die(talk, other, effort):
    os.kill(os.getpid(), signal.SIGKILL)
probe.as_target = die
cli.main(["probe", "--local", "2", "--seconds", "0.01"])
"""


def test_a_killed_process_ends_the_command_with_its_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "rank 1 was ended by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no processes to measure with"),
        (["--local", "0"], "--local 0"),
        (["--local", "65"], "1 to 64"),
        (["--local", "2", "--seconds", "0"], "--seconds 0"),
        (["--local", "2", "--deadline", "nan"], "--deadline nan"),
        (["--local", "2", "--repeat", "0"], "--repeat 0"),
        (["--local", "2", "-o", "cluster.yaml"], "ends in .toml"),
        (["--local", "2", "-o", "nowhere/cluster.toml"], "cannot be made in"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    done = forked("probe", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_local_processes_inside_of_torchruns_are_refused(tmp_path: Path) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = forked("probe", "--local", "2", cwd=tmp_path, env=torchrun)
    assert done.returncode == 2
    assert "--local 2 in a process of torchrun's" in done.stderr

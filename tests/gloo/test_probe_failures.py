"""A probe whose processes die, fail or stop ends in time, and names them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from polyrhythm.describe.sample import Sample
from polyrhythm.errors import PeerError
from polyrhythm.processes import reserve_port
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.probe import probe as probing
from polyrhythm.run.probe.link import PeerChannel, as_target
from polyrhythm.run.probe.probe import ProbeEffort, ProbeOptions, probe
from tests.gloo.commands import run_forked
from tests.grids import long_except

pytestmark = pytest.mark.timeout(100)

MEASURED_AT = "2026-05-12T14:30:00+00:00"
LOCAL_PROBE = ["probe", "--local", "2", "--seconds", "0.01"]
SHORT_EFFORT = ProbeEffort(seconds=0.005, repeat=2, pair_timeout=1, timeout=4)


def probe_losing_rank(
    folder: Path, lost: int, signal_number: signal.Signals
) -> Callable[[DistContext], None]:
    """Return a probe that loses a rank in its second pair; others record whom they name."""

    def work(ctx: DistContext) -> None:
        num_pairs = 0

        def lose_in_second_pair(channel: PeerChannel, other: int, effort: ProbeEffort) -> object:
            nonlocal num_pairs
            num_pairs += 1
            if channel.rank == lost and num_pairs == 2:
                os.kill(os.getpid(), signal_number)
            return as_target(channel, other, effort)

        probing.as_target = lose_in_second_pair  # type: ignore[assignment]
        try:
            options = ProbeOptions(
                cluster_name="test", measured_at=MEASURED_AT, effort=SHORT_EFFORT
            )
            probe(ctx, f"d{ctx.rank}", options)
        except PeerError as error:
            (folder / f"{ctx.rank}.txt").write_text(error.peer)
            time.sleep(1)  # the others must read the loss before the job ends

    return work


@pytest.mark.parametrize("lost", long_except([0, 2], 1))
@pytest.mark.parametrize("signal_number", long_except([signal.SIGKILL, signal.SIGSTOP], 0))
def test_dead_or_stopped_process_is_named_by_all(
    tmp_path: Path, lost: int, signal_number: signal.Signals
) -> None:
    others = [tmp_path / f"{rank}.txt" for rank in range(4) if rank != lost]
    with LocalJob(
        probe_losing_rank(tmp_path, lost, signal_number), 4, output_folder=tmp_path / "out"
    ):
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in others):
            assert time.monotonic() < deadline, [path.name for path in others if path.exists()]
            time.sleep(0.1)
    assert [path.read_text() for path in others] == [f"d{lost}"] * 3


# Forked, so that torch is imported once; a fork exits through its interpreter, too.
SILENT_STORE = """
import os, signal, sys
from polyrhythm import cli
from polyrhythm.run.probe import probe
def stop(talk, other, effort):
    os.kill(os.getpid(), signal.SIGSTOP)
forks = [os.fork()]
if forks[0]:
    forks.append(os.fork())
if all(forks):
    print(os.waitstatus_to_exitcode(os.waitpid(forks[1], 0)[1]), flush=True)
    os.kill(forks[0], signal.SIGKILL)
    os.waitpid(forks[0], 0)
    sys.exit()
os.environ["RANK"] = str(len(forks) - 1)
if len(forks) == 1:
    probe.as_source = stop
cli.main(["probe", "--seconds", "0.01", "--timeout", "2", "--pair-timeout", "1"])
"""


@pytest.mark.long
def test_interpreter_exits_when_store_does_not_answer(tmp_path: Path) -> None:
    reserved = reserve_port()
    address, port = reserved.getsockname()
    ctx = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    with (
        reserved,
        subprocess.Popen(
            [sys.executable, "-c", SILENT_STORE],
            cwd=tmp_path,
            env={**os.environ, **ctx, "GLOO_SOCKET_IFNAME": "lo", "POLYRHYTHM_DEVICE": "d"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as job,
    ):
        try:
            printed, error = job.communicate(timeout=60)
        finally:
            if job.returncode is None:
                os.killpg(job.pid, signal.SIGKILL)
    assert printed.splitlines()[-1] == "1", error  # -6 after an abort
    assert "error: lost d (rank 0) during the round trip" in error
    assert "Traceback" not in error


def stop(channel: PeerChannel, other: int, effort: ProbeEffort) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_both_sides() -> None:
    probing.as_source = probing.as_target = stop  # type: ignore[assignment]
    probing.device_flops = lambda *_, **__: Sample(1.0, 0.0)  # takes long on a busy machine
    ProbeEffort.stall_timeout = 10.0  # type: ignore[assignment, method-assign]


@pytest.mark.long
def test_command_exits_when_all_processes_are_stopped(tmp_path: Path) -> None:
    done = run_forked("probe", "--local", "2", cwd=tmp_path, before=stop_both_sides)
    assert done.returncode == 1
    assert "error: lost all processes during measuring links: round 1 of 2" in done.stderr


def raise_in_target() -> None:
    def fail(channel: PeerChannel, other: int, effort: ProbeEffort) -> None:
        print("before the failure")
        raise KeyError("the failure")

    probing.as_target = fail  # type: ignore[assignment]


def test_output_tail_of_failed_process_is_shown_without_deleted_log_path(tmp_path: Path) -> None:
    done = run_forked(*LOCAL_PROBE, cwd=tmp_path, before=raise_in_target)
    assert done.returncode == 1
    assert "rank 1 failed: KeyError: 'the failure'" in done.stderr
    assert "before the failure" in done.stderr
    assert ".log" not in done.stderr


def kill_target() -> None:
    def die(channel: PeerChannel, other: int, effort: ProbeEffort) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    probing.as_target = die  # type: ignore[assignment]


def test_killed_process_is_named_by_the_command(tmp_path: Path) -> None:
    done = run_forked(*LOCAL_PROBE, cwd=tmp_path, before=kill_target)
    assert done.returncode == 1, done.stderr
    assert "rank 1 was ended by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []

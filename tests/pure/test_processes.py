"""A child reports why it ended, and ends with all processes that it started."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.processes import Child, end_all, reserve_port, wait_for_all, wait_for_any


def test_reserved_ports_are_given_to_servers_that_ask_for_them_alone() -> None:
    with ExitStack() as stack:
        addresses = {stack.enter_context(reserve_port()).getsockname() for _ in range(200)}
        for _ in range(4000):  # of 28,000 ports: without a reservation 28 would be the same
            with socket.create_server(("127.0.0.1", 0)) as other:
                assert other.getsockname() not in addresses
        for address in addresses:
            with socket.create_server(address), socket.create_connection(address, 5) as client:
                assert client.getsockname() not in addresses


def fail() -> None:
    raise ZeroDivisionError("on purpose")


def refuse() -> None:
    raise LaunchError("no GPU", expected="one", fix="use the CPU")


def lose_a_peer() -> None:
    raise PeerError("s1p0", action="receiving F0", waited=1.0, cause="closed")


def leave() -> None:
    sys.exit(7)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("work", "status", "reason"),
    [
        (lambda: None, 0, "ended well"),
        (fail, 1, "failed: ZeroDivisionError: on purpose"),
        (refuse, 222, "refused: no GPU\n  expected: one\n  fix: use the CPU"),
        (lose_a_peer, 223, "failed: PeerError: lost s1p0"),
        (leave, 7, "failed: exit status 7"),
        (be_killed, -9, "was ended by SIGKILL"),
    ],
)
def test_exit_status_gives_the_reason(
    tmp_path: Path, work: Callable[[], None], status: int, reason: str
) -> None:
    child = Child(work, output=tmp_path / "out.txt")
    assert child.wait(20) == status
    assert child.reason.startswith(reason)


@pytest.mark.timeout(30)
def test_an_ended_child_leaves_no_descriptor_open() -> None:
    """Whether or not its owner reads the error that ended it."""
    before = len([*Path("/proc/self/fd").iterdir()])
    for work in (lambda: None, lose_a_peer):
        child = Child(work, keeps_failure=True)
        assert child.wait(20) is not None
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert "lost s1p0" in child.failure.summary


@pytest.mark.timeout(30)
def test_output_of_the_child_and_of_its_programs_goes_to_the_file(tmp_path: Path) -> None:
    def talk() -> None:
        print("from Python", flush=True)
        subprocess.run(["sh", "-c", "echo from a program; echo to stderr >&2"], check=True)

    child = Child(talk, output=tmp_path / "out.txt")
    assert child.output is not None
    assert child.output.exists(), "the file exists at once"
    assert child.wait(20) == 0
    assert child.output.read_text().splitlines() == ["from Python", "from a program", "to stderr"]


@pytest.mark.timeout(30)
def test_ending_a_child_kills_its_descendants() -> None:
    child = Child(lambda: subprocess.run(["sleep", "1000"], check=False))
    ends = time.monotonic() + 20
    while not (family := psutil.Process(child.pid).children(recursive=True)):
        assert time.monotonic() < ends
        time.sleep(0.01)
    end_all([child])
    assert child.status == -signal.SIGKILL
    assert psutil.wait_procs(family, timeout=10)[1] == []
    end_all([child])  # a second call is harmless


@pytest.mark.timeout(30)
def test_child_can_be_ended_before_it_starts() -> None:
    for _ in range(20):
        child = Child(lambda: time.sleep(1000))
        end_all([child])
        assert child.status == -signal.SIGKILL


@pytest.mark.timeout(30)
def test_waiting_is_bounded_and_notices_the_first_and_the_last() -> None:
    slow, quick = Child(lambda: time.sleep(1000)), Child(lambda: None)  # a new one reaps others
    try:
        wait_for_any([quick, slow], 20)
        assert (quick.wait(20), slow.status) == (0, None)
        assert not wait_for_all([quick, slow], 0.1)
        assert slow.reason == "still runs"
    finally:
        end_all([slow])
    assert wait_for_all([quick, slow], 0.1)
    wait_for_any([quick, slow], 20)  # no child runs: returns at once


@pytest.mark.timeout(30)
def test_wait_for_any_returns_for_an_unseen_exit() -> None:
    slow, quick = Child(lambda: time.sleep(1000)), Child(lambda: None)  # a new one reaps others
    try:
        while psutil.Process(quick.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        wait_for_any([quick, slow], 1000)
        assert quick.status == 0
        assert slow.status is None
    finally:
        end_all([quick, slow])


class Ending:
    """Writes the process in which it is collected, as one that waits for a thread would wait."""

    def __init__(self, file: Path) -> None:
        self.itself, self.file = self, file

    def __del__(self) -> None:
        self.file.write_text(str(os.getpid()))


def test_child_does_not_collect_objects_of_its_owner(tmp_path: Path) -> None:
    gc.disable()
    try:
        Ending(tmp_path / "owners")

        def work() -> None:
            assert gc.isenabled()
            Ending(tmp_path / "childs")
            gc.collect()

        assert Child(work).wait(20) == 0
        assert [path.name for path in tmp_path.iterdir()] == ["childs"]
        assert not gc.isenabled(), "as before the fork"
    finally:
        gc.enable()

"""A lab owns its processes, files and names: nothing is left, and clients cannot break it."""

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from polyrhythm.describe.scenario import Join, Kill, LinkChange, Scenario
from polyrhythm.errors import DescriptionError, LabError
from polyrhythm.lab import control, namespace
from polyrhythm.lab.host_state import namespace_id, namespace_pids
from polyrhythm.lab.lab import Lab
from polyrhythm.processes import BAD_INPUT, Child, end_all
from tests.lab.hosts import cluster, echo, measure, namespaces, round_trips

OWNER = """
import sys
import time
from tests.lab.hosts import cluster, sleep_with_a_child
from polyrhythm.lab.lab import Lab
with Lab(cluster(3), name=sys.argv[1]) as lab:
    for host in lab.hosts:
        lab.spawn(host, sleep_with_a_child)
    print("up", flush=True)
    time.sleep(1000)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_owner_is_ended(ending: signal.Signals) -> None:
    name = f"test-{os.getpid()}-{ending.value}"
    with (
        ExitStack() as stack,
        subprocess.Popen(
            [sys.executable, "-c", OWNER, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as owner,
    ):
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        deadline = time.monotonic() + 30
        while len(family := psutil.Process(owner.pid).children(recursive=True)) < 7:
            assert time.monotonic() < deadline, (
                "a switch, and on three hosts a process with a child"
            )
            time.sleep(0.05)
        own = Path("/proc/self/ns/net").stat().st_ino
        hosts = stack.enter_context(namespaces(family)) - {own}
        assert len(hosts) == 3
        assert control.socket_path(name).exists()
        owner.send_signal(ending)
        owner.wait(20)
        assert psutil.wait_procs(family, timeout=20)[1] == []
        assert not any(namespace_pids(host) for host in hosts)
    assert not control.socket_path(name).exists()


@pytest.mark.timeout(60)
def test_two_labs_need_different_names_and_run_concurrently(tmp_path: Path) -> None:
    with Lab(cluster(2), name="twin") as first:
        with pytest.raises(LabError, match="'twin' is running"):
            Lab(cluster(2), name="twin").__enter__()
        with Lab(cluster(2)) as second:
            for lab in (first, second):
                lab.spawn("b", echo)
                assert "lost" not in measure(lab, tmp_path, "a", "b", 1)
    with Lab(cluster(2), name="twin"):
        assert "twin" in control.running_labs()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lab(cluster(2), name="no/slash"), "'no/slash'"),
        (lambda: Lab(cluster(2), Scenario(name="x", kill=(Kill(device="z", at=1),))), "'z'"),
        (lambda: Lab(cluster(2), Scenario(name="x", join=(Join(device="z", at=1),))), "'z'"),
        (
            lambda: Lab(
                cluster(2),
                Scenario(name="x", link=(LinkChange(at=0, source="a", target="z", up=False),)),
            ),
            "'z'",
        ),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(make: Callable[[], Lab], message: str) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises((LabError, DescriptionError), match=message), make():
        pass
    assert psutil.Process().num_fds() == before


@pytest.mark.timeout(60)
def test_unknown_host_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with Lab(cluster(2)) as lab, pytest.raises(LabError, match="unknown host 'aa'"):
        lab.spawn("aa", echo)


@pytest.mark.timeout(60)
def test_dead_switch_is_reported_without_waiting() -> None:
    with Lab(cluster(2)) as lab:
        assert lab._switch is not None
        end_all([lab._switch])
        with pytest.raises(LabError, match="is gone"):
            lab.report()


@pytest.mark.timeout(60)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop privileges")
@pytest.mark.parametrize("may_open", [True, False])
def test_unprivileged_lab_works_rootless_or_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_open: bool
) -> None:
    importlib.import_module("pyroute2.iproute")  # unreadable for the other user

    def run_lab_as_nobody() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        # As for any program of that user: it owns its files in /proc.
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE
        with Lab(cluster(2)) as lab:
            lab.spawn("b", echo)
            pinging = lab.spawn("a", round_trips, lab.address("b"), 3)
            assert pinging.wait(20) == 0
            print("up")

    with tempfile.TemporaryDirectory() as labs:
        os.chown(labs, 65534, 65534)
        device = Path(labs, "tun")
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(10, 200))
        device.chmod(0o666 if may_open else 0o600)
        monkeypatch.setattr(namespace, "TUN", str(device))
        monkeypatch.setattr(control, "FOLDER", Path(labs))
        child = Child(run_lab_as_nobody, output=tmp_path / "out.txt")
        assert child.wait(30) is not None
    text = (tmp_path / "out.txt").read_text()
    if may_open:
        assert child.status == 0, text
        assert "lost" not in text
        assert text.split()[-1] == "up"
    else:
        assert child.status == BAD_INPUT, text
        assert "Permission denied" in text
        assert "polyrhythm doctor" in text


@pytest.mark.timeout(60)
def test_a_client_that_does_not_read_cannot_stop_the_switch() -> None:
    with Lab(cluster(4)) as lab, socket.socket(socket.AF_UNIX) as rude:
        rude.connect(str(control.socket_path(lab.name)))
        rude.setblocking(False)
        for command in (
            b'{"type":"GetHosts"}\n' * 5000,
            b"x" * (3 << 20),
            b'{"type":"nonsense"}\n',
        ):
            with contextlib.suppress(OSError):
                rude.send(command)
            assert lab.report().elapsed > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "command",
    [
        b'{"type":"KillHost","host":77}',
        b'{"type":"ChangeLinks","pairs":[[0,1]],"bandwidth":0}',
        b'{"type":"ChangeLinks","pairs":[[0,9]],"latency":1,"at":1e12}',
        b'{"type":"OwnProcess","pid":99999999999,"host":0}',
        b"nonsense",
    ],
)
def test_invalid_command_is_refused(command: bytes) -> None:
    with Lab(cluster(2)) as lab, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(control.socket_path(lab.name)))
        client.sendall(command + b"\n")
        assert b"refused" in client.recv(10_000)
        assert lab.report().elapsed > 0, "the switch still replies"


@pytest.mark.timeout(60)
def test_all_processes_on_a_host_end_with_the_lab() -> None:
    with Lab(cluster(2)) as lab:
        stray = "import subprocess, time; subprocess.Popen(['sleep', '1000'], process_group=0)"
        lab.run("a", [sys.executable, "-c", f"{stray}; time.sleep(1000)"])
        deadline = time.monotonic() + 20
        while len(inside := namespace_pids(namespace_id(lab._network[0].namespace))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        processes = [psutil.Process(pid) for pid in inside]
    assert psutil.wait_procs(processes, timeout=10)[1] == []


@pytest.mark.timeout(60)
def test_two_labs_of_one_process_end_at_once_and_leave_no_socket() -> None:
    with Lab(cluster(2)) as first, Lab(cluster(2)) as second:
        first.spawn("a", time.sleep, 1000)
        names = [first.name, second.name]
        switches = [first._switch, second._switch]
    assert [switch.status for switch in switches if switch] == [0, 0], "none had to be killed"
    assert not any(control.socket_path(name).exists() for name in names)


@pytest.mark.timeout(60)
def test_an_interrupted_start_ends_at_once_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Lab._start_switch

    def interrupted(lab: Lab, *sockets: socket.socket) -> None:
        real(lab, *sockets)
        raise KeyboardInterrupt

    monkeypatch.setattr(Lab, "_start_switch", interrupted)
    lab = Lab(cluster(2))
    with pytest.raises(KeyboardInterrupt), lab:
        pass
    assert lab._switch is not None
    assert lab._switch.status == 0, "it did not have to be killed"
    assert psutil.Process().children() == []
    assert not control.socket_path(lab.name).exists()


@pytest.mark.timeout(60)
def test_only_one_of_many_claims_of_a_name_succeeds() -> None:
    def claim() -> None:
        with control.claim("contested"):
            time.sleep(1000.0)

    claims = [Child(claim) for _ in range(8)]
    try:
        deadline = time.monotonic() + 30
        while (statuses := [child.status for child in claims]).count(None) > 1:
            assert time.monotonic() < deadline, statuses
            time.sleep(0.05)
    finally:
        end_all(claims)
    control.socket_path("contested").unlink(missing_ok=True)
    assert sorted(map(str, statuses)) == [*[str(BAD_INPUT)] * 7, "None"]


@pytest.mark.timeout(60)
def test_many_sequential_processes_leak_no_descriptors() -> None:
    with Lab(cluster(2)) as lab:
        assert lab._switch is not None
        counts = []
        for _ in range(3):
            for _ in range(10):
                assert lab.spawn("a", bool).wait(20) == 0
            counts.append((psutil.Process().num_fds(), psutil.Process(lab._switch.pid).num_fds()))
    assert counts[0] == counts[2]

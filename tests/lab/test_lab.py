"""The lab: real TCP over links as described, changes and faults on a clock, nothing left behind."""

import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import Join, Kill, LinkChange, Pause, Scenario
from polyrhythm.errors import DescriptionError, LabError
from polyrhythm.lab import control
from polyrhythm.lab.lab import Lab
from polyrhythm.processes import BAD_INPUT, Child, end_all

PORT = 5000


def cluster(num_hosts: int = 3, *, latency: float = 0.02, bandwidth: float = 2.5e6) -> Cluster:
    """Hosts a, b, c, ...: every pair alike."""
    names = tuple("abcdefghijklmnop"[:num_hosts])
    return Cluster(
        name="test",
        devices=tuple(Device(name=name, region=name) for name in names),
        regions=names,
        latency=tuple((latency,) * num_hosts for _ in names),
        bandwidth=tuple((bandwidth,) * num_hosts for _ in names),
    )


def echo() -> None:
    """Send every datagram back."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", PORT))
        while True:
            data, sender = server.recvfrom(2000)
            server.sendto(data, sender)


def round_trips(address: str, count: int, patience: float = 1.0) -> None:
    """Print one line per datagram: the seconds until it came back, or 'lost'."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(patience)
        client.connect((address, PORT))
        for number in range(count):
            start = time.perf_counter()
            client.send(str(number).encode())
            try:
                while client.recv(2000) != str(number).encode():
                    pass
                print(time.perf_counter() - start)
            except OSError:
                print("lost")
            time.sleep(0.05)


def measure(lab: Lab, tmp_path: Path, source: str, target: str, count: int = 5) -> list[str]:
    output = tmp_path / f"{source}{target}{time.monotonic()}.txt"
    pinging = lab.spawn(source, round_trips, lab.address(target), count, output=output)
    assert pinging.wait(30) == 0, pinging.reason
    return output.read_text().split()


def median(times: list[str]) -> float:
    return float(sorted(times, key=float)[len(times) // 2])


@pytest.mark.timeout(60)
def test_a_round_trip_takes_both_latencies(tmp_path: Path) -> None:
    with Lab(cluster(latency=0.05)) as lab:
        lab.spawn("b", echo)
        slow = median(measure(lab, tmp_path, "a", "b"))
        for change in (True, False):  # only one direction becomes quick
            lab.change(LinkChange(at=0, source="a", target="b", latency=0.001, one_way=change))
            if change:
                half = median(measure(lab, tmp_path, "a", "b"))
        quick = median(measure(lab, tmp_path, "a", "b"))
    assert slow >= 0.1
    assert 0.3 < half / slow < 0.8
    assert quick < half / 2


@pytest.mark.timeout(60)
def test_a_lost_link_loses_and_another_one_does_not(tmp_path: Path) -> None:
    with Lab(cluster()) as lab:
        lab.spawn("b", echo)
        lab.spawn("c", echo)
        lab.change(LinkChange(at=0, source="a", target="b", up=False))
        assert measure(lab, tmp_path, "a", "b", 2) == ["lost", "lost"]
        assert "lost" not in measure(lab, tmp_path, "a", "c")
        lost = {(p.source, p.target): p.drops for p in lab.report().pairs}
        assert lost[0, 1] == 2
        assert lost[0, 2] == 0
        lab.change(LinkChange(at=0, source="a", target="b", up=True))
        assert "lost" not in measure(lab, tmp_path, "a", "b")


def send_all(address: str, num_bytes: int) -> None:
    with socket.create_connection((address, PORT), timeout=20) as connection:
        connection.sendall(bytes(num_bytes))


def receive_all() -> None:
    """Print the seconds from the first byte to the last."""
    with socket.create_server(("", PORT)) as server:
        server.settimeout(20)
        connection, _ = server.accept()
        connection.settimeout(20)
        assert connection.recv(1)
        start = time.perf_counter()
        while connection.recv(1 << 16):
            pass
        print(time.perf_counter() - start)


@pytest.mark.timeout(90)
def test_bytes_take_the_time_of_the_bandwidth(tmp_path: Path) -> None:
    def transfer(bandwidth: float) -> float:
        with Lab(cluster(2, latency=0.001, bandwidth=bandwidth)) as lab:
            output = tmp_path / f"{bandwidth}.txt"
            receiving = lab.spawn("b", receive_all, output=output)
            time.sleep(0.3)
            lab.spawn("a", send_all, lab.address("b"), 2_000_000)
            assert receiving.wait(30) == 0, receiving.reason
            assert sum(p.wire_bytes for p in lab.report().pairs) > 2_000_000
            return float(output.read_text())

    assert transfer(1e6) / transfer(4e6) == pytest.approx(4, rel=0.25)


@pytest.mark.timeout(60)
def test_a_scenario_plays_on_its_clock(tmp_path: Path) -> None:
    scenario = Scenario(
        name="storm",
        link=(
            LinkChange(at=1.0, source="a", target="b", up=False),
            LinkChange(at=2.5, source="a", target="b", up=True),
        ),
    )
    with Lab(cluster(2), scenario) as lab:
        lab.spawn("b", echo)
        output = tmp_path / "out.txt"
        pinging = lab.spawn("a", round_trips, lab.address("b"), 30, 0.2, output=output)
        lab.play()
        assert pinging.wait(30) == 0
    heard = ["-" if line == "lost" else "+" for line in output.read_text().split()]
    assert "".join(heard).strip("+").strip("-") == "", "one gap, in the middle"
    assert heard[0] == heard[-1] == "+"
    assert heard.count("-") >= 3


def sleep_with_a_child() -> None:
    subprocess.run(["sleep", "1000"], check=False)


@pytest.mark.timeout(60)
def test_killing_a_host_ends_everything_on_it_and_nothing_elsewhere() -> None:
    scenario = Scenario(name="power cut", kill=(Kill(device="b", at=0.5),))
    with Lab(cluster(2), scenario) as lab:
        children = {host: lab.spawn(host, sleep_with_a_child) for host in lab.hosts}
        time.sleep(0.3)
        families = {
            host: psutil.Process(child.pid).children(recursive=True)
            for host, child in children.items()
        }
        assert all(families.values())
        lab.play()
        assert children["b"].wait(20) == -signal.SIGKILL
        assert psutil.wait_procs(families["b"], timeout=10)[1] == []
        assert children["a"].status is None
        assert all(process.is_running() for process in families["a"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("silent", [True, False])
def test_peers_hear_of_a_crash_but_not_of_a_power_cut(tmp_path: Path, silent: bool) -> None:
    def wait_for_the_end() -> None:
        with socket.create_connection((address, PORT), timeout=20) as connection:
            connection.settimeout(3)
            print("connected")
            try:
                print("closed" if not connection.recv(1) else "data")
            except TimeoutError:
                print("silence")
            except OSError:
                print("closed")

    def accept_and_wait() -> None:
        with socket.create_server(("", PORT)) as server:
            connection, _ = server.accept()
            with connection:
                time.sleep(1000)

    output = tmp_path / "out.txt"
    with Lab(cluster(2, latency=0.001)) as lab:
        address = lab.address("b")
        lab.spawn("b", accept_and_wait)
        time.sleep(0.3)
        client = lab.spawn("a", wait_for_the_end, output=output)
        while "connected" not in output.read_text():
            time.sleep(0.05)
        time.sleep(0.2)
        lab.kill("b", silent=silent)
        assert client.wait(20) == 0, client.reason
    assert output.read_text().split()[-1] == ("silence" if silent else "closed")


@pytest.mark.timeout(60)
def test_a_paused_host_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    scenario = Scenario(name="pause", pause=(Pause(device="b", at=0.5, until=2.0),))
    with Lab(cluster(2), scenario) as lab:
        lab.spawn("b", echo)
        output = tmp_path / "out.txt"
        pinging = lab.spawn("a", round_trips, lab.address("b"), 20, 10.0, output=output)
        lab.play()
        assert pinging.wait(30) == 0
    times = [float(line) for line in output.read_text().split()]
    assert len(times) == 20, "nothing was lost"
    assert max(times) > 10 * sorted(times)[10], "but one had to wait"


@pytest.mark.timeout(60)
def test_a_revived_host_can_be_reached_again(tmp_path: Path) -> None:
    with Lab(cluster(2)) as lab:
        lab.spawn("b", echo)
        assert "lost" not in measure(lab, tmp_path, "a", "b")
        lab.kill("b")
        assert measure(lab, tmp_path, "a", "b", 1) == ["lost"]
        lab.revive("b")
        lab.spawn("b", echo)
        assert measure(lab, tmp_path, "a", "b")[-1] != "lost"


@pytest.mark.timeout(60)
def test_a_program_runs_on_a_host_with_its_own_network(tmp_path: Path) -> None:
    with Lab(cluster(2)) as lab:
        output = tmp_path / "out.txt"
        show = "import os, socket; print(os.listdir('/sys/class/net'), socket.if_nameindex())"
        done = lab.run("b", [sys.executable, "-c", show], output=output)
        assert done.wait(20) == 0
        assert "lab0" in output.read_text()
        missing = lab.run("b", ["no-such-program"], output=output)
        assert missing.wait(20) == BAD_INPUT
        assert "no-such-program: No such file" in missing.reason


OWNER = """
import sys, time
from tests.lab.test_lab import cluster, sleep_with_a_child
from polyrhythm.lab.lab import Lab
from polyrhythm.processes import BAD_INPUT, Child, end_all
with Lab(cluster(3), name=sys.argv[1]) as lab:
    for host in lab.hosts:
        lab.spawn(host, sleep_with_a_child)
    time.sleep(0.5)
    print("up", flush=True)
    time.sleep(1000)
"""


def namespaces() -> set[str]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(str(link.readlink()))
        except OSError:
            continue
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_owner_is_ended(ending: signal.Signals) -> None:
    before = namespaces()
    name = f"test-{os.getpid()}-{ending.value}"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        family = psutil.Process(owner.pid).children(recursive=True)
        assert len(family) == 7, "a switch, and on three hosts a process with a child"
        assert len(namespaces() - before) == 3
        assert control.socket_path(name).exists()
        owner.send_signal(ending)
        owner.wait(20)
    assert psutil.wait_procs(family, timeout=20)[1] == []
    assert namespaces() - before == set()
    assert not control.socket_path(name).exists()


@pytest.mark.timeout(60)
def test_two_labs_cannot_have_one_name_but_can_run_side_by_side(tmp_path: Path) -> None:
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
    ("make", "says"),
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
def test_bad_input_is_refused_and_leaves_nothing(make: Callable[[], Lab], says: str) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises((LabError, DescriptionError), match=says), make():
        pass
    assert psutil.Process().num_fds() == before


@pytest.mark.timeout(60)
def test_an_unknown_host_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with Lab(cluster(2)) as lab, pytest.raises(LabError, match="unknown host 'aa'"):
        lab.spawn("aa", echo)


@pytest.mark.timeout(60)
def test_a_switch_that_died_is_reported_and_not_waited_for() -> None:
    with Lab(cluster(2)) as lab:
        end_all([lab._switch])
        with pytest.raises(LabError, match="is gone"):
            lab.report()


@pytest.mark.timeout(60)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody with fewer rights")
def test_without_privileges_the_lab_works_rootless_or_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("pyroute2.iproute")  # the other user may not be able to read it

    def have_a_lab_as_nobody() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        # As for any program of that user: its own files in /proc are its own.
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE
        with Lab(cluster(2)) as lab:
            print("up", lab.address("b"))

    with tempfile.TemporaryDirectory() as labs:
        Path(labs).chmod(0o777)
        monkeypatch.setattr(control, "FOLDER", Path(labs))
        child = Child(have_a_lab_as_nobody, output=tmp_path / "out.txt")
        assert child.wait(30) is not None
    text = (tmp_path / "out.txt").read_text()
    if Path("/dev/net/tun").stat().st_mode & 0o006 == 0o006:
        assert (child.status, text.strip()) == (0, "up 10.77.0.2")
    else:
        assert child.status == BAD_INPUT, text
        assert "opening /dev/net/tun: Permission denied" in text
        assert "polyrhythm doctor" in text

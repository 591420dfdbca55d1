"""The lab: real TCP over links as described, changes and faults on a clock, nothing left behind."""

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
from pathlib import Path

import psutil
import pytest

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import Join, Kill, LinkChange, Pause, Scenario
from polyrhythm.errors import DescriptionError, LabError
from polyrhythm.lab import control, namespace
from polyrhythm.lab.lab import Lab
from polyrhythm.lab.residents import namespace_id, residents
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
import sys
import time
from tests.lab.test_lab import cluster, sleep_with_a_child
from polyrhythm.lab.lab import Lab
from polyrhythm.lab.residents import namespace_id, residents
from polyrhythm.processes import BAD_INPUT, Child, end_all
with Lab(cluster(3), name=sys.argv[1]) as lab:
    for host in lab.hosts:
        lab.spawn(host, sleep_with_a_child)
    time.sleep(0.5)
    print("up", flush=True)
    time.sleep(1000)
"""


def namespaces(processes: list[psutil.Process]) -> set[int]:
    return {Path(f"/proc/{p.pid}/ns/net").stat().st_ino for p in processes}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_owner_is_ended(ending: signal.Signals) -> None:
    name = f"test-{os.getpid()}-{ending.value}"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        family = psutil.Process(owner.pid).children(recursive=True)
        assert len(family) == 7, "a switch, and on three hosts a process with a child"
        own = Path("/proc/self/ns/net").stat().st_ino
        hosts = namespaces(family) - {own}
        assert len(hosts) == 3
        assert control.socket_path(name).exists()
        owner.send_signal(ending)
        owner.wait(20)
    assert psutil.wait_procs(family, timeout=20)[1] == []
    assert not any(residents(host) for host in hosts)
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
        assert lab._switch is not None
        end_all([lab._switch])
        with pytest.raises(LabError, match="is gone"):
            lab.report()


@pytest.mark.timeout(60)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody with fewer rights")
@pytest.mark.parametrize("may_open", [True, False])
def test_without_privileges_the_lab_works_rootless_or_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_open: bool
) -> None:
    importlib.import_module("pyroute2.iproute")  # the other user may not be able to read it

    def have_a_lab_as_nobody() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        # As for any program of that user: its own files in /proc are its own.
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
        child = Child(have_a_lab_as_nobody, output=tmp_path / "out.txt")
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
def test_a_host_killed_at_the_start_or_paused_before_shares_its_fate(tmp_path: Path) -> None:
    scenario = Scenario(name="at once", kill=(Kill(device="b", at=0),))
    with Lab(cluster(3), scenario) as lab:
        lab.play()
        late = lab.spawn("b", time.sleep, 1000)
        assert late.wait(20) == -signal.SIGKILL
        lab.pause("c")
        paused = lab.spawn("c", time.sleep, 0)
        assert paused.wait(1) is None
        assert psutil.Process(paused.pid).status() == psutil.STATUS_STOPPED
        lab.pause("c", paused=False)
        assert paused.wait(20) == 0


@pytest.mark.timeout(60)
def test_overlapping_pauses_end_with_the_last(tmp_path: Path) -> None:
    with Lab(cluster(2)) as lab:
        lab.spawn("b", echo)
        for host in ("a", "b", "b"):
            lab.pause(host)
        for host in ("b", "a"):
            lab.pause(host, paused=False)
        output = tmp_path / "out.txt"
        pinging = lab.spawn("a", round_trips, lab.address("b"), 1, 20.0, output=output)
        assert pinging.wait(1) is None, "b stands still"
        lab.pause("b", paused=False)
        assert pinging.wait(20) == 0
    assert "lost" not in output.read_text()


@pytest.mark.timeout(60)
def test_a_client_that_does_not_read_cannot_stop_the_switch() -> None:
    with Lab(cluster(4)) as lab, socket.socket(socket.AF_UNIX) as rude:
        rude.connect(str(control.socket_path(lab.name)))
        rude.setblocking(False)
        for order in (b'{"type":"GetHosts"}\n' * 5000, b"x" * (3 << 20), b'{"type":"nonsense"}\n'):
            with contextlib.suppress(OSError):
                rude.send(order)
            assert lab.report().elapsed > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "order",
    [
        b'{"type":"KillHost","host":77}',
        b'{"type":"ChangeLinks","pairs":[[0,1]],"bandwidth":0}',
        b'{"type":"ChangeLinks","pairs":[[0,9]],"latency":1,"at":1e12}',
        b'{"type":"OwnProcess","pid":99999999999,"host":0}',
        b"nonsense",
    ],
)
def test_an_order_that_makes_no_sense_is_refused(order: bytes) -> None:
    with Lab(cluster(2)) as lab, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(control.socket_path(lab.name)))
        client.sendall(order + b"\n")
        assert b"refused" in client.recv(10_000)
        assert lab.report().elapsed > 0, "it goes on"


@pytest.mark.timeout(60)
def test_everything_on_a_host_ends_with_the_lab_whatever_it_leads() -> None:
    with Lab(cluster(2)) as lab:
        stray = "import subprocess, time; subprocess.Popen(['sleep', '1000'], process_group=0)"
        lab.run("a", [sys.executable, "-c", f"{stray}; time.sleep(1000)"])
        ends = time.monotonic() + 20
        while len(inside := residents(namespace_id(lab._network[0].namespace))) < 2:
            assert time.monotonic() < ends
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
def test_an_interrupted_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Lab._start_switch

    def interrupted(lab: Lab, *sockets: socket.socket) -> None:
        real(lab, *sockets)
        raise KeyboardInterrupt

    monkeypatch.setattr(Lab, "_start_switch", interrupted)
    lab = Lab(cluster(2))
    with pytest.raises(KeyboardInterrupt), lab:
        pass
    assert psutil.Process().children() == []
    assert not control.socket_path(lab.name).exists()


@pytest.mark.timeout(60)
def test_only_one_of_many_claims_of_a_name_succeeds() -> None:
    def claim() -> None:
        with control.claim("contested"):
            time.sleep(1.0)

    claims = [Child(claim) for _ in range(8)]
    statuses = [child.wait(30) for child in claims]
    control.socket_path("contested").unlink(missing_ok=True)
    assert sorted(map(str, statuses)) == ["0", *[str(BAD_INPUT)] * 7]


@pytest.mark.timeout(60)
def test_many_processes_one_after_the_other_cost_no_descriptors() -> None:
    with Lab(cluster(2)) as lab:
        assert lab._switch is not None
        counts = []
        for _ in range(3):
            for _ in range(10):
                assert lab.spawn("a", bool).wait(20) == 0
            counts.append((psutil.Process().num_fds(), psutil.Process(lab._switch.pid).num_fds()))
    assert counts[0] == counts[2]

"""Hosts are killed, paused and revived at a scenario's times."""

import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from polyrhythm.describe.scenario import Kill, LinkChange, Pause, Scenario
from polyrhythm.lab.lab import Lab
from tests.lab.hosts import PORT, cluster, echo, measure, round_trips, sleep_with_a_child


@pytest.mark.alone
@pytest.mark.timeout(60)
def test_scenario_events_happen_on_time(tmp_path: Path) -> None:
    scenario = Scenario(
        name="link flap",
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
    received = ["-" if line == "lost" else "+" for line in output.read_text().split()]
    assert "".join(received).strip("+").strip("-") == "", "one gap, in the middle"
    assert received[0] == received[-1] == "+"
    assert received.count("-") >= 3


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
def test_crash_closes_connections_and_power_cut_does_not(tmp_path: Path, silent: bool) -> None:
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


@pytest.mark.alone
@pytest.mark.timeout(60)
def test_paused_host_resumes_without_loss(tmp_path: Path) -> None:
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


@pytest.mark.alone
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
def test_process_on_killed_or_paused_host_is_killed_or_paused(tmp_path: Path) -> None:
    scenario = Scenario(name="at once", kill=(Kill(device="b", at=0),))
    with Lab(cluster(3), scenario) as lab:
        lab.play()
        late = lab.spawn("b", time.sleep, 1000)
        assert late.wait(20) == -signal.SIGKILL
        lab.pause("c")
        paused = lab.spawn("c", time.sleep, 5)
        process, ends = psutil.Process(paused.pid), time.monotonic() + 4
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < ends:
            time.sleep(0.05)
        assert process.status() == psutil.STATUS_STOPPED
        lab.pause("c", paused=False)
        assert paused.wait(20) == 0


@pytest.mark.alone
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
        assert pinging.wait(1) is None, "b is paused"
        lab.pause("b", paused=False)
        assert pinging.wait(20) == 0
    assert "lost" not in output.read_text()

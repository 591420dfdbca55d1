"""The lab: real TCP over links as described, also when they change at run time."""

import socket
import sys
import time
from pathlib import Path

import pytest

from polyrhythm.describe.scenario import LinkChange
from polyrhythm.lab.lab import Lab
from polyrhythm.processes import BAD_INPUT
from tests.lab.hosts import PORT, cluster, echo, measure, median


@pytest.mark.alone
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


@pytest.mark.alone
@pytest.mark.timeout(60)
def test_lost_link_drops_packets_and_others_do_not(tmp_path: Path) -> None:
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


@pytest.mark.alone
@pytest.mark.timeout(90)
def test_transfer_time_follows_bandwidth(tmp_path: Path) -> None:
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

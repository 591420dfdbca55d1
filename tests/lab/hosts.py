"""Clusters and programs for tests of the lab."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.lab.lab import Lab

PORT = 5000


def cluster(num_hosts: int = 3, *, latency: float = 0.02, bandwidth: float = 2.5e6) -> Cluster:
    """Return a cluster of hosts a, b, c, ... with equal links."""
    names = tuple("abcdefghijklmnop"[:num_hosts])
    return Cluster(
        name="test",
        devices=tuple(Device(name=name, region=name) for name in names),
        regions=names,
        latency=tuple((latency,) * num_hosts for _ in names),
        bandwidth=tuple((bandwidth,) * num_hosts for _ in names),
    )


def echo() -> None:
    """Echo every datagram."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", PORT))
        while True:
            data, sender = server.recvfrom(2000)
            server.sendto(data, sender)


def round_trips(address: str, count: int, timeout: float = 1.0) -> None:
    """Print one line per datagram: the seconds of its round trip, or 'lost'."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(timeout)
        client.connect((address, PORT))
        for number in range(count):
            print(_round_trip(client, str(number).encode()) or "lost")
            time.sleep(0.05)


def _round_trip(client: socket.socket, number: bytes) -> float | None:
    while True:
        start = time.perf_counter()
        try:
            client.send(number)
            while client.recv(2000) != number:
                pass
            return time.perf_counter() - start
        except ConnectionRefusedError:  # nobody listens yet
            time.sleep(0.05)
        except OSError:
            return None


def measure(lab: Lab, tmp_path: Path, source: str, target: str, count: int = 5) -> list[str]:
    output = tmp_path / f"{source}{target}{time.monotonic()}.txt"
    pinging = lab.spawn(source, round_trips, lab.address(target), count, output=output)
    assert pinging.wait(30) == 0, pinging.reason
    return output.read_text().split()


def median(times: list[str]) -> float:
    return float(sorted(times, key=float)[len(times) // 2])


def sleep_with_a_child() -> None:
    subprocess.run(["sleep", "1000"], check=False)


@contextmanager
def namespaces(processes: list[psutil.Process]) -> Iterator[set[int]]:
    """Yield the network namespaces of the processes, and keep them from being freed.

    The kernel would give the number of a freed one to the next lab, of another test.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(Path(f"/proc/{p.pid}/ns/net").open()) for p in processes]
        yield {os.fstat(file.fileno()).st_ino for file in files}

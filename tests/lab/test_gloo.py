"""torch over the lab: collectives work, a lost host is detected, workers start fast and small."""

import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from polyrhythm.lab.lab import Lab
from tests.grids import long_except
from tests.lab.hosts import cluster

RENDEZVOUS_TIMEOUT, TIMEOUT = 30.0, 5.0


def all_reduce(rank: int, size: int, master: str, rounds: int, host_to_lose: int | None) -> None:
    """Sum ranks `rounds` times; or until a host is lost, and print the error."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master}:29500",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT),
    )
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    for step in range(rounds):
        total = torch.full((1000,), float(rank))
        try:
            dist.all_reduce(total, group=group)
        except RuntimeError as error:
            print("lost", str(error).splitlines()[0])
            return
        assert total[0].item() == size * (size - 1) / 2
        if step == 0:
            print("first", flush=True)
    assert host_to_lose is None, "the loss was not detected"
    dist.barrier()
    dist.destroy_process_group()


def start(lab: Lab, folder: Path, rounds: int, host_to_lose: int | None = None) -> list[Path]:
    size, master = len(lab.hosts), lab.address(lab.hosts[0])
    outputs = [folder / f"{rank}.txt" for rank in range(size)]
    for rank, host in enumerate(lab.hosts):
        lab.spawn(host, all_reduce, rank, size, master, rounds, host_to_lose, output=outputs[rank])
    return outputs


@pytest.mark.timeout(100)
def test_an_all_reduce_crosses_eight_hosts(tmp_path: Path) -> None:
    with Lab(cluster(8, latency=0.005)) as lab:
        outputs = start(lab, tmp_path, rounds=3)
        assert lab.wait(lab.children, timeout=80), [c.reason for c in lab.children]
        assert [child.status for child in lab.children] == [0] * 8, outputs[0].read_text()
        carried = {(pair.source, pair.target) for pair in lab.report().pairs if pair.wire_bytes}
    assert len({source for source, _ in carried}) == 8


@pytest.mark.alone
@pytest.mark.timeout(100)
@pytest.mark.parametrize("silent", long_except([False, True], 1))
def test_lost_host_is_detected_by_all_within_the_timeout(tmp_path: Path, silent: bool) -> None:
    with Lab(cluster(4, latency=0.005)) as lab:
        outputs = start(lab, tmp_path, rounds=10**6, host_to_lose=2)
        deadline = time.monotonic() + 40
        while not all("first" in output.read_text() for output in outputs):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        lab.kill(lab.hosts[2], silent=silent)
        assert lab.wait(lab.children, timeout=2 * TIMEOUT)
    assert all("lost" in output.read_text() for rank, output in enumerate(outputs) if rank != 2)


@pytest.mark.timeout(100)
def test_sixteen_workers_share_the_memory_of_their_parent(tmp_path: Path) -> None:
    def idle() -> None:
        torch.ones(1000).sum()
        print("ready", flush=True)
        time.sleep(1000)

    with Lab(cluster(16)) as lab:
        outputs = [tmp_path / f"{host}.txt" for host in lab.hosts]
        for host, output in zip(lab.hosts, outputs, strict=True):
            lab.spawn(host, idle, output=output)
        deadline = time.monotonic() + 40
        while not all("ready" in output.read_text() for output in outputs):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        alone = [psutil.Process(child.pid).memory_full_info().uss for child in lab.children]
        whole = psutil.Process(lab.children[0].pid).memory_info().rss
    assert max(alone) < whole / 3, "most of each worker's memory is its parent's"

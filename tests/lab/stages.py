"""Run the stages of a pipeline on hosts of the lab, one each, and read their output."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist

from polyrhythm.lab.lab import Lab
from polyrhythm.processes import Child

PORT = 29500


def join(rank: int, num_stages: int, master: str, timeout: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master}:{PORT}",
        rank=rank,
        world_size=num_stages,
        timeout=timedelta(seconds=timeout),
    )


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def start(lab: Lab, folder: Path, work: Callable[[int], None], *, timeout: float) -> list[Child]:
    """Run `work(stage)` on every host after the rendezvous of all stages."""

    def joined(stage: int, num_stages: int, master: str) -> None:
        join(stage, num_stages, master, timeout)
        work(stage)
        leave()

    master = lab.address(lab.hosts[0])
    return [
        lab.spawn(host, joined, stage, len(lab.hosts), master, output=folder / f"{stage}.txt")
        for stage, host in enumerate(lab.hosts)
    ]


def lines(child: Child, beginning: str) -> list[list[str]]:
    """Return the rest of every line that starts with `beginning`."""
    assert child.output is not None
    found = [line.split() for line in child.output.read_text().splitlines()]
    return [words[1:] for words in found if words[:1] == [beginning]]


def wait_for_lines(children: list[Child], beginning: str, number: int) -> None:
    deadline = time.monotonic() + 40
    while any(len(lines(child, beginning)) < number for child in children):
        assert time.monotonic() < deadline, [child.reason for child in children]
        assert not any(child.status for child in children), [child.reason for child in children]
        time.sleep(0.02)

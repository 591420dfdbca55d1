"""Replicas in real processes, each with a target of its own, which only their mean agrees on."""

import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.processes import Child, end_all
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext, _run
from tests.gloo.pipelines import run_stages

TIMEOUT = 30.0


class Point(nn.Module):
    """A model that is a vector; its loss is how far it is from where its worker wants it."""

    def __init__(self, size: int = 6, value: float = 0.0) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.full((size,), value))

    def forward(self, target: Tensor) -> Tensor:
        return 0.5 * (self.place - target).square().sum()


def target_of(rank: int, size: int = 6) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def train(
    ctx: DistContext, num_steps: int, policy: str, *, lr: float = 0.2, **more: Any
) -> GroupSync:
    """So many steps; the GroupSync is still open."""
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    sync = GroupSync(model, optimizer, policy, **{"timeout": TIMEOUT, **more})
    for _ in range(num_steps):
        time.sleep(0.005)  # so that all train at the same time
        optimizer.zero_grad()
        model(target_of(ctx.rank)).backward()
        optimizer.step()
        sync.step()
    return sync


def run_replicas(num: int, work: Callable[[DistContext], Any], folder: Path) -> list[Any]:
    return run_stages(num, work, folder, timeout=60)


def run_with_failures(
    num: int,
    work: Callable[[DistContext], Any],
    folder: Path,
    *,
    lost: set[int],
    timeout: float = 60.0,
) -> dict[int, Any]:
    """What `work` returns in each process but those that are killed on their way."""

    def joined(ctx: DistContext) -> None:
        with ctx.process_group(TIMEOUT):
            found = work(ctx)
        torch.save(found, folder / f"found{ctx.rank}.pt")

    workers = []
    with socket.create_server(("127.0.0.1", 0), backlog=num) as listen_socket:
        for rank in range(num):
            ctx = DistContext(
                rank=rank, world_size=num, local_rank=rank, listen_socket=listen_socket
            )
            output = folder / f"rank{rank}.log"
            workers.append(Child(partial(_run, joined, ctx), output=output))
    try:
        ends = time.monotonic() + timeout
        for rank, worker in enumerate(workers):
            status = worker.wait(ends - time.monotonic())
            expected = -signal.SIGKILL if rank in lost else 0
            assert status == expected, f"rank {rank} {worker.reason}"
    finally:
        end_all(workers)
    return {r: torch.load(folder / f"found{r}.pt") for r in range(num) if r not in lost}

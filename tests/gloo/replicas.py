"""Replicas in real processes, each with its own target; the optimum is the mean of targets."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext, LocalJob
from tests.gloo.pipelines import run_stages

TIMEOUT = 30.0


class Point(nn.Module):
    """A model of one vector; its loss is the squared distance to the worker's target."""

    def __init__(self, size: int = 6, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), value))

    def forward(self, target: Tensor) -> Tensor:
        return 0.5 * (self.weight - target).square().sum()


def target_of(rank: int, size: int = 6) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def train(
    ctx: DistContext, num_steps: int, policy: str, *, lr: float = 0.2, **more: Any
) -> GroupSync:
    """Train `num_steps` steps; return the open GroupSync."""
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    sync = GroupSync(model, optimizer, policy, **{"timeout": TIMEOUT, **more})
    for _ in range(num_steps):
        time.sleep(0.005)  # so that all workers train concurrently
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
    """Return the result of `work` by rank, without the ranks `lost`, which must be killed."""

    def work_in_group(ctx: DistContext) -> None:
        with ctx.process_group(TIMEOUT):
            found = work(ctx)
        torch.save(found, folder / f"found{ctx.rank}.pt")

    with LocalJob(work_in_group, num, output_folder=folder, keeps_survivors=True) as job:
        assert job.wait(timeout), f"it hangs for {timeout:g} s"
        for rank, worker in enumerate(job._workers):
            expected = -signal.SIGKILL if rank in lost else 0
            assert worker.status == expected, f"rank {rank} {worker.reason}"
    return {r: torch.load(folder / f"found{r}.pt") for r in range(num) if r not in lost}

"""A worker is lost while a large message from it, or to it, is in transfer: the others go on.

It stops in the middle of the message, and is killed a moment later: this is what a slow network
does to every message. Gloo does not wake who waits for it.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.comm.reduce_scatter import GlooCollectives
from polyrhythm.run.pipeline.transport import Inbox, Outbox
from polyrhythm.run.trainer.trainer import Trainer
from tests.grids import long_except

NUM_STEPS, _WIDTH = 6, 400_000
_UNTIL_KILL = 0.5  # for messages to fill the buffers of the sockets
_TIMEOUT = 80.0


def model() -> nn.Sequential:
    """Gradients and activations of megabytes, which no socket buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1))


def stop_and_kill(where: type, name: str, number: int, *, when: str) -> None:
    """Stop this process in call `number` of a method, or after it, and kill it a moment later."""
    original, num_calls, process = getattr(where, name), 0, os.getpid()

    def kill() -> None:
        time.sleep(_UNTIL_KILL)
        os.kill(process, signal.SIGKILL)

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        is_now = num_calls == number + 1
        if is_now and when == "before":
            _end(kill)
        found = original(*args, **kwargs)
        if is_now:
            _end(kill)
        return found

    setattr(where, name, patched)


def _end(kill: Any) -> None:
    if os.fork() == 0:
        kill()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def train(folder: Path, shape: tuple[int, int], fault: Any = None) -> dict[int, dict[str, Tensor]]:
    """Return the weights of the processes that are left."""
    num_stages, num_pipelines = shape
    plan = Plan(
        layers_per_stage=(3,) if num_stages == 1 else (2, 1),
        pipelines=(PipelinePlan(schedule="1f1b"),) * num_pipelines,
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(192, 24, generator=generator)

    def work(ctx: DistContext) -> None:
        if fault is not None:
            fault(ctx.rank)
        with Trainer(
            model,
            mse_loss,
            lambda named: torch.optim.SGD(named, lr=1e-4),
            TensorDataset(inputs, inputs.sum(1, keepdim=True)),
            batch_size=48,
            microbatch_size=16,
            plan=plan,
        ) as made:
            made.fit(max_steps=NUM_STEPS, progress=False)
            torch.save(made.model.state_dict(), folder / f"weights{ctx.rank}.pt")

    folder.mkdir(exist_ok=True)
    with LocalJob(
        work, plan.num_workers, output_folder=folder / "logs", keeps_survivors=True
    ) as job:
        assert job.wait(_TIMEOUT), "not done in time"
    return {int(path.stem[7:]): torch.load(path) for path in folder.glob("weights*.pt")}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("shape", "victim", "where", "name", "number", "when", "survivors"),
    long_except(
        [
            ((1, 3), 1, GlooCollectives, "reduce_scatter", 3, "before", {0, 2}),
            ((1, 3), 1, GlooCollectives, "reduce_scatter", 3, "after", {0, 2}),
            ((1, 3), 0, GlooCollectives, "all_gather", 3, "before", {1, 2}),
            ((1, 3), 0, GlooCollectives, "all_gather", 3, "after", {1, 2}),
            ((2, 2), 0, Outbox, "_start_send", 3, "after", {2, 3}),
            ((2, 2), 1, Inbox, "get", 3, "before", {2, 3}),
            ((2, 2), 1, Outbox, "_start_send", 3, "after", {2, 3}),
        ],
        4,
    ),
)
def test_a_loss_in_the_middle_of_a_message(
    tmp_path: Path,
    shape: tuple[int, int],
    victim: int,
    where: type,
    name: str,
    number: int,
    when: str,
    survivors: set[int],
) -> None:
    def fault(rank: int) -> None:
        if rank == victim:
            stop_and_kill(where, name, number, when=when)

    found = train(tmp_path / "job", shape, fault)
    assert found.keys() == survivors
    (expected,) = train(tmp_path / "alone", (1, 1)).values()
    for weights in found.values():
        for parameter, value in weights.items():
            torch.testing.assert_close(value, expected[parameter], rtol=1e-3, atol=1e-5)

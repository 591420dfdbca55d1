"""A vector that replicas train with averages during backward; functions are called within it."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyrhythm.run.averaging import buffers
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.pipelines import STAGE_TIMEOUT
from tests.gloo.replicas import TIMEOUT

WIDTH, MICROBATCHES, LR = 8, 3, 0.05


def make_pipeline(
    ctx: DistContext, model: nn.Sequential, loss_fn: Callable[..., Any], stages: int, **more: Any
) -> Pipeline:
    groups = [
        dist.new_group([stages * p + s for s in range(stages)])
        for p in range(ctx.world_size // stages)
    ]
    return Pipeline.from_sequential(
        model,
        loss_fn=loss_fn,
        process_group=groups[ctx.rank // stages],
        pipeline=ctx.rank // stages,
        timeout=STAGE_TIMEOUT,
        **{"n_microbatches": MICROBATCHES, **more},
    )


def use_small_buckets() -> None:
    """Split even a small model into many buckets, some of them within a tensor."""
    buffers._FIRST_BUCKET, buffers._BUCKET = 64, 300


class Slow(torch.autograd.Function):
    """The identity, whose backward first calls a function."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradient, None


class Before(nn.Module):
    """A layer that calls a function in the middle of a backward: its own gradient comes last."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.ones(WIDTH).double()), call

    def forward(self, inputs: Tensor) -> Tensor:
        return Slow.apply(inputs * self.weight, self.call)


def quadratic(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().sum(1).mean()


def train_quadratic(
    ctx: DistContext, at_step: dict[int, Callable[[], None]], num_steps: int
) -> tuple[Tensor, float]:
    """Train a vector towards the mean of targets 1, 2, ...; call functions within backwards."""
    use_small_buckets()
    number = 0
    model = nn.Sequential(Before(lambda: at_step.pop(number, lambda: None)()), nn.Identity())
    model.append(nn.Linear(WIDTH, WIDTH, bias=False).double())
    nn.init.eye_(model[2].weight)
    target = torch.full((1, WIDTH), ctx.rank + 1.0).double()
    inputs = torch.ones(1, WIDTH).double()
    with make_pipeline(ctx, model, quadratic, 1, n_microbatches=1) as pipeline:
        optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=LR)
        with GroupSync(pipeline, optimizer, "all_reduce", timeout=TIMEOUT) as sync:
            start = time.monotonic()
            for number in range(num_steps):  # noqa: B007  # the closure reads it
                try:
                    pipeline.step(inputs, target=target)
                except ArithmeticError:  # once: the batch is repeated
                    optimizer.zero_grad()
                    pipeline.step(inputs, target=target)
                optimizer.step()
                sync.step()
                optimizer.zero_grad()
            elapsed = time.monotonic() - start
        weights = [p.detach().flatten() for p in pipeline.module.parameters()]
    return torch.cat(weights), elapsed


def expected_quadratic(targets: list[list[float]]) -> Tensor:
    """Train on the targets that are present in each step, in one process."""
    first, second = torch.ones(WIDTH).double().requires_grad_(), torch.eye(WIDTH).double()
    second.requires_grad_()
    optimizer = torch.optim.SGD([first, second], lr=LR)
    for present in targets:
        for target in present:
            loss = quadratic((first @ second.T)[None], torch.full((1, WIDTH), target).double())
            (loss / len(present)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([first.detach(), second.detach().flatten()])

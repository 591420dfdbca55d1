"""Small models under a DistributedOptimizer, and their single-process references."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.errors import PolicyError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer

WIDTH, TIMEOUT = 6, 20.0


def stack(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def wrap_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any
) -> Any:
    return DistributedOptimizer(
        optimizer or adam(model), model, **{"bucket_bytes": 200, "timeout": TIMEOUT, **more}
    )


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def reference_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: range, steps: range
) -> None:
    """Run the steps of all workers in one process."""
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, inputs_of(rank, step)) / len(ranks)).backward()
        optimizer.step()


def train_steps(ctx: DistContext, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss_of(model, inputs_of(ctx.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def close_to(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.allclose(actual[k], v, atol=1e-6, rtol=0) for k, v in expected.items())


def error_of(call: Callable[[], object], *, kind: type[Exception] = PolicyError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)

"""With NCCL the host of a worker that has used all trained parameters waits for no other host."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.decoupled import WIDTH, error_of, inputs_of, wrap_optimizer
from tests.gloo.emulated_nccl import emulate_nccl
from tests.gloo.pipelines import run_stages

STEPS = 6


class Sometimes(nn.Module):
    """One layer is used by rank 1 in some steps, one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.odd, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.uses_odd = self.uses_never = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.always(x))
        x = x + self.odd(x) if self.uses_odd else x
        return x + self.never(x) if self.uses_never else x


def train(ctx: DistContext, *, nccl: bool, all_used: bool) -> tuple[dict[str, Tensor], list[bool]]:
    """Train; return the weights, and which steps have waited for the other host."""
    waited: list[bool] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        if nccl:
            emulate_nccl(monkeypatch)
        model = Sometimes()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        optimizer: Any = wrap_optimizer(model, inner, bucket_bytes=80)
        for step in range(STEPS):
            if not all_used:
                model.uses_never = False
                model.uses_odd = step == 0 or (ctx.rank == 1 and step % 2 == 1)
            model(inputs_of(ctx.rank, step)).square().mean().backward()
            optimizer.step()
            waited.append(optimizer._gradient_sync._sent_flags is None)
            optimizer.zero_grad()
        optimizer.synchronize()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.close()
    return weights, waited


@pytest.mark.parametrize("all_used", [True, False])
def test_flags_are_waited_for_only_if_a_gradient_is_missing(all_used: bool, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[Any]:
        return [train(ctx, nccl=nccl, all_used=all_used) for nccl in (True, False)]

    for (weights, waited), (expected, _) in run_stages(2, work, tmp_path):
        assert waited == [not all_used] * STEPS
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)
        if not all_used:
            assert torch.equal(weights["never.weight"], Sometimes().never.weight)


def train_frozen(ctx: DistContext, *, nccl: bool, on_all: bool) -> tuple[Tensor, list[bool]]:
    """Freeze a layer from the start, another after two steps; unfreeze the first after four."""
    waited: list[bool] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        if nccl:
            emulate_nccl(monkeypatch)
        model = Sometimes()
        model.never.requires_grad_(False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer: Any = wrap_optimizer(model, inner, bucket_bytes=80)
        for step in range(STEPS):
            if step == 2:
                model.odd.requires_grad_(False)
            if step == 4 and (on_all or ctx.rank == 1):
                model.never.requires_grad_(True)
            model(inputs_of(ctx.rank, step)).square().mean().backward()
            try:
                optimizer.step()
            except PolicyError:
                optimizer.abort()
                raise
            waited.append(optimizer._gradient_sync._sent_flags is None)
            optimizer.zero_grad()
        optimizer.synchronize()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        optimizer.close()
    return weights, waited


def test_frozen_parameters_are_waited_for_only_when_they_change(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[Any]:
        return [train_frozen(ctx, nccl=nccl, on_all=True) for nccl in (True, False)]

    for (weights, waited), (expected, _) in run_stages(2, work, tmp_path):
        assert waited == [False, False, True, False, True, False]
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


def test_a_parameter_that_one_worker_unfreezes_is_refused_over_nccl(tmp_path: Path) -> None:
    """The others would not take part in its reduce-scatter."""

    def work(ctx: DistContext) -> str:
        kind = PolicyError if ctx.rank == 1 else PeerError
        return error_of(lambda: train_frozen(ctx, nccl=True, on_all=False), kind=kind)

    _, message = run_stages(2, work, tmp_path)
    assert "never.weight has a gradient, but is frozen on another worker" in message

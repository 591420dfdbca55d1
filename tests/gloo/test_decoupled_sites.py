"""Workers of a site start the same collectives in the same order, over NCCL or gloo."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.reduce_scatter import GlooCollectives, Pending
from polyrhythm.sync.fusion.tuner import BucketCandidate, BucketMode
from tests.gloo.decoupled import wrap_optimizer
from tests.gloo.emulated_nccl import EmulatedNccl, emulate_nccl
from tests.gloo.pipelines import run_stages

NUM_WORKERS, NUM_STEPS, NUM_LAYERS, WIDTH = 4, 8, 6, 16


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class Layers(nn.Module):
    """Layers whose backward takes `pause` seconds longer; one of them is frozen."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
        )
        self.layers[2].requires_grad_(False)
        self._pause = pause

    def forward(self, x: Tensor, skipped: int | None) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = _Pause.apply(torch.tanh(layer(x)), self._pause)
        return x


def slow_down_gathers(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """Delay all-gathers inside a site: those of unused layers run until the next backward."""
    all_gather = kind.all_gather

    def slow(collectives: Any, flat: Tensor, number: int) -> Pending:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        pending: Pending = all_gather(collectives, flat, number)
        return pending

    monkeypatch.setattr(kind, "all_gather", slow)


def skipped_layer(rank: int, step: int) -> int | None:
    """Skip the last layer, whose bucket is gathered last and reduced first, or any."""
    return (None, None, NUM_LAYERS - 1, rank)[step % 4]


def inputs_of(rank: int, step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + microbatch)
    return torch.randn(4, WIDTH, generator=generator)


@pytest.mark.parametrize(
    ("backend", "mode", "slow"),
    [
        ("nccl", "hierarchical", "gathers"),
        ("nccl", "hierarchical_all_reduce", "backward"),
        ("gloo", "hierarchical", "gathers"),
    ],
)
def test_collectives_of_a_site_start_in_one_order(
    backend: str, mode: Any, slow: str, tmp_path: Path
) -> None:
    """One worker of each site is slower; forwards skip buckets; micro-batches; other buckets."""
    change = BucketCandidate(2048, BucketMode(mode))

    def work(ctx: DistContext) -> tuple[list[str], dict[str, Tensor]]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            is_slow, where = ctx.rank % 2 == 1, f"site {ctx.rank // 2}"
            if backend == "nccl":
                emulate_nccl(monkeypatch)
            if is_slow and slow == "gathers":
                kind = EmulatedNccl if backend == "nccl" else GlooCollectives
                slow_down_gathers(monkeypatch, kind)
            model = Layers(pause=0.004 if is_slow and slow == "backward" else 0.0)
            place = {"site": where} if backend == "nccl" else {"site": None, "node": where}
            inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer = wrap_optimizer(model, inner, bucket_bytes=1024, mode=mode, **place)
            for step in range(NUM_STEPS):
                skipped = skipped_layer(ctx.rank, step)
                with optimizer.no_sync():
                    model(inputs_of(ctx.rank, step, 0), skipped).square().mean().backward()
                model(inputs_of(ctx.rank, step, 1), skipped).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == NUM_STEPS // 2:
                    optimizer._change_buckets(change)
            inside = optimizer._gradient_sync.collectives._inside
            optimizer.close()
            started = inside.started if backend == "nccl" else []
            return started, {name: p.detach().clone() for name, p in model.named_parameters()}

    found = run_stages(NUM_WORKERS, work, tmp_path)

    for first, second in ((0, 1), (2, 3)):
        assert found[first][0] == found[second][0]
    model = Layers(pause=0.0)
    reference = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        for rank in range(NUM_WORKERS):
            for microbatch in range(2):
                inputs = inputs_of(rank, step, microbatch)
                loss = model(inputs, skipped_layer(rank, step)).square().mean()
                (loss / NUM_WORKERS).backward()
        reference.step()
        reference.zero_grad()
    for _, weights in found:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=1e-6)

"""DistributedOptimizer trains all kinds of models as DistributedDataParallel does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from tests.gloo.pipelines import run_stages
from tests.grids import long_except

STEPS, WIDTH, TIMEOUT = 10, 12, 20.0


class Tied(nn.Module):
    """Two layers share a weight, one is called twice, one is defined last and used first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.early = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.twice(torch.tanh(self.twice(self.early(x)))))
        return self.last(torch.tanh(self.first(x)))


class Sometimes(nn.Module):
    """One layer is used only in odd calls on rank 1, one never, one is frozen."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.always, self.odd = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never, self.frozen = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.rank, self.num_calls = rank, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        x = self.frozen(torch.tanh(self.always(x)))
        if self.num_calls % 2 and self.rank == 1:
            x = x + self.odd(x)
        return x


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return torch.as_tensor(x)


def stack(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return kind(*layers)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "plain": lambda rank: stack(),
    "tied": lambda rank: Tied(),
    "sometimes": Sometimes,
    "checkpointed": lambda rank: stack(Checkpointed),
    "norms": lambda rank: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups with different learning rates."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": trained[:1], "lr": 0.05}, {"params": trained[1:]}]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(6, WIDTH, generator=generator), torch.randn(6, WIDTH, generator=generator)


def train(
    ctx: DistContext, name: str, optimizer: str, *, ours: bool, clip: bool, parts: int, **more: Any
) -> dict[str, Tensor]:
    torch.manual_seed(ctx.rank)  # all start with the weights of rank 0
    model = MODELS[name](ctx.rank)
    module = model
    if ours:
        opt = DistributedOptimizer(
            OPTIMIZERS[optimizer](groups_of(model)), model, timeout=TIMEOUT, **more
        )
    else:
        module = DistributedDataParallel(model, find_unused_parameters=name == "sometimes")
        opt = OPTIMIZERS[optimizer](groups_of(model))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 3, gamma=0.5)
    no_sync_owner = opt if ours else module
    for step in range(STEPS):
        for part in range(parts):
            inputs, target = batch(ctx.rank, parts * step + part)

            def backward(inputs: Tensor = inputs, target: Tensor = target) -> None:
                (nn.functional.mse_loss(module(inputs), target) / parts).backward()

            if part < parts - 1:
                with no_sync_owner.no_sync():
                    backward()
            else:
                backward()
        if clip and ours:
            opt.clip_grad_norm_(0.1)
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        schedule.step()
        opt.zero_grad()
    if ours:
        opt.synchronize()
        opt.close()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("optimizer", long_except(list(OPTIMIZERS), 1))
@pytest.mark.parametrize(
    ("name", "clip", "parts", "num_workers"),
    long_except(
        [
            ("plain", False, 1, 2),
            ("plain", True, 3, 3),
            ("tied", False, 1, 2),
            ("tied", True, 1, 4),
            ("sometimes", False, 1, 2),
            ("checkpointed", False, 2, 2),
            ("norms", False, 1, 2),
        ],
        *(1, 3, 4, 5, 6),
    ),
)
def test_ten_steps_give_the_weights_of_ddp(
    name: str, clip: bool, parts: int, num_workers: int, optimizer: str, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> list[dict[str, Tensor]]:
        same = {"clip": clip, "parts": parts}
        return [
            train(ctx, name, optimizer, ours=False, **same),
            train(ctx, name, optimizer, ours=True, bucket_bytes=1000, **same),
            train(ctx, name, optimizer, ours=True, **same),
            train(ctx, name, optimizer, ours=True, bucket_bytes=700, mode="all_reduce", **same),
        ]

    found = run_stages(num_workers, work, tmp_path)
    expected = found[0][0]
    for _, *ours in found:
        for weights in ours:
            for key, value in expected.items():
                assert (weights[key] - value).abs().max() <= 1e-6, key


@pytest.mark.parametrize("mode", ["hierarchical", "hierarchical_all_reduce"])
def test_hierarchical_averages_give_the_weights_of_ddp(mode: str, tmp_path: Path) -> None:
    """Workers 0 and 2 are on one node, 1 and 3 on the other."""

    def work(ctx: DistContext) -> list[dict[str, Tensor]]:
        hierarchical = {"mode": mode, "node": f"node{ctx.rank % 2}", "bucket_bytes": 1000}
        same = {"clip": True, "parts": 2}
        return [
            train(ctx, "tied", "adamw", ours=False, **same),
            train(ctx, "tied", "adamw", ours=True, **same, **hierarchical),
        ]

    found = run_stages(4, work, tmp_path)
    for _, weights in found:
        for key, value in found[0][0].items():
            assert (weights[key] - value).abs().max() <= 1e-6, key


@pytest.mark.long
@pytest.mark.timeout(100)
def test_bucket_autotuning_gives_the_weights_of_ddp(tmp_path: Path) -> None:
    """All workers switch to the same buckets at the same steps, with their state, and settle."""

    def trained(ctx: DistContext, module: nn.Module, optimizer: Any) -> Iterator[int]:
        for step in range(130):
            inputs = torch.full((1, 640), 0.01 * (step % 7 + ctx.rank))
            module(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield step + 1

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(640, 640) for _ in range(3)))

    def work(ctx: DistContext) -> tuple[Any, ...]:
        model = layers()
        optimizer = DistributedOptimizer(
            OPTIMIZERS["adamw"](model.parameters()), model, timeout=TIMEOUT
        )
        seen = set()
        num_steps = 0
        for number in trained(ctx, model, optimizer):
            num_steps = number
            seen.add(str(optimizer.candidate))
            if optimizer.is_tuned:
                break
        optimizer.close()
        expected = layers()
        ddp = DistributedDataParallel(expected)
        for number in trained(ctx, ddp, OPTIMIZERS["adamw"](expected.parameters())):
            if number == num_steps:
                break
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        difference = max(
            (actual_weight - expected_weight).abs().max().item()
            for actual_weight, expected_weight in pairs
        )
        return optimizer.is_tuned, num_steps, sorted(seen), str(optimizer.candidate), difference

    one, other = run_stages(2, work, tmp_path, timeout=90)
    assert one[:-1] == other[:-1], "the workers differ"
    is_tuned, num_steps, seen, candidate, _ = one
    assert is_tuned
    assert candidate in seen
    assert len(seen) > 3
    assert any("all_reduce" in candidate for candidate in seen)
    assert num_steps <= 1 + 12 * 10
    assert max(one[-1], other[-1]) <= 1e-6

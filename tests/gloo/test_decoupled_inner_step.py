"""The wrapped optimizer is stepped once per step, whatever the buckets, shards and mode."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from benchmarks.parity.modes import CountingSGD
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.decoupled import reference_steps, stack, train_steps, wrap_optimizer
from tests.gloo.pipelines import run_stages

STEPS = 5


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


@pytest.mark.parametrize("mode", ["decoupled", "all_reduce"])
def test_inner_optimizer_is_stepped_once_per_step(mode: str, tmp_path: Path) -> None:
    kinds = (CountingSGD, fused_adamw)

    def work(ctx: DistContext) -> list[Any]:
        found = []
        for kind in kinds:
            model, counts = stack(), [0, 0, 0]
            inner = kind(model.parameters())
            inner_rates = StepLR(inner, 2) if kind is CountingSGD else None
            # Buckets of 100 bytes: several per worker; a size of 1 GB: one.
            size = 100 if kind is CountingSGD else "1GB"
            optimizer = wrap_optimizer(model, inner, mode=mode, bucket_bytes=size, elementwise=True)
            rates = inner_rates or StepLR(optimizer, 2)

            def count(index: int, counts: list[int] = counts) -> Any:
                return lambda *_: counts.__setitem__(index, counts[index] + 1)

            inner.register_step_pre_hook(count(0))
            inner.register_step_post_hook(count(1))
            optimizer.register_step_post_hook(count(2))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(STEPS):
                    train_steps(ctx, model, optimizer, range(step, step + 1))
                    rates.step()
            saved = optimizer.state_dict()
            optimizer.close()
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            found.append((weights, counts, saved, [str(each.message) for each in caught]))
        return found

    for results in run_stages(2, work, tmp_path):
        for kind, (weights, counts, saved, caught) in zip(kinds, results, strict=True):
            assert counts == [STEPS, STEPS, STEPS]
            assert caught == []
            model = stack()
            reference = kind(model.parameters())
            rates = StepLR(reference, 2)
            for step in range(STEPS):
                reference_steps(model, reference, range(2), range(step, step + 1))
                rates.step()
            _assert_close(weights, model)
            (own,), (expected,) = saved["param_groups"], reference.state_dict()["param_groups"]
            assert own == expected


def _assert_close(weights: dict[str, Tensor], model: nn.Module) -> None:
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-6)

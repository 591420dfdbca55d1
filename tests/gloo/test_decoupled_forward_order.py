"""Weights that are used without a call of their module, or not used for some steps."""

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from polyrhythm.run.comm.launch import DistContext
from tests.gloo.decoupled import (
    WIDTH,
    adam,
    close_to,
    error_of,
    inputs_of,
    reference_steps,
    stack,
    train_steps,
    wrap_optimizer,
)
from tests.gloo.pipelines import run_stages


class Borrowing(nn.Module):
    """Reads the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.lender = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls_lender = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.calls_lender:
            return torch.as_tensor(self.lender(x))
        return nn.functional.linear(x, self.lender.weight)


def test_step_waits_for_weight_read_without_its_module(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> bool:
        model, reference = Borrowing(), Borrowing()
        optimizer, plain = wrap_optimizer(model), adam(reference)
        train_steps(ctx, model, optimizer, range(5))
        reference_steps(reference, plain, range(2), range(5))
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same

    assert run_stages(2, work, tmp_path) == [True, True]


def test_eval_may_use_other_modules_than_training(tmp_path: Path) -> None:
    """Evaluation reads the weight of a layer that training calls."""

    def work(ctx: DistContext) -> list[bool]:
        model, reference = Borrowing(), Borrowing()
        inner, plain = adam(model), adam(reference)
        if ctx.rank == 1:  # its shard of the update comes late
            inner.register_step_pre_hook(lambda *_: time.sleep(0.1))
        optimizer = wrap_optimizer(model, inner, bucket_bytes=170)  # one layer per bucket
        same = []
        for step in range(3):
            for each in (model, reference):
                each.train()
                each.calls_lender = True
            train_steps(ctx, model, optimizer, range(step, step + 1))
            reference_steps(reference, plain, range(2), range(step, step + 1))
            for each in (model, reference):
                each.eval()
                each.calls_lender = False
            with torch.no_grad():
                outputs = [each(inputs_of(9, step)) for each in (model, reference)]
            same.append(torch.allclose(*outputs, atol=1e-6, rtol=0))
        optimizer.close()
        return same

    assert run_stages(2, work, tmp_path) == [[True] * 3] * 2


def test_weight_read_before_its_update_is_refused(tmp_path: Path) -> None:
    """The layer is called in the first two steps, and only its weight is read in the third."""

    def work(ctx: DistContext) -> str:
        model = Borrowing()
        model.calls_lender = True
        optimizer = wrap_optimizer(model, bucket_bytes=170)  # one layer per bucket
        train_steps(ctx, model, optimizer, range(2))
        model.calls_lender = False
        message = error_of(lambda: train_steps(ctx, model, optimizer, range(2, 3)))
        optimizer.synchronize()
        return message

    for message in run_stages(2, work, tmp_path):
        assert "lender.weight was used before its update" in message


def test_layers_may_be_frozen_and_unfrozen_between_steps(tmp_path: Path) -> None:
    def toggle(model: nn.Sequential, step: int) -> None:
        model[0].requires_grad_(step % 2 == 0)

    def work(ctx: DistContext) -> bool:
        model, reference = stack(), stack()
        optimizer, plain = wrap_optimizer(model), adam(reference)
        for step in range(5):
            toggle(model, step)
            train_steps(ctx, model, optimizer, range(step, step + 1))
            toggle(reference, step)
            reference_steps(reference, plain, range(2), range(step, step + 1))
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same

    assert run_stages(2, work, tmp_path) == [True, True]

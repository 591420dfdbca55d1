"""Unusual loops, models and checkpoints either train correctly or are refused."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.decoupled import (
    adam,
    close_to,
    error_of,
    inputs_of,
    loss_of,
    reference_steps,
    stack,
    train_steps,
    wrap_optimizer,
)
from tests.gloo.pipelines import run_stages
from tests.gloo.replicas import run_with_failures


def test_second_backward_after_model_zero_grad_is_refused(tmp_path: Path) -> None:
    """A backward without a step, then the model's own zero_grad(): refused, not half averaged."""

    def work(ctx: DistContext) -> str:
        model = stack()
        optimizer = wrap_optimizer(model)
        train_steps(ctx, model, optimizer, range(2))
        loss_of(model, inputs_of(ctx.rank, 2)).backward()
        model.zero_grad()
        error = error_of(lambda: loss_of(model, inputs_of(ctx.rank, 3)).backward())
        optimizer.zero_grad()
        train_steps(ctx, model, optimizer, range(4, 5))
        optimizer.close()
        return error

    for error in run_stages(2, work, tmp_path):
        assert "call optimizer.zero_grad(), not the model's" in error


def test_step_after_only_no_sync_backwards_is_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        model = stack()
        optimizer = wrap_optimizer(model)
        train_steps(ctx, model, optimizer, range(2))
        with optimizer.no_sync():
            loss_of(model, inputs_of(ctx.rank, 2)).backward()
        assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
        errors = [error_of(lambda: optimizer.clip_grad_norm_(1.0)), error_of(optimizer.step)]
        optimizer.close()
        return errors

    for errors in run_stages(2, work, tmp_path):
        assert all("no_sync()" in text for text in errors)


def test_submodule_state_dict_has_the_last_update(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[bool]:
        model, reference = stack(), stack()
        optimizer, plain = wrap_optimizer(model), adam(reference)
        train_steps(ctx, model, optimizer, range(3))
        reference_steps(reference, plain, range(2), range(3))
        found = [close_to(model[2].state_dict(), reference[2].state_dict())]
        train_steps(ctx, model, optimizer, range(3, 4))
        zeros = {name: torch.zeros_like(value) for name, value in model[2].state_dict().items()}
        train_steps(ctx, model, optimizer, range(4, 5))
        model[2].load_state_dict(zeros)
        optimizer.synchronize()
        found.append(all(not value.any() for value in model[2].state_dict().values()))
        optimizer.close()
        return found

    assert run_stages(2, work, tmp_path) == [[True, True]] * 2


@pytest.mark.parametrize(
    ("differs", "expected"),
    [
        ("strides", "strides"),
        ("groups", "in group 1"),
        ("size", "bucket_bytes=200"),
        ("mode", "mode=all_reduce"),
        ("kind", "optimizer AdamW"),
        ("rate", "lr=0.01 in group 0"),
    ],
)
def test_inconsistent_settings_name_the_first_difference(
    differs: str, expected: str, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> str:
        model: nn.Module = stack()
        more: dict[str, Any] = {}
        optimizer = adam(model)
        if differs == "strides":
            model = nn.Conv2d(2, 4, 3)
            if ctx.rank:
                model = model.to(memory_format=torch.channels_last)
            optimizer = adam(model)
        elif differs == "groups" and ctx.rank:
            first, *others = model.parameters()
            optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.01)
        elif differs == "size" and ctx.rank:
            more["bucket_bytes"] = 400
        elif differs == "mode" and ctx.rank:
            more["mode"] = "all_reduce"
        elif differs == "kind" and ctx.rank:
            optimizer = torch.optim.SGD(model.parameters())
        elif differs == "rate" and ctx.rank:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return error_of(lambda: wrap_optimizer(model, optimizer, **more))

    for error in run_stages(2, work, tmp_path):
        assert expected in error


class Layerwise(torch.optim.SGD):
    """A subclass that may not be elementwise."""


class Odd(nn.Module):
    """A scalar, a complex, a frozen and an empty parameter, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("counts", torch.tensor([1, 2], dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * self.scale * self.waves.abs().sum() + self.frozen.sum() + self.empty.sum()


def test_scalar_complex_frozen_and_empty_parameters_train(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[bool, float, float]:
        model, reference = Odd(), Odd()
        optimizer, plain = wrap_optimizer(model), adam(reference)
        for step in range(4):
            if step == 3:
                model.frozen.requires_grad_(True)
                reference.frozen.requires_grad_(True)
            for rank in range(2):
                (loss_of(reference, inputs_of(rank, step)) / 2).backward()
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1).item()
            plain.step()
            plain.zero_grad()
            loss_of(model, inputs_of(ctx.rank, step)).backward()
            norm = optimizer.clip_grad_norm_(0.1).item()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same, norm, expected

    for same, norm, expected in run_stages(2, work, tmp_path):
        assert same
        assert norm == pytest.approx(expected, rel=1e-5)


def test_backward_of_graph_from_before_step_raises(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = stack()
        optimizer = wrap_optimizer(model)
        old = loss_of(model, inputs_of(ctx.rank, 0))
        train_steps(ctx, model, optimizer, range(2))
        error = error_of(old.backward, kind=RuntimeError)
        optimizer.zero_grad()
        return error

    for error in run_stages(2, work, tmp_path):
        assert "modified by an inplace operation" in error


def test_grad_scaler_works_on_rank_without_shards(tmp_path: Path) -> None:
    """Three workers train two numbers."""

    def work(ctx: DistContext) -> float:
        model = nn.Linear(1, 1)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(0.0)
        optimizer = wrap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            factor = torch.inf if (step, ctx.rank) == (1, 2) else 1.0
            scaler.scale(factor * model(torch.ones(1, 1)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        optimizer.synchronize()
        return model.weight.item()

    assert run_stages(3, work, tmp_path) == [0.0, 0.0, 0.0], "two steps of 0.5, one skipped"


def test_other_optimizers_need_elementwise_and_copies_are_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        model, half = stack(), stack().to(torch.bfloat16)
        errors = [error_of(lambda: wrap_optimizer(model, Layerwise(model.parameters())))]
        optimizer = wrap_optimizer(model, Layerwise(model.parameters(), lr=0.1), elementwise=True)
        train_steps(ctx, model, optimizer, range(1))
        errors.append(error_of(optimizer.__getstate__))
        optimizer.close()
        single = stack()
        before = adam(single)
        reference_steps(single, before, range(1), range(1))
        lower = wrap_optimizer(half)
        lower.load_state_dict(before.state_dict())  # of float32
        loss_of(half, inputs_of(ctx.rank, 0).to(torch.bfloat16)).backward()
        lower.step()
        lower.close()
        return errors

    for errors in run_stages(2, work, tmp_path):
        assert "elementwise=True" in errors[0]
        assert "state_dict()" in errors[1]


def test_incomplete_weights_after_peer_loss_raise(tmp_path: Path) -> None:
    """Rank 1 dies in its update: its shards of the new weights do not arrive."""

    def work(ctx: DistContext) -> list[str]:
        model = stack()
        inner = adam(model)
        optimizer = wrap_optimizer(model, inner)
        train_steps(ctx, model, optimizer, range(2))
        other_has_stepped = tmp_path / "stepped"

        def die(*_: object) -> None:
            deadline = time.monotonic() + 30  # its earlier messages must arrive
            while not other_has_stepped.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        if ctx.rank == 1:
            inner.register_step_pre_hook(die)
        train_steps(ctx, model, optimizer, range(2, 3))
        other_has_stepped.touch()
        errors = [error_of(model.state_dict, kind=PeerError) for _ in range(3)]
        return [*errors, error_of(lambda: model(inputs_of(0, 0)), kind=PeerError)]

    errors = run_with_failures(2, work, tmp_path, lost={1})[0]
    assert len(errors) == 4
    assert all("lost rank 1" in text for text in errors)


def test_early_weight_change_and_inner_step_are_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        model = stack()
        inner = adam(model)
        optimizer = wrap_optimizer(model, inner)
        train_steps(ctx, model, optimizer, range(2))
        with torch.no_grad():
            model[0].weight.mul_(0.9)
        errors = [error_of(lambda: model(inputs_of(0, 0)))]
        optimizer.synchronize()
        with torch.no_grad():
            model[0].weight.mul_(0.9)
        train_steps(ctx, model, optimizer, range(2, 3))
        errors.append(error_of(inner.step))
        errors.append(error_of(lambda: wrap_optimizer(model, optimizer)))
        optimizer.close()
        return errors

    for changed, stepped, twice in run_stages(2, work, tmp_path):
        assert "0.weight was changed" in changed
        assert "step() of the wrapped optimizer" in stepped
        assert "already a DistributedOptimizer" in twice


def test_ranks_in_different_calls_are_reported(tmp_path: Path) -> None:
    """Only rank 0 clips; no rank reads an object that was sent for another call."""

    def work(ctx: DistContext) -> str:
        model = stack()
        optimizer = wrap_optimizer(model)
        loss_of(model, inputs_of(ctx.rank, 0)).backward()
        if ctx.rank == 0:
            return error_of(lambda: optimizer.clip_grad_norm_(1.0))
        return error_of(optimizer.step)

    first, second = run_stages(2, work, tmp_path)
    assert "rank 0 is in clip_grad_norm_(), and rank 1 in step()" in first
    assert "rank 1 is in step(), and rank 0 in clip_grad_norm_()" in second


def test_clip_grad_value_on_shards_matches_single_process(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> bool:
        model, reference = stack(), stack()
        optimizer, plain = wrap_optimizer(model, bucket_bytes="1kB"), adam(reference)
        for step in range(3):
            for rank in range(2):
                (loss_of(reference, inputs_of(rank, step)) / 2).backward()
            nn.utils.clip_grad_value_(reference.parameters(), 0.01)
            plain.step()
            plain.zero_grad()
            loss_of(model, inputs_of(ctx.rank, step)).backward()
            shards = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_value_(shards, 0.01)
            optimizer.step()
            optimizer.zero_grad()
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same

    assert run_stages(2, work, tmp_path) == [True, True]


def test_parameters_without_values_are_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        on_meta, lazy = stack().to("meta"), nn.Sequential(nn.LazyLinear(2))
        return [error_of(partial(wrap_optimizer, x, adam(x))) for x in (on_meta, lazy)]

    for on_meta, lazy in run_stages(2, work, tmp_path):
        assert on_meta.startswith("a model with parameters on the meta device, without values")
        assert lazy.startswith("a model with lazy parameters, without values")

"""DistributedOptimizer refuses misuse with an error that names the fix."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from polyrhythm.errors import LaunchError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from tests.gloo.decoupled import (
    WIDTH,
    adam,
    error_of,
    inputs_of,
    loss_of,
    reference_steps,
    stack,
    train_steps,
    wrap_optimizer,
)
from tests.gloo.pipelines import run_single_process, run_stages


def test_learning_rates_can_be_read_after_an_abort_between_backward_and_step(
    tmp_path: Path,
) -> None:
    """A learning rate scheduler reads them; the gradients will not arrive any more."""

    def work(ctx: DistContext) -> list[float]:
        model = stack()
        optimizer = wrap_optimizer(model)
        for step in range(2):
            loss_of(model, inputs_of(ctx.rank, step)).backward()
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.abort()
        return [group["lr"] for group in optimizer.param_groups]

    assert run_stages(2, work, tmp_path) == [[0.01]] * 2


def test_misuse_errors_name_the_fix(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> dict[str, str]:
        model = stack()
        optimizer = wrap_optimizer(model)
        errors = {"no backward": error_of(optimizer.step)}
        loss_of(model, inputs_of(ctx.rank, 0)).backward()
        parameters = list(model.parameters())
        errors["clip"] = error_of(lambda: nn.utils.clip_grad_norm_(parameters, 1.0))
        errors["again"] = error_of(lambda: loss_of(model, inputs_of(ctx.rank, 1)).backward())
        optimizer.step()
        errors["forgotten"] = error_of(lambda: loss_of(model, inputs_of(ctx.rank, 1)).backward())
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        saved["state"][1]["exp_avg"] = torch.zeros(3, 3)
        errors["shape"] = error_of(lambda: optimizer.load_state_dict(saved))
        saved["param_groups"][0]["params"] = [0, 1]
        errors["groups"] = error_of(lambda: optimizer.load_state_dict(saved))
        optimizer.close()
        other = stack()
        for old in ("state_later", "pop_timings"):
            with pytest.raises(AttributeError) as renamed:
                getattr(optimizer, old)
            errors[old] = str(renamed.value)
        errors["foreign"] = error_of(lambda: wrap_optimizer(model, adam(other)))
        errors["swapped"] = error_of(lambda: DistributedOptimizer(model, adam(model)))
        muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
        errors["muon"] = error_of(lambda: wrap_optimizer(model, muon))
        wrapped = DistributedDataParallel(other)
        errors["ddp"] = error_of(lambda: wrap_optimizer(wrapped))
        sharded = stack()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        errors["fsdp2"] = error_of(lambda: wrap_optimizer(sharded))
        larger = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5 + ctx.rank))
        errors["differs"] = error_of(lambda: wrap_optimizer(larger))
        return errors

    for errors in run_stages(2, work, tmp_path):
        assert "step() without a backward()" in errors["no backward"]
        assert "optimizer.clip_grad_norm_(max_norm)" in errors["clip"]
        assert "with optimizer.no_sync()" in errors["again"]
        assert "call optimizer.zero_grad()" in errors["forgotten"]
        assert "exp_avg of 0.bias has shape (3, 3) in the checkpoint" in errors["shape"]
        assert "groups of [2]" in errors["groups"]
        assert "is now async_state_dict()" in errors["state_later"]
        assert "is now pop_stats()" in errors["pop_timings"]
        assert "not the model's" in errors["foreign"]
        assert "an optimizer of torch.optim, then the model" in errors["swapped"]
        assert "the optimizer Muon" in errors["muon"]
        assert "model.module" in errors["ddp"]
        assert "fully_shard" in errors["fsdp2"]
        assert "parameter 2 is '1.weight' (" in errors["differs"]


def test_moved_or_replaced_parameters_are_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> dict[str, str]:
        errors = {}
        model = stack()
        optimizer = wrap_optimizer(model)
        train_steps(ctx, model, optimizer, range(1))
        errors["replaced"] = error_of(
            lambda: model.load_state_dict(stack(1).state_dict(), assign=True)
        )
        optimizer.close()
        model = stack()
        optimizer = wrap_optimizer(model)
        train_steps(ctx, model, optimizer, range(1))
        model[0].weight.data = model[0].weight.data.clone()
        errors["moved"] = error_of(lambda: train_steps(ctx, model, optimizer, range(1, 2)))
        errors["mode"] = error_of(lambda: wrap_optimizer(stack(), mode="hierarchical"))
        errors["group"] = error_of(lambda: optimizer.add_param_group({"params": []}))
        sparse = nn.Sequential(nn.Embedding(4, WIDTH, sparse=True))
        lookup = wrap_optimizer(sparse, torch.optim.SGD(sparse.parameters()))
        errors["sparse"] = error_of(lambda: sparse(torch.tensor([1])).sum().backward())
        lookup.close()
        errors["no mode"] = error_of(lambda: wrap_optimizer(stack(), mode="best"))
        errors["old mode"] = error_of(
            lambda: wrap_optimizer(stack(), mode="hierarchical decoupled")
        )
        errors["size"] = error_of(lambda: wrap_optimizer(stack(), bucket_bytes=0))
        return errors

    for errors in run_stages(2, work, tmp_path):
        assert "0.weight was replaced" in errors["replaced"]
        assert "without assign=True" in errors["replaced"]
        assert "0.weight was moved" in errors["moved"]
        assert "two nodes or more" in errors["mode"]
        assert "a parameter group added" in errors["group"]
        assert "sparse=False" in errors["sparse"]
        assert "mode='best'" in errors["no mode"]
        assert "is now mode='hierarchical'" in errors["old mode"]
        assert "bucket_bytes=0" in errors["size"]


def test_use_after_destroy_process_group_is_refused(tmp_path: Path) -> None:
    """The error also comes in a job of one worker."""

    def work() -> list[str]:
        store = f"file://{tmp_path / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        model = stack()
        optimizer = wrap_optimizer(model)
        reference_steps(model, optimizer, range(1), range(2))
        optimizer.zero_grad()
        loss_of(model, inputs_of(0, 2)).backward()
        dist.destroy_process_group()
        return [error_of(optimizer.step), error_of(optimizer.state_dict)]

    for errors in run_single_process(work, tmp_path):
        assert "after destroy_process_group()" in errors


def test_error_without_process_group_names_torchrun() -> None:
    assert "torchrun" in error_of(lambda: wrap_optimizer(stack()), kind=LaunchError)

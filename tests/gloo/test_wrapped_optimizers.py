"""Optimizers and models that accelerate or Lightning Fabric has wrapped: used right, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.decoupled import adam, error_of, inputs_of, loss_of, stack, wrap_optimizer
from tests.gloo.pipelines import run_single_process, run_stages
from tests.gloo.scripts import import_before_fork, printed_losses, run_script

TIMEOUT = 30.0


@pytest.fixture(autouse=True, scope="module")
def _imports() -> None:
    import_before_fork()


def by_accelerate(optimizer: Optimizer) -> Optimizer:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)  # its state, which a wrapped optimizer reads
    return AcceleratedOptimizer(optimizer)


def by_fabric(optimizer: Optimizer) -> Optimizer:
    from lightning_fabric import Fabric

    wrapped: Any = Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer)
    return wrapped


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("wrap", [by_accelerate, by_fabric])
@pytest.mark.parametrize("decoupled", [False, True])
def test_group_sync_takes_wrapped_optimizers(wrap: Any, decoupled: bool, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[torch.Tensor]:
        model = stack()
        optimizer = wrap(adam(model))
        policy = (
            {"policy": "adaptive", "decoupled": True} if decoupled else {"policy": "all_reduce"}
        )
        with GroupSync(model, optimizer, **policy, timeout=TIMEOUT) as sync:
            for step in range(3):
                loss_of(model, inputs_of(ctx.rank, step)).backward()
                optimizer.step()
                sync.step()
                optimizer.zero_grad()
            sync.average_all()
        return weights(model)

    def alone() -> list[torch.Tensor]:
        model = stack()
        optimizer = adam(model)
        for step in range(3):
            sum(loss_of(model, inputs_of(rank, step)) / 2 for rank in range(2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    first, second = run_stages(2, work, tmp_path)
    torch.testing.assert_close(first, second)
    if not decoupled:
        torch.testing.assert_close(first, run_single_process(alone, tmp_path))


def test_distributed_optimizer_accumulates_inside_wrapper(tmp_path: Path) -> None:
    """Fabric's wrapper has the methods of the class, but not its attributes."""

    def work(ctx: DistContext) -> list[torch.Tensor]:
        model = stack()
        optimizer: Any = by_fabric(wrap_optimizer(model))
        for step in range(0, 4, 2):
            with optimizer.no_sync():
                loss_of(model, inputs_of(ctx.rank, step)).backward()
            loss_of(model, inputs_of(ctx.rank, step + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return weights(model)

    first, second = run_stages(2, work, tmp_path)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("wrap", [by_accelerate, by_fabric])
def test_distributed_optimizer_refuses_wrapped_optimizers(wrap: Any, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = stack()
        return error_of(lambda: wrap_optimizer(model, wrap(adam(model))))

    for error in run_stages(1, work, tmp_path):
        assert "AdamW inside a" in error
        assert "wrap the DistributedOptimizer instead" in error


def test_group_sync_refuses_models_in_ddp(tmp_path: Path) -> None:
    """DDP would average every gradient first, and wait for every straggler."""

    def work(ctx: DistContext) -> str:
        model = DistributedDataParallel(stack())
        return error_of(lambda: GroupSync(model, adam(model), "adaptive", timeout=TIMEOUT))

    for error in run_stages(2, work, tmp_path):
        assert "wrapped in DistributedDataParallel" in error
        assert "omit the model in accelerator.prepare()" in error


CHECKPOINT = """
import sys, torch, polyrhythm as pr
from functools import partial
from accelerate import Accelerator
from lightning_fabric import Fabric

torch.manual_seed(0)
inputs = torch.randn(8, 6)
model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
if sys.argv[1] == "accelerate":
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(pr.DistributedOptimizer(adamw, model, timeout=30))
    accelerator.register_for_checkpointing(model)
    save, load = accelerator.save_state, accelerator.load_state
else:
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    optimizer = fabric.setup_optimizers(pr.DistributedOptimizer(adamw, model, timeout=30))
    state = {"model": model, "optimizer": optimizer}
    save, load = partial(fabric.save, state=state), partial(fabric.load, state=state)
for step in range(6):
    if step == 2:
        save('saved')
    if step == 4:
        load('saved')
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item()!r}")
optimizer.optimizer.close()
"""


@pytest.mark.parametrize("library", ["accelerate", "fabric"])
def test_checkpoints_of_wrappers_hold_the_whole_state(library: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CHECKPOINT)
    outputs = run_script(tmp_path / "script.py", library, num_processes=2, folder=tmp_path)
    for output in outputs:
        losses = printed_losses(output)
        assert len(set(losses)) == 4
        assert losses[2:4] == losses[4:]

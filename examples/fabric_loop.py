"""Polyrhythm's parts in a loop of Lightning Fabric.

torchrun --nproc-per-node 2 examples/fabric_loop.py distributed_optimizer
torchrun --nproc-per-node 2 examples/fabric_loop.py group_sync
torchrun --nproc-per-node 2 examples/fabric_loop.py pipeline

Data and optimizer are set up by Fabric, but not the model: it would wrap the model in DDP.
"""

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr

BATCH_SIZE = 64  # of all processes
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
windows = text.unfold(0, 17, 1)[: 10 * BATCH_SIZE]  # 16 bytes and the next one
data = TensorDataset(windows[:, :-1], windows[:, -1])
torch.manual_seed(0)
model = nn.Sequential(
    nn.Sequential(nn.Embedding(256, 32), nn.Flatten()),
    nn.Sequential(nn.Linear(16 * 32, 256), nn.GELU()),
    nn.Sequential(nn.Linear(256, 256), nn.GELU()),
    nn.Linear(256, 256),
)


def distributed_optimizer() -> None:
    """In place of DDP: an all-reduce that hides behind backward and the next forward."""
    model.to(fabric.device)
    averaging = pr.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), model)
    optimizer = fabric.setup_optimizers(averaging)
    loader = fabric.setup_dataloaders(DataLoader(data, BATCH_SIZE // 2 // fabric.world_size))
    for number, (inputs, target) in enumerate(loader):
        is_accumulating = number % 2 == 0
        with averaging.no_sync() if is_accumulating else nullcontext(), fabric.autocast():
            loss = functional.cross_entropy(model(inputs), target)
            fabric.backward(loss / 2)
        if not is_accumulating:
            averaging.clip_grad_norm_(1.0)  # not fabric's: gradients are sharded
            optimizer.step()
            optimizer.zero_grad()
        fabric.print(f"loss {fabric.all_reduce(loss.detach()):.5f}")
    averaging.close()


def group_sync(policy: str = "adaptive") -> None:
    """In place of DDP: averages in groups, which do not wait for stragglers."""
    model.to(fabric.device)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=2e-3))
    loader = fabric.setup_dataloaders(DataLoader(data, BATCH_SIZE // 2 // fabric.world_size))
    sync = pr.GroupSync(model, optimizer, policy)
    for number, (inputs, target) in enumerate(loader):
        with fabric.autocast():
            loss = functional.cross_entropy(model(inputs), target)
        fabric.backward(loss / 2)
        if number % 2 == 1:
            sync.average_gradients()  # before they are clipped, if the policy averages them
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            sync.step()
            optimizer.zero_grad()
        fabric.print(f"loss {fabric.all_reduce(loss.detach()):.5f}")
    sync.average_all()  # the same model in all processes
    sync.close()


def pipeline() -> None:
    """A model that is split into as many stages as there are processes."""
    pipe = pr.Pipeline.from_sequential(
        model, loss_fn=functional.cross_entropy, n_microbatches=4, device=fabric.device
    )
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(pipe.module.parameters(), lr=2e-3))
    for batch in DataLoader(data, BATCH_SIZE):  # not set up: all stages read it all
        inputs, target = fabric.to_device(batch)
        losses: list[torch.Tensor] = []
        with fabric.autocast():
            pipe.step(*((inputs,) if pipe.is_first else ()), target=target, losses=losses)
        pipe.clip_grad_norm_(1.0)  # of all stages
        optimizer.step()
        optimizer.zero_grad()
        if pipe.is_last:
            print(f"loss {torch.stack(losses).mean():.5f}")
    pipe.close()


fabric = Fabric(strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]))
fabric.launch()
part, *options = sys.argv[1:]
parts = {f.__name__: f for f in (distributed_optimizer, group_sync, pipeline)}
parts[part](*options)

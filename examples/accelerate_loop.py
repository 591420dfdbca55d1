"""Polyrhythm's parts in a loop of accelerate.

torchrun --nproc-per-node 2 examples/accelerate_loop.py distributed_optimizer
torchrun --nproc-per-node 2 examples/accelerate_loop.py group_sync
torchrun --nproc-per-node 2 examples/accelerate_loop.py pipeline

`prepare` gets data and optimizer, but not the model: it would wrap the model in DDP. So that
`save_state` saves the model, too, call `accelerator.register_for_checkpointing(model)`.
"""

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr

BATCH_SIZE = 64  # of all processes
CPU = not torch.cuda.is_available()
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
    accelerator = Accelerator(cpu=CPU, gradient_accumulation_steps=2)
    model.to(accelerator.device)
    averaging = pr.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), model)
    loader = DataLoader(data, BATCH_SIZE // 2 // accelerator.num_processes)
    optimizer, loader = accelerator.prepare(averaging, loader)
    for inputs, target in loader:
        with accelerator.accumulate(averaging):  # calls its no_sync(), as it calls that of DDP
            loss = functional.cross_entropy(model(inputs), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:  # accelerator's own clipping needs whole gradients
                accelerator.unscale_gradients()  # only with fp16
                averaging.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean'):.5f}")
    averaging.close()


def group_sync(policy: str = "adaptive") -> None:
    """In place of DDP: averages in groups, which do not wait for stragglers."""
    accelerator = Accelerator(cpu=CPU, gradient_accumulation_steps=2)
    model.to(accelerator.device)
    loader = DataLoader(data, BATCH_SIZE // 2 // accelerator.num_processes)
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer, loader = accelerator.prepare(adamw, loader)
    sync = pr.GroupSync(model, optimizer, policy)
    for inputs, target in loader:
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(inputs), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                sync.average_gradients()  # before they are clipped, if the policy averages them
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if accelerator.sync_gradients:
                sync.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean'):.5f}")
    sync.average_all()  # the same model in all processes
    sync.close()


def pipeline() -> None:
    """A model that is split into as many stages as there are processes."""
    accelerator = Accelerator(cpu=CPU)
    pipe = pr.Pipeline.from_sequential(
        model, loss_fn=functional.cross_entropy, n_microbatches=4, device=accelerator.device
    )
    adamw = torch.optim.AdamW(pipe.module.parameters(), lr=2e-3)
    optimizer = accelerator.prepare(adamw)
    for inputs, target in DataLoader(data, BATCH_SIZE):  # not prepared: all stages read it all
        losses: list[torch.Tensor] = []
        arguments = (inputs.to(accelerator.device),) if pipe.is_first else ()
        with accelerator.autocast():
            pipe.step(*arguments, target=target.to(accelerator.device), losses=losses)
        pipe.clip_grad_norm_(1.0)  # of all stages
        optimizer.step()
        optimizer.zero_grad()
        if pipe.is_last:
            print(f"loss {torch.stack(losses).mean():.5f}")
    pipe.close()


part, *options = sys.argv[1:]
parts = {f.__name__: f for f in (distributed_optimizer, group_sync, pipeline)}
parts[part](*options)

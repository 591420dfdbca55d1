"""The script of `plain.py`, data-parallel by three lines around its loop, (1) to (3).

torchrun --nproc-per-node 2 examples/data_parallel.py
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import polyrhythm as pr

dist.init_process_group("gloo")  # (1) or "nccl", between GPUs of one site
device = f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu"
text = torch.tensor(list(Path(argparse.__file__).read_bytes()), device=device)
windows = text.unfold(0, 17, 1)  # 16 bytes and the next one
data = TensorDataset(windows[:-2000, :-1], windows[:-2000, -1])
held_out = TensorDataset(windows[-2000:, :-1], windows[-2000:, -1])


def build() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Embedding(256, 32), nn.Flatten()),
        nn.Sequential(nn.Linear(16 * 32, 256), nn.GELU()),
        nn.Sequential(nn.Linear(256, 256), nn.GELU()),
        nn.Linear(256, 256),
    )


torch.manual_seed(0)
model = build().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
optimizer = pr.DistributedOptimizer(optimizer, model)  # (2)
size = 256 // dist.get_world_size()
for inputs, target in DataLoader(data, size, sampler=DistributedSampler(data)):  # (3)
    functional.cross_entropy(model(inputs), target).backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.close()  # all weights of the last step

with torch.no_grad():
    loss = functional.cross_entropy(model(held_out.tensors[0]), held_out.tensors[1])
if dist.get_rank() == 0:
    print(f"held-out loss {loss:.3f}")

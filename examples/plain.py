"""Train a next-byte model on Python source code: a plain PyTorch script for one device."""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

rank = int(os.environ.get("LOCAL_RANK", 0))
device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
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
for inputs, target in DataLoader(data, batch_size=256, shuffle=True):
    functional.cross_entropy(model(inputs), target).backward()
    optimizer.step()
    optimizer.zero_grad()

with torch.no_grad():
    loss = functional.cross_entropy(model(held_out.tensors[0]), held_out.tensors[1])
print(f"held-out loss {loss:.3f}")

"""Train a next-byte model on Python source code, on any number of processes and machines."""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import polyrhythm as pr

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
trainer = pr.Trainer(
    build, functional.cross_entropy, lambda p: torch.optim.AdamW(p, lr=2e-3), data, batch_size=256
)
trainer.fit(max_steps=len(data) // 256)  # one epoch
loss = trainer.evaluate(held_out)
print(f"held-out loss {loss:.3f}")

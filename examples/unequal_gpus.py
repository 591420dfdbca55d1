"""Train on GPUs of unequal speed: each gets the micro-batches that it has time for.

torchrun --nproc-per-node 2 examples/unequal_gpus.py
polyrhythm train examples/unequal_gpus.py --local 2 -- --slow 1    # without GPUs: process 1 sleeps

The batch stays the same and gradients are weighted by samples, so losses are those of one GPU.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import polyrhythm as pr

parser = argparse.ArgumentParser()
parser.add_argument("--slow", help="the rank of a process that sleeps in every micro-batch")
slow_rank = parser.parse_args().slow
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
windows = text.unfold(0, 17, 1)  # 16 bytes and the next one
data = TensorDataset(windows[:-2000, :-1], windows[:-2000, -1])
held_out = TensorDataset(windows[-2000:, :-1], windows[-2000:, -1])


def build() -> nn.Module:
    model = nn.Sequential(
        nn.Sequential(nn.Embedding(256, 32), nn.Flatten()),
        nn.Sequential(nn.Linear(16 * 32, 256), nn.GELU()),
        nn.Sequential(nn.Linear(256, 256), nn.GELU()),
        nn.Linear(256, 256),
    )
    if os.environ.get("RANK", "0") == slow_rank:
        model[0].register_forward_hook(lambda *_: time.sleep(0.02))
    return model


trainer = pr.Trainer(
    build,
    functional.cross_entropy,
    pr.adamw(lr=2e-3),
    data,
    batch_size=256,
    microbatch_size=16,  # small: they are what is shared out
    sync="balanced",
)
result = trainer.fit(max_steps=50)
loss = trainer.evaluate(held_out)
shares = ", ".join(f"p{p.pipeline} {p.num_samples}" for p in result.steps[-1].pipelines)
print(f"samples of the last step: {shares}; held-out loss {loss:.3f}")

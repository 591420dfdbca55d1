"""Models in stages that train without communication: any split gives bit-identical results.

A gradient depends on the value of its parameter and the number of the step only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from polyrhythm.run.pipeline.partition import ModelPartition, split_layers, split_sequential

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.02, betas=(0.8, 0.95)),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
}


def sequential_model() -> nn.Sequential:
    """Build six layers, some with buffers, one without parameters."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 5),
        nn.BatchNorm1d(5),
        nn.Tanh(),
        nn.Linear(5, 5).to(torch.bfloat16),
        nn.Linear(5, 4),
        nn.BatchNorm1d(4),
    )


class TiedLanguageModel(nn.Module):
    """A language model whose head shares the weights of its embedding."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def sequential_stage(stage: int, num_stages: int) -> ModelPartition:
    return split_sequential(sequential_model(), stage=stage, num_stages=num_stages)


def tied_model_stage(stage: int, num_stages: int) -> ModelPartition:
    return split_layers(
        TiedLanguageModel(),
        stage=stage,
        num_stages=num_stages,
        layers="layers",
        prologue=["embed"],
        epilogue=["norm", "head"],
    )


def param_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Make groups with and without decay (for one dimension); a stage may have only one."""
    wide = [p for p in module.parameters() if p.dim() > 1]
    flat = [p for p in module.parameters() if p.dim() <= 1]
    return [
        {"params": parameters, **more}
        for parameters, more in ((wide, {"weight_decay": 0.3}), (flat, {"weight_decay": 0.0}))
        if parameters
    ]


def train(module: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    """Run steps `first` to `last - 1`, with a changing learning rate."""
    for step in range(first, last):
        for parameter in module.parameters():
            parameter.grad = torch.sin(3 * parameter.detach() + step)
        for buffer in module.buffers():
            buffer.add_(step)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()


def state(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return model and optimizer state, by names of the whole model."""
    found = {name: value.clone() for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}: {key}"] = value.clone()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = next(n for n, p in module.named_parameters() if p is parameter)
            found[f"{name}: lr, decay"] = torch.tensor([group["lr"], group["weight_decay"]])
    return found

"""A model whose compute is sleep: each layer has real weights and real gradients, and uses no core.

What a forward saw of the weights goes into the gradient, as does the rank: a side that computes
with weights that are not there yet, or averages wrongly, ends with others.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.types import Bytes, Seconds


class Layer(nn.Module):
    def __init__(self, nbytes: Bytes, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, nbytes // 4))
        self.rank = rank
        self.forward_time: Seconds = 0.0
        self.backward_time: Seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return slept


class Layers(nn.Sequential):
    def __init__(self, num_layers: int, layer_bytes: Bytes, rank: int) -> None:
        super().__init__(*(Layer(layer_bytes, rank) for _ in range(num_layers)))

    def set_pace(self, forward: Seconds, backward: Seconds) -> None:
        """Of all layers together."""
        for layer in self:
            assert isinstance(layer, Layer), "made of these"
            layer.forward_time, layer.backward_time = forward / len(self), backward / len(self)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Layer) -> Tensor:
        ctx.layer, ctx.seen = layer, weight.square().mean()
        ctx.save_for_backward(weight)
        time.sleep(layer.forward_time)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        layer: Layer = ctx.layer
        (weight,) = ctx.saved_tensors
        time.sleep(layer.backward_time)
        return gradients[0], weight * (1 + 0.1 * layer.rank) + ctx.seen, None

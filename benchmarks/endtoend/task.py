"""What both sides train: a small GPT of equal layers on the source of Python's standard library.

It stands for a large one. Of GPT3-XL, a layer's gradients have 24 times the bytes of what a
sequence sends from stage to stage; with a width of 48 and a context of 22 bytes a layer has 24.1
times those of a message and its envelope. The embedding is part of the first layer and the head
part of the last, which have half as much again to average.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset

from polyrhythm.run.demo.gpt import Embedding, Head
from polyrhythm.run.demo.shape import GPTShape
from polyrhythm.run.demo.text import standard_library
from polyrhythm.types import Bytes

SEED = 1  # of weights and of the order of samples
WIDTH, NUM_HEADS, CONTEXT = 48, 4, 22
NUMBER: Bytes = 4  # of a weight, a gradient, an activation
ACTIVATIONS: Bytes = WIDTH * CONTEXT * NUMBER  # of one sample, between stages
_PEAK = 3e-3  # the learning rate
_WARM_UP = 0.1  # of all steps
_TEXT: Bytes = 4_000_000
_HELD_OUT = 10  # one window of so many


class Block(nn.Module):
    """A transformer block in as few calls as it goes: 16 processes share two cores."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm = nn.Parameter(torch.ones(2, WIDTH))  # its weight, and its bias
        self.second_norm = nn.Parameter(torch.ones(2, WIDTH))
        self.attention_in = nn.Parameter(torch.empty(3 * WIDTH, WIDTH))
        self.attention_out = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.up = nn.Parameter(torch.empty(4 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, 4 * WIDTH))
        for matrix in (self.attention_in, self.attention_out, self.up, self.down):
            nn.init.normal_(matrix, std=0.5 * matrix.shape[1] ** -0.5)
        with torch.no_grad():
            self.first_norm[1], self.second_norm[1] = 0.0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = functional.layer_norm(x, (width,), *self.first_norm)
        heads = functional.linear(normed, self.attention_in).view(batch, length, 3, NUM_HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        x = x + functional.linear(mixed, self.attention_out)
        normed = functional.layer_norm(x, (width,), *self.second_norm)
        hidden = functional.gelu(functional.linear(normed, self.up))
        return x + functional.linear(hidden, self.down)


def model(num_layers: int) -> nn.Sequential:
    """One module per layer; the same weights whoever makes it."""
    shape = GPTShape(num_blocks=num_layers, width=WIDTH, context=CONTEXT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        embedding, head = Embedding(shape), Head(shape)
        blocks = [Block() for _ in range(num_layers)]
    first, last = nn.Sequential(embedding, blocks[0]), nn.Sequential(blocks[-1], head)
    return nn.Sequential(first, *blocks[1:-1], last)


def layer_bytes(num_layers: int) -> list[Bytes]:
    """Of the parameters of each layer; nothing is computed, so that a process may fork later."""
    with torch.device("meta"):
        made = model(num_layers)
    return [NUMBER * sum(p.numel() for p in layer.parameters()) for layer in made]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Some of a text's windows, which follow one another; targets are one byte ahead."""

    def __init__(self, text: bytes, places: NDArray[np.int64]) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        start = int(self.places[number]) * CONTEXT
        window = self._text[start : start + CONTEXT + 1].long()
        return window[:-1], window[1:]


def texts(num_held_out: int) -> tuple[Windows, Windows]:
    """To learn from; and some of every tenth window, from all of the text, which nobody learns."""
    text = standard_library(_TEXT)
    places = np.arange((len(text) - 1) // CONTEXT)
    is_held_out = places % _HELD_OUT == 0
    held_out = places[is_held_out]
    some = held_out[:: max(1, len(held_out) // max(1, num_held_out))][:num_held_out]
    return Windows(text, places[~is_held_out]), Windows(text, some)


def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=_PEAK, betas=(0.9, 0.95))


def rates(num_steps: int) -> Callable[[Optimizer], LRScheduler]:
    """Up within the first steps, and then down to nothing."""

    def rate(step: int) -> float:
        part = (step + 1) / (num_steps + 1)
        return min(part / _WARM_UP, (1 - part) / (1 - _WARM_UP))

    return lambda optimizer: LambdaLR(optimizer, rate)

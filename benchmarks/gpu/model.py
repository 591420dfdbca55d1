"""The GPT that the benchmark trains, its random tokens, and where and how all sides compute."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import polyrhythm as pr

DEVICE = torch.device("cuda", 0)
adamw = pr.adamw(lr=3e-4, fused=True)


def autocast() -> torch.autocast:
    """Return the precision of all loops that do not say another: bfloat16."""
    return torch.autocast(DEVICE.type, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Size:
    """A GPT by its layers; `batch` sequences of `context` tokens make a step."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int = 16_384


# For a smoke test.
TINY = Size(layers=2, width=64, heads=2, context=64, batch=8, vocabulary=512)
GPT_30M = Size(layers=8, width=448, heads=7, context=1024, batch=12)  # 13 ms a step on an H200
GPT_125M = Size(layers=12, width=832, heads=13, context=1024, batch=8)
GPT_350M = Size(layers=26, width=1024, heads=16, context=1024, batch=8)
GPT_1300M = Size(layers=24, width=2048, heads=16, context=1024, batch=8)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return hidden


class Embedding(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.randn(size.context, size.width) / math.sqrt(size.width))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return embedded


def gpt(size: Size, *, compiled: bool = False) -> nn.Sequential:
    """Build the model on the GPU, always with the same weights; a CPU takes seconds to draw them.

    `compiled` compiles each block, as users do.
    """
    torch.manual_seed(0)
    with DEVICE:
        blocks = [Block(size) for _ in range(size.layers)]
        norm, head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        model = nn.Sequential(Embedding(size), *blocks, norm, head)
    if compiled:
        for block in blocks:
            block.compile()
    return model


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class RandomTokens(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of random tokens in main memory, some of them, again and again."""

    def __init__(self, size: Size, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = 64, size.context + 1
        self._tokens = torch.randint(size.vocabulary, shape, generator=generator)
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = self._tokens[index % len(self._tokens)]
        return tokens[:-1], tokens[1:]

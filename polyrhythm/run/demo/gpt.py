"""A small byte-level GPT as a list of layers, so that a stage builds only its own layers.

Layer 0 embeds bytes, layers 1 to num_blocks are transformer blocks (pre-norm, arXiv:2002.04745),
the last is the output head. Each layer is initialised from its own seed: the stages that separate
processes build together equal the whole model.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.run.demo.job import GPTShape

NUM_BYTES = 256


class Embedding(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.byte = nn.Embedding(NUM_BYTES, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        return self.byte(text) + self.position(positions)


class TransformerBlock(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention_in = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        return x + self.mlp(x)

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention_in(x).view(batch, length, 3, self.num_heads, -1).transpose(1, 3)
        query, key, value = heads.unbind(dim=2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))


class Head(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.logits = nn.Linear(shape.width, NUM_BYTES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def build_layers(shape: GPTShape, layers: range, *, seed: int) -> nn.Sequential:
    """Build some layers of the model; the same seed gives the same weights in any process."""
    kinds = [Embedding, *[TransformerBlock] * shape.num_blocks, Head]
    built = []
    with torch.random.fork_rng(devices=[]):
        for layer in layers:
            torch.manual_seed(seed * 100_003 + layer)
            built.append(kinds[layer](shape))
    return nn.Sequential(*built)


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

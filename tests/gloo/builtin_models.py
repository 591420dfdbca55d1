"""Small torch models of the built-in shapes, with the layers that the formulas count.

BERT is Hugging Face's own. GPT and ResNet are written here: their parameters are those of GPT-2
and of torchvision's ResNet-50.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class GPTEmbedding(nn.Module):
    def __init__(self, vocabulary: int, sequence: int, hidden: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(sequence, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word(tokens) + self.position(torch.arange(tokens.shape[1]))


class GPTBlock(nn.Module):
    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.into, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.inner = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.into(self.norms[0](x)).split(hidden, dim=2)
        heads = [p.view(batch, length, self.num_heads, -1).transpose(1, 2) for p in parts]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.inner(self.norms[1](x))


def gpt(blocks: int, hidden: int, sequence: int, heads: int, vocabulary: int) -> nn.Sequential:
    head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False))
    return nn.Sequential(
        GPTEmbedding(vocabulary, sequence, hidden),
        *(GPTBlock(hidden, heads) for _ in range(blocks)),
        head,
    )


class FirstOutput(nn.Module):
    """Returns only the first output of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        returned = self.layer(x)
        return returned[0] if isinstance(returned, tuple) else returned


def bert(blocks: int, hidden: int, heads: int, vocabulary: int) -> nn.Sequential:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    layers = [model.bert.embeddings, *map(FirstOutput, model.bert.encoder.layer), model.cls]
    return nn.Sequential(*layers)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.narrow = _convolution(channels, width, 1, 1)
        self.middle = _convolution(width, width, 3, stride)
        self.wide = _convolution(width, 4 * width, 1, 1)
        changes = stride > 1 or channels != 4 * width
        self.shortcut = _convolution(channels, 4 * width, 1, stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.middle(functional.relu(self.narrow(x))))
        return functional.relu(
            self.wide(inner) + (x if self.shortcut is None else self.shortcut(x))
        )


def resnet50() -> nn.Sequential:
    stem = nn.Sequential(*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    layers: list[nn.Module] = [stem]
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(channels, width, 1 if number else stride))
            channels = 4 * width
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return nn.Sequential(*layers, head)

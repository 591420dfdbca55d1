"""Learning tasks: Python's own source for a byte-level GPT, and noisy digits for a small CNN.

Both are small enough that eight workers with real gradients leave two cores half idle, and hard
enough that a loss remains to compare: clean digits are learned to a loss near zero, of which two
per cent are chance, so these are shifted and covered with noise. The loss is the mean cross-entropy
over a part of the data that no worker trains on.
"""

import random
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from polyrhythm.errors import LaunchError
from polyrhythm.run.averaging.reduced_variance import ReducedVarianceAdamW
from polyrhythm.run.demo.job import GPTShape
from polyrhythm.run.demo.train import ByteText, build_layers, next_byte_loss, standard_library

Batch = tuple[Tensor, Tensor]
_BATCH_SIZE = 32
_NUM_HELD_OUT = 256  # windows of the text
_NUM_COPIES = 4  # of each held-out digit, in noise of its own


class LearningTask(Protocol):
    """A model, its data and its optimizer; a seed fixes the weights and the batches."""

    name: str
    max_grad_norm: float  # of a worker's gradient: longer ones are clipped
    held_out: Batch

    def build(self, seed: int) -> nn.Module: ...
    def optimizer(self, model: nn.Module, lr: float, *, of_models: bool) -> Optimizer:
        """`of_models`: models are averaged after its steps, instead of gradients before them."""

    def draw(self, seed: int, worker: int, step: int) -> Batch:
        """Return the batch of one worker's step; each worker has its own sampler."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...


def num_weights(task: LearningTask) -> int:
    """Count without computing: a process that has computed must not fork."""
    with torch.device("meta"):
        return sum(p.numel() for p in task.build(0).parameters())


class SourceText:
    """Next bytes of Python's standard library; a tenth of it, at the end, is held out."""

    name = "gpt"
    max_grad_norm = 0.3  # without it, some seeds spend half of the training recovering

    def __init__(self) -> None:
        self.shape = GPTShape(num_blocks=2, width=48, context=32)
        text = standard_library(4_000_000)
        cut = len(text) * 9 // 10
        self._text = ByteText(text[:cut], context=self.shape.context)
        held_out = ByteText(text[cut:], context=self.shape.context)
        self.held_out = _draw(held_out, _NUM_HELD_OUT, "0/0/0/0")

    def build(self, seed: int) -> nn.Module:
        return self.layers(range(self.shape.num_layers), seed)

    def layers(self, which: range, seed: int) -> nn.Module:
        return build_layers(self.shape, which, seed=seed)

    def optimizer(self, model: nn.Module, lr: float, *, of_models: bool) -> Optimizer:
        if of_models:
            return ReducedVarianceAdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
        return AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)

    def draw(self, seed: int, worker: int, step: int) -> Batch:
        return _draw(self._text, _BATCH_SIZE, f"{seed}/{step}/{worker}/0")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return next_byte_loss(model(batch[0]), batch[1])


def _draw(text: ByteText, num_samples: int, key: str) -> Batch:
    draw = random.Random(key)
    drawn = [text[draw.randrange(len(text))] for _ in range(num_samples)]
    inputs, targets = zip(*drawn, strict=True)
    return torch.stack(inputs), torch.stack(targets)


class NoisyDigits:
    """scikit-learn's 8x8 digits, shifted by up to a pixel, in noise; a fifth is held out."""

    name = "cnn"
    max_grad_norm = 1.0
    NOISE = 0.7  # of the standard deviation of all pixels

    def __init__(self) -> None:
        images, labels = _digits()
        order = list(range(len(labels)))
        random.Random("digits").shuffle(order)
        cut = len(order) * 4 // 5
        self._images, self._labels = images[order[:cut]], labels[order[:cut]]
        rest = np.tile(order[cut:], _NUM_COPIES)
        noisy = _disturbed(images[rest], self.NOISE, np.random.default_rng(0))
        self.held_out = torch.from_numpy(noisy), torch.from_numpy(labels[rest])

    def build(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(8, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(16 * 4 * 4, 10),
            )

    def optimizer(self, model: nn.Module, lr: float, *, of_models: bool) -> Optimizer:
        return SGD(model.parameters(), lr=lr, momentum=0.9)

    def draw(self, seed: int, worker: int, step: int) -> Batch:
        chance = np.random.default_rng((seed, worker, step))
        which = chance.integers(len(self._labels), size=_BATCH_SIZE)
        noisy = _disturbed(self._images[which], self.NOISE, chance)
        return torch.from_numpy(noisy), torch.from_numpy(self._labels[which])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images (count, 8, 8) with mean 0 and deviation 1 over all pixels, and labels."""
    try:
        from sklearn.datasets import load_digits  # here: it takes a second to import
    except ImportError:
        raise LaunchError(
            "no scikit-learn, whose digits the benchmark learns",
            expected="the package scikit-learn, which comes with the extra `dev`",
            fix="pip install scikit-learn",
        ) from None
    images, labels = load_digits(return_X_y=True)
    images = (images - images.mean()) / images.std()
    return images.reshape(-1, 8, 8).astype(np.float32), labels.astype(np.int64)


def _disturbed(images: np.ndarray, noise: float, chance: np.random.Generator) -> np.ndarray:
    """Return images (count, 1, 8, 8), shifted by up to a pixel in each direction, with noise."""
    count, height, width = images.shape
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)), mode="edge")
    down, right = chance.integers(3, size=(2, count, 1, 1))
    rows, columns = down + np.arange(height)[:, None], right + np.arange(width)
    shifted = padded[np.arange(count)[:, None, None], rows, columns]
    noisy: np.ndarray = shifted + noise * chance.standard_normal(shifted.shape, dtype=np.float32)
    return noisy[:, None].astype(np.float32)

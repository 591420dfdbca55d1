"""Training problems for virtual time: small enough for NumPy, with unequal shards per pipeline.

Every pipeline has its own shard, and draws its k-th mini-batch from the seed, the shard and k
alone: policies and stragglers do not change it. The loss is that of all shards together. Parameters
are one vector, in forward order, so that the stages of a pipeline are consecutive parts of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import UserError

Vector = NDArray[np.float64]
_PART = 128  # samples


class TrainingProblem(Protocol):
    @property
    def num_shards(self) -> int: ...

    def start(self) -> Vector:
        """Initial weights of all workers."""

    def loss(self, weights: Vector) -> float:
        """Loss over all shards."""

    def gradient(self, weights: Vector, shard: int, step: int) -> Vector:
        """Gradient of the `step`-th mini-batch of a shard."""


@dataclass(frozen=True)
class Quadratic:
    """One quadratic per shard, with its own minimum and curvatures, and noisy gradients.

    The loss is relative to its minimum. Consensus matters because curvatures differ: with equal
    ones, the mean of the workers would not depend on the distances between them.
    """

    curvatures: Vector  # [shard, parameter]
    minima: Vector  # [shard, parameter]
    noise: float  # standard deviation of each entry of a gradient
    seed: int

    @property
    def num_shards(self) -> int:
        return len(self.minima)

    @property
    def minimum(self) -> Vector:
        """Minimum of the loss over all shards."""
        minimum: Vector = (self.curvatures * self.minima).sum(0) / self.curvatures.sum(0)
        return minimum

    def start(self) -> Vector:
        return np.zeros(self.minima.shape[1])

    def loss(self, weights: Vector) -> float:
        difference = weights - self.minimum
        return float(0.5 * (self.curvatures.mean(0) * difference * difference).sum())

    def gradient(self, weights: Vector, shard: int, step: int) -> Vector:
        rng = np.random.default_rng((self.seed, shard, step))
        exact: Vector = self.curvatures[shard] * (weights - self.minima[shard])
        return exact + self.noise * rng.standard_normal(len(exact))


def quadratic(
    num_shards: int,
    *,
    num_parameters: int = 64,
    condition: float = 20.0,  # of curvatures: the largest over the smallest
    minima_spread: float = 1.0,  # of the shards, relative to their distance from the start
    noise: float = 1.0,
    seed: int = 0,
) -> Quadratic:
    rng = np.random.default_rng((seed, num_shards))
    scales = np.geomspace(1 / condition, 1.0, num_parameters)
    rng.shuffle(scales)  # else some stages would have only flat parameters
    shape = (num_shards, num_parameters)
    common = rng.choice([-1.0, 1.0], num_parameters)
    return Quadratic(
        curvatures=scales * rng.uniform(0.5, 1.5, shape),
        minima=common + minima_spread * rng.standard_normal(shape),
        noise=noise,
        seed=seed,
    )


@dataclass(frozen=True)
class Perceptron:
    """A classifier of a few tanh layers with cross-entropy loss."""

    sizes: tuple[int, ...]  # of its layers, inputs and classes included
    inputs: Vector  # [sample, input]
    labels: NDArray[np.int64]
    shards: tuple[NDArray[np.int64], ...]  # indexes of samples
    batch_size: int
    seed: int

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def start(self) -> Vector:
        return _random_weights(self.sizes, np.random.default_rng((self.seed, 1)))

    def loss(self, weights: Vector) -> float:
        # In parts: NumPy would split larger products over threads, which costs more than it gains.
        total = 0.0
        for first in range(0, len(self.labels), _PART):
            part = slice(first, first + _PART)
            scores = _outputs(weights, self.sizes, self.inputs[part])[-1]
            labels = self.labels[part]
            total -= float(np.log(_softmax(scores)[np.arange(len(labels)), labels]).sum())
        return total / len(self.labels)

    def gradient(self, weights: Vector, shard: int, step: int) -> Vector:
        rng = np.random.default_rng((self.seed, 2, shard, step))
        batch = rng.choice(self.shards[shard], self.batch_size)
        outputs = _outputs(weights, self.sizes, self.inputs[batch])
        error = _softmax(outputs[-1])
        error[np.arange(len(batch)), self.labels[batch]] -= 1
        error /= len(batch)
        gradients = []
        layers = _layers(weights, self.sizes)
        for (matrix, _), below in zip(reversed(layers), outputs[-2::-1], strict=True):
            gradients += [error.sum(0), (below.T @ error).ravel()]
            error = (error @ matrix.T) * (1 - below * below)
        return np.concatenate(gradients[::-1])


def perceptron(
    num_shards: int,
    *,
    hidden: Sequence[int] = (32,),
    num_inputs: int = 16,
    num_classes: int = 8,
    num_samples: int = 2048,
    skew: float = 0.5,  # fraction of each shard that is sorted by class; 0: equal shards
    batch_size: int = 16,
    seed: int = 0,
) -> Perceptron:
    """Create a problem with labels of a wider network, a tenth of them wrong: none fits all."""
    if not 0 <= skew <= 1 or num_samples < num_shards:
        raise UserError(
            f"skew={skew:g}, {num_samples} samples for {num_shards} shards",
            expected="a fraction, and at least one sample for each shard",
            fix="use skew=0.5 and some thousand samples",
        )
    rng = np.random.default_rng((seed, 0))
    inputs = rng.standard_normal((num_samples, num_inputs))
    wider = (num_inputs, 2 * max(hidden, default=16), num_classes)
    labels = _outputs(3 * _random_weights(wider, rng), wider, inputs)[-1].argmax(1)
    wrong = rng.random(num_samples) < 0.1
    labels[wrong] = rng.integers(0, num_classes, int(wrong.sum()))
    order = rng.permutation(num_samples)
    by_class = order[: int(skew * num_samples)]
    by_class = by_class[np.argsort(labels[by_class], kind="stable")]
    parts = (by_class, order[len(by_class) :])
    split = [np.array_split(part, num_shards) for part in parts]
    return Perceptron(
        sizes=(num_inputs, *hidden, num_classes),
        inputs=inputs,
        labels=labels,
        shards=tuple(np.concatenate(both) for both in zip(*split, strict=True)),
        batch_size=batch_size,
        seed=seed,
    )


def _random_weights(sizes: Sequence[int], rng: np.random.Generator) -> Vector:
    """Matrices that preserve the variance of activations, and zero biases."""
    parts = []
    for above, below in pairwise(sizes):
        parts += [rng.standard_normal(above * below) / np.sqrt(above), np.zeros(below)]
    return np.concatenate(parts)


def _layers(weights: Vector, sizes: Sequence[int]) -> list[tuple[Vector, Vector]]:
    layers, first = [], 0
    for above, below in pairwise(sizes):
        end = first + above * below
        layers.append((weights[first:end].reshape(above, below), weights[end : end + below]))
        first = end + below
    return layers


def _outputs(weights: Vector, sizes: Sequence[int], inputs: Vector) -> list[Vector]:
    """The inputs, then the outputs of each layer; the last is without tanh."""
    layers, outputs = _layers(weights, sizes), [inputs]
    for number, (matrix, bias) in enumerate(layers, 1):
        sums = outputs[-1] @ matrix + bias
        outputs.append(np.tanh(sums) if number < len(layers) else sums)
    return outputs


def _softmax(scores: Vector) -> Vector:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    softmax: Vector = powers / powers.sum(1, keepdims=True)
    return softmax

"""Problems to train on in virtual time: small enough for NumPy, yet not the same for all pipelines.

Every pipeline has a shard of its own, and draws its k-th mini-batch from the seed, itself and k
alone: however policies and stragglers change the order of things, it is the same mini-batch. The
loss is that of all shards together. Parameters are one vector, in the order in which a forward uses
them, so that the stages of a pipeline are consecutive parts of it.
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
        """The weights that all workers begin with."""

    def loss(self, weights: Vector) -> float:
        """Over all shards."""

    def gradient(self, weights: Vector, shard: int, step: int) -> Vector:
        """Of a mini-batch of a shard: its `step`-th."""


@dataclass(frozen=True)
class Quadratic:
    """Bowls with minima and curvatures of their own, and gradients with noise.

    The loss is counted from its lowest value. Curvatures that differ are what makes consensus
    matter: with equal ones, the mean of the workers moves alike wherever each of them is.
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
        """Of all shards together."""
        found: Vector = (self.curvatures * self.minima).sum(0) / self.curvatures.sum(0)
        return found

    def start(self) -> Vector:
        return np.zeros(self.minima.shape[1])

    def loss(self, weights: Vector) -> float:
        away = weights - self.minimum
        return float(0.5 * (self.curvatures.mean(0) * away * away).sum())

    def gradient(self, weights: Vector, shard: int, step: int) -> Vector:
        draw = np.random.default_rng((self.seed, shard, step))
        exact: Vector = self.curvatures[shard] * (weights - self.minima[shard])
        return exact + self.noise * draw.standard_normal(len(exact))


def quadratic(
    num_shards: int,
    *,
    num_parameters: int = 64,
    condition: float = 20.0,  # of curvatures: the largest over the smallest
    apart: float = 1.0,  # shards' minima, in their distance from the start; 0: all the same
    noise: float = 1.0,
    seed: int = 0,
) -> Quadratic:
    draw = np.random.default_rng((seed, num_shards))
    scales = np.geomspace(1 / condition, 1.0, num_parameters)
    draw.shuffle(scales)  # else some stages were all flat
    shape = (num_shards, num_parameters)
    common = draw.choice([-1.0, 1.0], num_parameters)
    return Quadratic(
        curvatures=scales * draw.uniform(0.5, 1.5, shape),
        minima=common + apart * draw.standard_normal(shape),
        noise=noise,
        seed=seed,
    )


@dataclass(frozen=True)
class Perceptron:
    """A network of a few tanh layers that learns to classify; cross entropy."""

    sizes: tuple[int, ...]  # of its layers, inputs and classes included
    inputs: Vector  # [sample, input]
    labels: NDArray[np.int64]
    shards: tuple[NDArray[np.int64], ...]  # which samples
    batch_size: int
    seed: int

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def start(self) -> Vector:
        draw = np.random.default_rng((self.seed, 1))
        return _random_weights(self.sizes, draw)

    def loss(self, weights: Vector) -> float:
        # In parts: larger products are spread over threads, for which they are not large enough.
        total = 0.0
        for first in range(0, len(self.labels), _PART):
            part = slice(first, first + _PART)
            scores = _outputs(weights, self.sizes, self.inputs[part])[-1]
            labels = self.labels[part]
            total -= float(np.log(_softmax(scores)[np.arange(len(labels)), labels]).sum())
        return total / len(self.labels)

    def gradient(self, weights: Vector, shard: int, step: int) -> Vector:
        draw = np.random.default_rng((self.seed, 2, shard, step))
        batch = draw.choice(self.shards[shard], self.batch_size)
        outputs = _outputs(weights, self.sizes, self.inputs[batch])
        error = _softmax(outputs[-1])
        error[np.arange(len(batch)), self.labels[batch]] -= 1
        error /= len(batch)
        found = []
        layers = _layers(weights, self.sizes)
        for (matrix, _), below in zip(reversed(layers), outputs[-2::-1], strict=True):
            found += [error.sum(0), (below.T @ error).ravel()]
            error = (error @ matrix.T) * (1 - below * below)
        return np.concatenate(found[::-1])


def perceptron(
    num_shards: int,
    *,
    hidden: Sequence[int] = (32,),
    num_inputs: int = 16,
    num_classes: int = 8,
    num_samples: int = 2048,
    skew: float = 0.5,  # of each shard, the part that has been dealt by class; 0: shards alike
    batch_size: int = 16,
    seed: int = 0,
) -> Perceptron:
    """Labels come from a wider network, with a tenth of them wrong: no model fits them all."""
    if not 0 <= skew <= 1 or num_samples < num_shards:
        raise UserError(
            f"skew={skew:g}, {num_samples} samples for {num_shards} shards",
            expected="a fraction, and at least one sample for each",
            fix="use skew=0.5 and some thousand samples",
        )
    draw = np.random.default_rng((seed, 0))
    inputs = draw.standard_normal((num_samples, num_inputs))
    wider = (num_inputs, 2 * max(hidden, default=16), num_classes)
    labels = _outputs(3 * _random_weights(wider, draw), wider, inputs)[-1].argmax(1)
    wrong = draw.random(num_samples) < 0.1
    labels[wrong] = draw.integers(0, num_classes, int(wrong.sum()))
    dealt = draw.permutation(num_samples)
    by_class = dealt[: int(skew * num_samples)]
    by_class = by_class[np.argsort(labels[by_class], kind="stable")]
    rest = dealt[len(by_class) :]
    return Perceptron(
        sizes=(num_inputs, *hidden, num_classes),
        inputs=inputs,
        labels=labels,
        shards=tuple(
            np.concatenate(both)
            for both in zip(
                np.array_split(by_class, num_shards), np.array_split(rest, num_shards), strict=True
            )
        ),
        batch_size=batch_size,
        seed=seed,
    )


def _random_weights(sizes: Sequence[int], draw: np.random.Generator) -> Vector:
    """Matrices that keep the size of what passes, and no biases yet."""
    parts = []
    for above, below in pairwise(sizes):
        parts += [draw.standard_normal(above * below) / np.sqrt(above), np.zeros(below)]
    return np.concatenate(parts)


def _layers(weights: Vector, sizes: Sequence[int]) -> list[tuple[Vector, Vector]]:
    found, first = [], 0
    for above, below in pairwise(sizes):
        end = first + above * below
        found.append((weights[first:end].reshape(above, below), weights[end : end + below]))
        first = end + below
    return found


def _outputs(weights: Vector, sizes: Sequence[int], inputs: Vector) -> list[Vector]:
    """The inputs, then those of each layer; the last is without tanh."""
    layers, found = _layers(weights, sizes), [inputs]
    for number, (matrix, bias) in enumerate(layers, 1):
        sums = found[-1] @ matrix + bias
        found.append(np.tanh(sums) if number < len(layers) else sums)
    return found


def _softmax(scores: Vector) -> Vector:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    found: Vector = powers / powers.sum(1, keepdims=True)
    return found

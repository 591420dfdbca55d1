"""How long a learnable layer takes on a GPU: by its operations, or by the numbers that it moves.

A product of matrices (or a convolution) takes the longer of two times: its operations at the speed
of the processor, or its inputs and outputs at the speed of the memory. What stands around it
(norms, activations, sums, copies) only moves numbers: a pass is to read or to write all of them
once. Passes are counted as PyTorch 1.8 runs the layers, one kernel after the other.

Left out: launching kernels, and the optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from polyrhythm.sync.fusion.layers import LayerTimes
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

WIDTH: Bytes = 4  # of a number: all is in single precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What it reaches, not what its maker says."""

    operations: float  # per second
    memory: BytesPerSecond


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnableLayer:
    """Numbers of one sample, except for parameters; what has no parameters is with a neighbour."""

    name: str
    tensors: tuple[int, ...]  # parameters in each
    operations: int = 0  # of the product in the forward
    product_moves: int = 0  # numbers that the product reads and writes
    backward_products: int = 2  # as large: gradients of weights and of the input
    forward_moves: int = 0  # of all that is no product
    backward_moves: int = 0

    @property
    def parameters(self) -> int:
        return sum(self.tensors)


def layer_times(layers: Sequence[LearnableLayer], batch: int, gpu: Gpu) -> list[LayerTimes]:
    return [_times(layer, batch, gpu) for layer in layers]


def by_tensors(layers: Sequence[LearnableLayer], times: Sequence[LayerTimes]) -> list[LayerTimes]:
    """Each tensor as a layer of its own; the first of a layer has all of its time."""
    found = []
    for layer, all_of_it in zip(layers, times, strict=True):
        first, *others = layer.tensors
        found.append(
            LayerTimes(size=WIDTH * first, forward=all_of_it.forward, backward=all_of_it.backward)
        )
        found += [LayerTimes(size=WIDTH * each, forward=0.0, backward=0.0) for each in others]
    return found


def _times(layer: LearnableLayer, batch: int, gpu: Gpu) -> LayerTimes:
    def moving(numbers: int) -> Seconds:
        return batch * WIDTH * numbers / gpu.memory

    product = max(batch * layer.operations / gpu.operations, moving(layer.product_moves))
    return LayerTimes(
        size=WIDTH * layer.parameters,
        forward=product + moving(layer.forward_moves),
        backward=layer.backward_products * product + moving(layer.backward_moves),
    )

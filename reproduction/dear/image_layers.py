"""The learnable layers of ResNet-50, DenseNet-201 and Inception-v4, one by one.

Passes over the n numbers that a kernel gives, forward and backward: a batch norm 3 and 5 (twice its
input, for the statistics first), a ReLU 2 and 3, a sum 3 and, where gradients of two uses meet, 3;
putting side by side 2 and 2; a pooling what it reads and writes, twice.
"""

from dataclasses import replace

from polyrhythm.describe import densenet_work, inception_work
from polyrhythm.describe.convolution import Convolution, square
from polyrhythm.describe.densenet_work import DenseLayer
from polyrhythm.describe.inception_work import InceptionBlock, Pooling
from reproduction.dear.gpu_time import LearnableLayer

_CLASSES = 1000
_NORM_AND_RELU = (3 + 2, 5 + 3)


def resnet50(image: int) -> list[LearnableLayer]:
    """Bottlenecks of 1 x 1, 3 x 3, 1 x 1, with a sum at the end."""
    first = square(3, 64, 7, image, (image + 1) // 2)
    side = (first.side + 1) // 2
    found = [*_first(first, "stem"), *_with_norm(first, "stem")[1:]]
    found[-1] = _and(found[-1], _pooled(first.num_outputs, 64 * side**2))
    channels = 64
    for stage, (width, num_blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for number in range(num_blocks):
            after = (side + 1) // 2 if stage and not number else side
            every = [
                square(channels, width, 1, side, side),
                square(width, width, 3, side, after),
                square(width, 4 * width, 1, after, after),
            ]
            if not number:
                every.append(square(channels, 4 * width, 1, side, after))
            name = f"stage{stage}.{number}"
            for place, each in enumerate(every):
                found += _with_norm(each, f"{name}.{place}")
            given, taken = every[2].num_outputs, channels * side**2
            found[-1] = _and(found[-1], (3 * given, 3 * taken))
            channels, side = 4 * width, after
    return [*found, _classes(channels, side)]


def densenet201(image: int) -> list[LearnableLayer]:
    """What a layer takes is put side by side anew; its gradient is added to that of others."""
    first = densenet_work.stem_of(image)
    blocks = densenet_work.blocks_of(image)
    entry = blocks[0]
    assert isinstance(entry, DenseLayer), "a block follows the stem"
    found = [*_first(first, "stem"), *_with_norm(first, "stem")[1:]]
    found[-1] = _and(found[-1], _pooled(first.num_outputs, entry.narrow.num_inputs))
    for block in blocks:
        if isinstance(block, DenseLayer):
            taken = block.narrow.num_inputs
            norm = _norm(block.narrow.inputs, taken, f"{block.name}.norm0")
            found.append(_and(norm, (2 * taken, 3 * taken)))
            found.append(_convolution(block.narrow, f"{block.name}.conv0"))
            found.append(_norm(block.wide.inputs, block.wide.num_inputs, f"{block.name}.norm1"))
            found.append(_convolution(block.wide, f"{block.name}.conv1"))
        else:
            half = block.half
            found.append(_norm(half.inputs, half.num_inputs, f"{block.name}.norm"))
            pooled = half.outputs * (half.side // 2) ** 2
            layer = _convolution(half, f"{block.name}.conv")
            found.append(_and(layer, _pooled(half.num_outputs, pooled)))
    last = blocks[-1]
    assert isinstance(last, DenseLayer), "no transition follows the last block"
    channels, side = last.narrow.inputs + last.wide.outputs, last.narrow.side
    given = channels * side**2
    found.append(_and(_norm(channels, given, "head.norm"), (2 * given, 2 * given)))
    return [*found, _classes(channels, side)]


def inceptionv4(image: int) -> list[LearnableLayer]:
    """Branches one after the other, as they are run."""
    found: list[LearnableLayer] = []
    blocks = inception_work.blocks_of(image)
    for block in blocks:
        for number, each in enumerate(block.convolutions):
            name = f"{block.name}.{number}"
            found += _with_norm(each, name)
            if each.inputs == 3:
                found[-2:-1] = _first(each, name)
        found[-1] = _and(found[-1], _around(block))
    return [*found, _classes(blocks[-1].channels, blocks[-1].side)]


def _around(block: InceptionBlock) -> tuple[int, int]:
    """Poolings, outputs side by side, and gradients of the input that all branches give."""
    uses = len(block.branches)
    if uses == 1:
        return 0, 0
    forward, backward = 2 * block.num_outputs, 2 * block.num_outputs
    backward += 3 * (uses - 1) * block.num_inputs
    for branch in block.branches:
        if branch.pooling is not Pooling.NONE:
            mean = branch.pooling is Pooling.MEAN
            pooled = _pooled(block.num_inputs, block.num_inputs if mean else branch.num_outputs)
            forward, backward = forward + pooled[0], backward + pooled[1]
    return forward, backward


def _with_norm(convolution: Convolution, name: str) -> list[LearnableLayer]:
    norm = _norm(convolution.outputs, convolution.num_outputs, f"{name}.norm")
    return [_convolution(convolution, f"{name}.conv"), norm]


def _convolution(convolution: Convolution, name: str) -> LearnableLayer:
    return LearnableLayer(
        name=name,
        tensors=(convolution.weights,),
        operations=convolution.operations,
        product_moves=convolution.num_inputs + convolution.num_outputs,
    )


def _first(convolution: Convolution, name: str) -> list[LearnableLayer]:
    """Images need no gradient."""
    return [replace(_convolution(convolution, f"{name}.conv"), backward_products=1)]


def _norm(channels: int, numbers: int, name: str) -> LearnableLayer:
    """With the ReLU behind it."""
    forward, backward = _NORM_AND_RELU
    return LearnableLayer(
        name=name,
        tensors=(channels, channels),
        forward_moves=forward * numbers,
        backward_moves=backward * numbers,
    )


def _classes(channels: int, side: int) -> LearnableLayer:
    layer = LearnableLayer(
        name="head",
        tensors=(channels * _CLASSES, _CLASSES),
        operations=2 * channels * _CLASSES,
        product_moves=channels + _CLASSES,
    )
    return _and(layer, _pooled(channels * side**2, channels))


def _pooled(taken: int, given: int) -> tuple[int, int]:
    return taken + given, taken + given


def _and(layer: LearnableLayer, moves: tuple[int, int]) -> LearnableLayer:
    """With what stands beside it and has no parameters."""
    return replace(
        layer,
        forward_moves=layer.forward_moves + moves[0],
        backward_moves=layer.backward_moves + moves[1],
    )

"""DenseNet-201 by its shape: a stem, 98 dense layers with transitions between them, a head.

A dense layer takes all earlier outputs of its block and adds 32 channels. In a chain of layers each
one outputs its input and its own channels.

Source: Huang et al., arXiv:1608.06993, table 1. Departure: none; counted as in torchvision.

A batch norm keeps its input, and the convolution after it keeps the output of norm and ReLU.
"""

from dataclasses import dataclass, replace

from polyrhythm.describe.convolution import (
    Convolution,
    halved,
    head_work,
    square,
    stem_of,
    stem_work,
)
from polyrhythm.describe.layer_work import LayerWork

_BLOCKS = (6, 12, 48, 32)  # dense layers
_FIRST = 64  # output channels of the stem
_GROWTH = 32  # channels that a dense layer adds
_NARROW = 4 * _GROWTH  # output channels of its 1 x 1 convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """Norm, ReLU, 1 x 1; norm, ReLU, 3 x 3; the output is concatenated to the input."""

    name: str
    narrow: Convolution
    wide: Convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Norm, ReLU, 1 x 1 to half of the channels, and the mean of each 2 x 2 points."""

    name: str
    half: Convolution


def densenet201(*, image: int = 224) -> list[LayerWork]:
    """Return the layers for images of `image` x `image` points."""
    blocks = blocks_of(image)
    last = blocks[-1]
    assert isinstance(last, DenseLayer), "no transition follows the last block"
    channels = last.narrow.inputs + _GROWTH
    kept = channels * last.narrow.side**2
    head = head_work(channels)
    # A norm and a ReLU before it.
    head = replace(head, parameters=head.parameters + 2 * channels, stored=head.stored + 2 * kept)
    return [stem_work(first_convolution(image)), *map(_work, blocks), head]


def first_convolution(image: int) -> Convolution:
    return stem_of(image, _FIRST, model="DenseNet-201")


def blocks_of(image: int) -> list[DenseLayer | Transition]:
    """Return all layers between stem and head, in order."""
    side, channels = halved(first_convolution(image).side), _FIRST
    found: list[DenseLayer | Transition] = []
    for block, num_layers in enumerate(_BLOCKS):
        for number in range(num_layers):
            narrow = square(channels, _NARROW, 1, side, side)
            wide = square(_NARROW, _GROWTH, 3, side, side)
            found.append(DenseLayer(name=f"block{block}.{number}", narrow=narrow, wide=wide))
            channels += _GROWTH
        if block + 1 < len(_BLOCKS):
            half = square(channels, channels // 2, 1, side, side)
            found.append(Transition(name=f"transition{block}", half=half))
            channels, side = channels // 2, side // 2
    return found


def _work(layer: DenseLayer | Transition) -> LayerWork:
    if isinstance(layer, Transition):
        half = layer.half
        return LayerWork(
            name=layer.name,
            parameters=2 * half.inputs + half.weights,
            operations=half.operations,
            outputs=half.outputs * (half.side // 2) ** 2,
            stored=2 * half.num_inputs + half.num_outputs,
        )
    narrow, wide = layer.narrow, layer.wide
    return LayerWork(
        name=layer.name,
        parameters=2 * narrow.inputs + narrow.weights + 2 * wide.inputs + wide.weights,
        operations=narrow.operations + wide.operations,
        outputs=narrow.num_inputs + wide.num_outputs,
        stored=2 * narrow.num_inputs + 2 * narrow.num_outputs,
    )

"""ResNet-50 by its shape: a stem, sixteen bottleneck blocks, a head.

Source: He et al., arXiv:1512.03385, table 1. Departure: as in torchvision, the stride is in the
3 x 3 convolution.

A convolution keeps its input and a batch norm keeps its own, which is the convolution's output. A
ReLU keeps its output, which is the input of the next convolution: the next layer counts it.
"""

from dataclasses import replace

from polyrhythm.describe.convolution import halved, head_work, square, stem_of, stem_work
from polyrhythm.describe.layer_work import LayerWork

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, first stride
_EXPANSION = 4


def resnet50(*, image: int = 224) -> list[LayerWork]:
    """Return the layers for images of `image` x `image` points."""
    first = stem_of(image, 64, model="ResNet-50")
    layers, channels, side = [stem_work(first)], first.outputs, halved(first.side)
    for place, (width, num_blocks, stride) in enumerate(_STAGES):
        for number in range(num_blocks):
            name = f"stage{place}.{number}"
            layers.append(_bottleneck(name, channels, width, side, stride if number == 0 else 1))
            channels = _EXPANSION * width
            side = halved(side) if number == 0 and stride == 2 else side
    # No layer keeps the output of the last ReLU: only its mean is used.
    layers[-1] = replace(layers[-1], stored=layers[-1].stored + layers[-1].outputs)
    return [*layers, head_work(channels)]


def _bottleneck(name: str, channels: int, width: int, side: int, stride: int) -> LayerWork:
    """Return a block of 1 x 1, 3 x 3, 1 x 1; if the shape changes, with a parallel 1 x 1."""
    after, outputs = (halved(side) if stride == 2 else side), _EXPANSION * width
    narrow = square(channels, width, 1, side, side)
    middle = square(width, width, 3, side, after)
    wide = square(width, outputs, 1, after, after)
    every = [narrow, middle, wide]
    if stride == 2 or channels != outputs:
        every.append(square(channels, outputs, 1, side, after))
    # The input, the output of each convolution, and two of those again after norm and ReLU.
    kept = [*every, narrow, middle]
    return LayerWork(
        name=name,
        parameters=sum(each.weights + 2 * each.outputs for each in every),  # with batch norms
        operations=sum(each.operations for each in every),
        outputs=wide.num_outputs,
        stored=channels * side**2 + sum(each.num_outputs for each in kept),
    )

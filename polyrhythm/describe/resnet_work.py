"""ResNet-50 by its shape: a stem, sixteen bottleneck blocks, a head.

Source: He et al., arXiv:1512.03385, table 1. Departure: as in torchvision, the stride is in the
3 x 3 convolution.

A convolution keeps its input and a batch norm keeps its own, which is the convolution's output. A
ReLU keeps its output, which is the input of the next convolution: the next layer counts it.
"""

from dataclasses import replace

from polyrhythm.describe.convolution import INDEX, LARGEST_IMAGE, halved, square
from polyrhythm.describe.layer_work import LayerWork
from polyrhythm.errors import DescriptionError

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, first stride
_EXPANSION = 4


def resnet50(*, image: int = 224, num_classes: int = 1000) -> list[LayerWork]:
    """Return the layers for images of `image` x `image` points."""
    if not 32 <= image <= LARGEST_IMAGE or num_classes < 1:
        raise DescriptionError(
            f"images of {image} x {image} in {num_classes} classes",
            expected="at least 32 x 32 points, one of which is left after five halvings, "
            f"at most {LARGEST_IMAGE} x {LARGEST_IMAGE}, and a class",
            fix="use images of 224, as ResNet-50 was made for",
        )
    half = halved(image)
    first = square(3, 64, 7, image, half)
    side = halved(half)
    stem = LayerWork(
        name="stem",
        parameters=first.weights + 2 * first.outputs,
        operations=first.operations,
        outputs=64 * side**2,
        stored=3 * image**2 + 2 * first.num_outputs,
        other_bytes=INDEX * 64 * side**2,  # index of each maximum
        backward_ratio=1.0,  # images need no gradient
    )
    layers, channels = [stem], 64
    for place, (width, num_blocks, stride) in enumerate(_STAGES):
        for number in range(num_blocks):
            name = f"stage{place}.{number}"
            layers.append(_bottleneck(name, channels, width, side, stride if number == 0 else 1))
            channels = _EXPANSION * width
            side = halved(side) if number == 0 and stride == 2 else side
    # No layer keeps the output of the last ReLU: only its mean is used.
    layers[-1] = replace(layers[-1], stored=layers[-1].stored + layers[-1].outputs)
    head = LayerWork(
        name="head",
        parameters=(channels + 1) * num_classes,
        operations=2 * channels * num_classes,
        outputs=num_classes,
        stored=channels,
    )
    return [*layers, head]


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

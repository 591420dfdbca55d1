"""ResNet-50 by its shape: a stem, sixteen bottleneck blocks, a head.

Source: He et al., arXiv:1512.03385, table 1. Departure: as in torchvision, the stride is in the
3 x 3 convolution.

A convolution keeps its input and a batch norm keeps its own, which is the convolution's output. A
ReLU keeps its output, which is the input of the next convolution: the next layer counts it.
"""

from dataclasses import dataclass, replace

from polyrhythm.describe.layer_work import LayerWork
from polyrhythm.errors import DescriptionError

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, first stride
_EXPANSION = 4
_INDEX = 8  # bytes
_LARGEST_IMAGE = 100_000  # more is a typing error


def resnet50(*, image: int = 224, num_classes: int = 1000) -> list[LayerWork]:
    """Return the layers for images of `image` x `image` points."""
    if not 32 <= image <= _LARGEST_IMAGE or num_classes < 1:
        raise DescriptionError(
            f"images of {image} x {image} in {num_classes} classes",
            expected="at least 32 x 32 points, one of which is left after five halvings, "
            f"at most {_LARGEST_IMAGE} x {_LARGEST_IMAGE}, and a class",
            fix="use images of 224, as ResNet-50 was made for",
        )
    half = _halved(image)
    first = _Convolution(inputs=3, outputs=64, kernel=7, side=half)
    side = _halved(half)
    stem = LayerWork(
        name="stem",
        parameters=first.parameters,
        operations=first.operations,
        outputs=64 * side**2,
        stored=3 * image**2 + 2 * first.num_outputs,
        other_bytes=_INDEX * 64 * side**2,  # index of each maximum
        backward_ratio=1.0,  # images need no gradient
    )
    layers, channels = [stem], 64
    for place, (width, num_blocks, stride) in enumerate(_STAGES):
        for number in range(num_blocks):
            name = f"stage{place}.{number}"
            layers.append(_bottleneck(name, channels, width, side, stride if number == 0 else 1))
            channels = _EXPANSION * width
            side = _halved(side) if number == 0 and stride == 2 else side
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    """A convolution without bias and the batch norm after it."""

    inputs: int
    outputs: int
    kernel: int
    side: int  # side of the output

    @property
    def _weights(self) -> int:
        return self.inputs * self.outputs * self.kernel**2

    @property
    def parameters(self) -> int:
        return self._weights + 2 * self.outputs

    @property
    def operations(self) -> int:
        return 2 * self._weights * self.side**2

    @property
    def num_outputs(self) -> int:
        return self.outputs * self.side**2


def _bottleneck(name: str, channels: int, width: int, side: int, stride: int) -> LayerWork:
    """Return a block of 1 x 1, 3 x 3, 1 x 1; if the shape changes, with a parallel 1 x 1."""
    after, outputs = (_halved(side) if stride == 2 else side), _EXPANSION * width
    narrow = _Convolution(inputs=channels, outputs=width, kernel=1, side=side)
    middle = _Convolution(inputs=width, outputs=width, kernel=3, side=after)
    wide = _Convolution(inputs=width, outputs=outputs, kernel=1, side=after)
    every = [narrow, middle, wide]
    if stride == 2 or channels != outputs:
        every.append(_Convolution(inputs=channels, outputs=outputs, kernel=1, side=after))
    # The input, the output of each convolution, and two of those again after norm and ReLU.
    kept = [*every, narrow, middle]
    return LayerWork(
        name=name,
        parameters=sum(each.parameters for each in every),
        operations=sum(each.operations for each in every),
        outputs=wide.num_outputs,
        stored=channels * side**2 + sum(each.num_outputs for each in kept),
    )


def _halved(side: int) -> int:
    """Return the side after a stride of 2 with padding."""
    return (side + 1) // 2

"""Count a convolution by its shape: weights, and operations and outputs for one sample."""

from dataclasses import dataclass

from polyrhythm.describe.layer_work import LayerWork
from polyrhythm.errors import DescriptionError

INDEX = 8  # bytes, of the index of a maximum
LARGEST_IMAGE = 100_000  # points of a side; more is a typing error
_NUM_CLASSES = 1000  # of ImageNet


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution without a bias, since a batch norm precedes or follows it."""

    inputs: int  # channels
    outputs: int
    height: int  # of its kernel
    width: int
    before: int  # side of the input
    side: int  # side of the output

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.height * self.width

    @property
    def operations(self) -> int:
        return 2 * self.weights * self.side**2

    @property
    def num_inputs(self) -> int:
        return self.inputs * self.before**2

    @property
    def num_outputs(self) -> int:
        return self.outputs * self.side**2


def square(inputs: int, outputs: int, kernel: int, before: int, side: int) -> Convolution:
    return Convolution(
        inputs=inputs, outputs=outputs, height=kernel, width=kernel, before=before, side=side
    )


def halved(side: int) -> int:
    """Return the side after a stride of 2 with padding."""
    return (side + 1) // 2


def stem_of(image: int, outputs: int, *, model: str) -> Convolution:
    """Return the first convolution of ResNet-50 and DenseNet-201; refuse other image sizes."""
    if not 32 <= image <= LARGEST_IMAGE:
        raise DescriptionError(
            f"images of {image} x {image}",
            expected="at least 32 x 32 points, one of which is left after five halvings, "
            f"at most {LARGEST_IMAGE} x {LARGEST_IMAGE}",
            fix=f"use images of 224, as {model} was made for",
        )
    return square(3, outputs, 7, image, halved(image))


def stem_work(first: Convolution) -> LayerWork:
    """Count the stem: its convolution, a norm, a ReLU, and the largest of each 3 x 3 points."""
    num_outputs = first.outputs * halved(first.side) ** 2
    return LayerWork(
        name="stem",
        parameters=first.weights + 2 * first.outputs,
        operations=first.operations,
        outputs=num_outputs,
        stored=first.num_inputs + 2 * first.num_outputs,
        other_bytes=INDEX * num_outputs,  # index of each maximum
        backward_ratio=1.0,  # images need no gradient
    )


def head_work(channels: int) -> LayerWork:
    """Count the head: the mean over all points, classes."""
    return LayerWork(
        name="head",
        parameters=(channels + 1) * _NUM_CLASSES,
        operations=2 * channels * _NUM_CLASSES,
        outputs=_NUM_CLASSES,
        stored=channels,
    )

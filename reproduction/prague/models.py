"""The paper's models: how much they compute for a step, and how much they average (Fig. 15).

What a GTX 1080 Ti computes in a step follows from published measurements of the same networks on a
Pascal Titan X, which has the same chip: 16 images of 224 x 224 forward and backward, with cuDNN 5.1
(github.com/jcjohnson/cnn-benchmarks). CIFAR-10's VGG-16 is not among them; it is counted, and runs
at the speed of ResNet-18, which is made of 3 x 3 convolutions as well.
"""

from dataclasses import dataclass
from itertools import pairwise

from polyrhythm.describe.convolution import square
from polyrhythm.types import Bytes, Seconds

_WIDTH: Bytes = 4  # of a number: all is in single precision
_MEASURED_BATCH = 16
_MEASURED = {"ResNet-18": 31.54e-3, "ResNet-50": 103.58e-3, "ResNet-200": 296.51e-3}  # seconds
_RESNET_18_OPERATIONS = 2 * 1.82e9  # forward, of an image (He et al., table 1: 1.8e9 products)

# Simonyan & Zisserman, configuration D: convolutions between two halvings, and their channels.
_VGG_16 = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
_CIFAR_SIDE, _CIFAR_CLASSES = 32, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    batch: int  # images of each GPU
    parameters: int
    image: Seconds  # forward and backward

    @property
    def compute(self) -> Seconds:
        """Of a step."""
        return self.batch * self.image

    @property
    def size(self) -> Bytes:
        """Of what is averaged: all weights as one tensor (section 6.1)."""
        return self.parameters * _WIDTH


def _vgg_16(batch: int) -> Model:
    """For CIFAR-10: five halvings leave 512 channels of one point, which one product classifies."""
    channels = [3] + [width for count, width in _VGG_16 for _ in range(count)]
    sides = [_CIFAR_SIDE >> place for place, (count, _) in enumerate(_VGG_16) for _ in range(count)]
    layers = [
        square(inputs, outputs, 3, side, side)
        for (inputs, outputs), side in zip(pairwise(channels), sides, strict=True)
    ]
    biases = sum(channels[1:]) + _CIFAR_CLASSES
    head = channels[-1] * _CIFAR_CLASSES
    operations = sum(layer.operations for layer in layers) + 2 * head
    slowness = _MEASURED["ResNet-18"] / _MEASURED_BATCH / _RESNET_18_OPERATIONS
    return Model(
        name="VGG-16",
        batch=batch,
        parameters=sum(layer.weights for layer in layers) + head + biases,
        image=operations * slowness,
    )


def _measured(name: str, batch: int, parameters: int) -> Model:
    took = _MEASURED[name] / _MEASURED_BATCH
    return Model(name=name, batch=batch, parameters=parameters, image=took)


VGG_16 = _vgg_16(128)
RESNET_18 = _measured("ResNet-18", 256, 11_689_512)
RESNET_50 = _measured("ResNet-50", 96, 25_557_032)
RESNET_200 = _measured("ResNet-200", 32, 64_669_864)

"""Count a convolution by its shape: weights, and operations and outputs for one sample."""

from dataclasses import dataclass

INDEX = 8  # bytes, of the index of a maximum
LARGEST_IMAGE = 100_000  # points of a side; more is a typing error


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

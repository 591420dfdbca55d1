"""Inception-v4 by its shape: a stem, three kinds of blocks of parallel branches, a head.

A block has branches that all take its input, and whose outputs are concatenated. A branch is a
chain of convolutions, each followed by a batch norm and a ReLU; it may begin with a pooling, or
end in two parallel convolutions.

Source: Szegedy et al., arXiv:1602.07261, figures 3 to 9. Departures: none known; no dropout, as in
the common implementation. Convolutions without padding lose points at the border, so that sides
are not halves: 25, 12 and 5 of 224.

A convolution keeps its input and a batch norm its own; a ReLU keeps its output, also at the end of
a branch, as the output of the block is a copy.
"""

from dataclasses import dataclass
from enum import StrEnum

from polyrhythm.describe.convolution import Convolution, square
from polyrhythm.describe.layer_work import LayerWork
from polyrhythm.errors import DescriptionError

_INDEX = 8  # bytes
_SMALLEST_IMAGE, _LARGEST_IMAGE = 75, 100_000  # one point is left of the first


class Pooling(StrEnum):
    NONE = "none"
    MEAN = "mean"  # of 3 x 3 points, with stride 1 and padding
    LARGEST = "largest"  # of 3 x 3 points, with stride 2 and no padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    convolutions: tuple[Convolution, ...]  # in the order in which they are computed
    num_outputs: int  # its part of the block's output
    pooling: Pooling = Pooling.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class InceptionBlock:
    name: str
    inputs: int  # channels
    before: int  # side of the input
    side: int  # side of the output
    branches: tuple[Branch, ...]

    @property
    def num_inputs(self) -> int:
        return self.inputs * self.before**2

    @property
    def num_outputs(self) -> int:
        return sum(branch.num_outputs for branch in self.branches)

    @property
    def channels(self) -> int:
        """Output channels."""
        return self.num_outputs // self.side**2

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        return tuple(each for branch in self.branches for each in branch.convolutions)


def inceptionv4(*, image: int = 299, num_classes: int = 1000) -> list[LayerWork]:
    """Return the layers for images of `image` x `image` points."""
    blocks = blocks_of(image)
    channels = blocks[-1].channels
    head = LayerWork(
        name="head",  # the mean over all points, classes
        parameters=(channels + 1) * num_classes,
        operations=2 * channels * num_classes,
        outputs=num_classes,
        stored=channels,
    )
    return [*map(_work, blocks), head]


def blocks_of(image: int) -> list[InceptionBlock]:
    """Return all blocks before the head, in order."""
    if not _SMALLEST_IMAGE <= image <= _LARGEST_IMAGE:
        raise DescriptionError(
            f"images of {image} x {image}",
            expected=f"at least {_SMALLEST_IMAGE} x {_SMALLEST_IMAGE} points, of which the "
            f"convolutions leave one, at most {_LARGEST_IMAGE} x {_LARGEST_IMAGE}",
            fix="use images of 299, as Inception-v4 was made for",
        )
    blocks = _stem(image)
    blocks += [_block_a(f"a{number}", blocks[-1].side) for number in range(4)]
    blocks.append(_reduction_a(blocks[-1].side))
    blocks += [_block_b(f"b{number}", blocks[-1].side) for number in range(7)]
    blocks.append(_reduction_b(blocks[-1].side))
    return blocks + [_block_c(f"c{number}", blocks[-1].side) for number in range(3)]


def _stem(image: int) -> list[InceptionBlock]:
    one = _halved(image)
    two = one - 2
    three = _halved(two)
    four = three - 2
    five = _halved(four)
    return [
        _block("stem0", 3, image, one, _chain(square(3, 32, 3, image, one))),
        _block("stem1", 32, one, two, _chain(square(32, 32, 3, one, two))),
        _block("stem2", 32, two, two, _chain(square(32, 64, 3, two, two))),
        _block("stem3", 64, two, three, _largest(64, three), _chain(square(64, 96, 3, two, three))),
        _block(
            "stem4",
            160,
            three,
            four,
            _chain(square(160, 64, 1, three, three), square(64, 96, 3, three, four)),
            _chain(
                square(160, 64, 1, three, three),
                _row(64, 64, three),
                _column(64, 64, three),
                square(64, 96, 3, three, four),
            ),
        ),
        _block(
            "stem5", 192, four, five, _chain(square(192, 192, 3, four, five)), _largest(192, five)
        ),
    ]


def _block_a(name: str, side: int) -> InceptionBlock:
    def three(inputs: int) -> Convolution:
        return square(inputs, 96, 3, side, side)

    return _block(
        name,
        384,
        side,
        side,
        _chain(_point(384, 96, side)),
        _chain(_point(384, 64, side), three(64)),
        _chain(_point(384, 64, side), three(64), three(96)),
        _chain(_point(384, 96, side), pooling=Pooling.MEAN),
    )


def _reduction_a(before: int) -> InceptionBlock:
    side = _halved(before)
    long = (
        _point(384, 192, before),
        square(192, 224, 3, before, before),
        square(224, 256, 3, before, side),
    )
    short = _chain(square(384, 384, 3, before, side))
    return _block("reduction_a", 384, before, side, short, _chain(*long), _largest(384, side))


def _block_b(name: str, side: int) -> InceptionBlock:
    middle = (_point(1024, 192, side), _row(192, 224, side), _column(224, 256, side))
    long = (
        _point(1024, 192, side),
        _column(192, 192, side),
        _row(192, 224, side),
        _column(224, 224, side),
        _row(224, 256, side),
    )
    return _block(
        name,
        1024,
        side,
        side,
        _chain(_point(1024, 384, side)),
        _chain(*middle),
        _chain(*long),
        _chain(_point(1024, 128, side), pooling=Pooling.MEAN),
    )


def _reduction_b(before: int) -> InceptionBlock:
    side = _halved(before)
    long = (
        _point(1024, 256, before),
        _row(256, 256, before),
        _column(256, 320, before),
        square(320, 320, 3, before, side),
    )
    short = (_point(1024, 192, before), square(192, 192, 3, before, side))
    return _block(
        "reduction_b", 1024, before, side, _chain(*short), _chain(*long), _largest(1024, side)
    )


def _block_c(name: str, side: int) -> InceptionBlock:
    """Return block C; two of its branches end in a row and a column in parallel."""
    short = (_point(1536, 384, side), _row(384, 256, side, 3), _column(384, 256, side, 3))
    long = (
        _point(1536, 384, side),
        _column(384, 448, side, 3),
        _row(448, 512, side, 3),
        _row(512, 256, side, 3),
        _column(512, 256, side, 3),
    )
    both = 512 * side**2
    return _block(
        name,
        1536,
        side,
        side,
        _chain(_point(1536, 256, side)),
        Branch(convolutions=short, num_outputs=both),
        Branch(convolutions=long, num_outputs=both),
        _chain(_point(1536, 256, side), pooling=Pooling.MEAN),
    )


def _block(name: str, inputs: int, before: int, side: int, *branches: Branch) -> InceptionBlock:
    return InceptionBlock(name=name, inputs=inputs, before=before, side=side, branches=branches)


def _chain(*convolutions: Convolution, pooling: Pooling = Pooling.NONE) -> Branch:
    last = convolutions[-1].num_outputs
    return Branch(convolutions=convolutions, num_outputs=last, pooling=pooling)


def _largest(channels: int, side: int) -> Branch:
    return Branch(convolutions=(), num_outputs=channels * side**2, pooling=Pooling.LARGEST)


def _point(inputs: int, outputs: int, side: int) -> Convolution:
    return square(inputs, outputs, 1, side, side)


def _row(inputs: int, outputs: int, side: int, width: int = 7) -> Convolution:
    return Convolution(
        inputs=inputs, outputs=outputs, height=1, width=width, before=side, side=side
    )


def _column(inputs: int, outputs: int, side: int, height: int = 7) -> Convolution:
    return Convolution(
        inputs=inputs, outputs=outputs, height=height, width=1, before=side, side=side
    )


def _halved(side: int) -> int:
    """Return the side after a stride of 2 without padding: 3 points give one, then 2 each."""
    return (side - 1) // 2


def _work(block: InceptionBlock) -> LayerWork:
    # The input, and the output of each convolution before and after norm and ReLU.
    stored = block.num_inputs + sum(2 * each.num_outputs for each in block.convolutions)
    if len(block.branches) == 1:
        stored -= block.num_outputs  # counted by the next block as its input
    poolings = [branch.pooling for branch in block.branches]
    stored += poolings.count(Pooling.MEAN) * block.num_inputs
    largest = [b.num_outputs for b in block.branches if b.pooling is Pooling.LARGEST]
    return LayerWork(
        name=block.name,
        parameters=sum(each.weights + 2 * each.outputs for each in block.convolutions),
        operations=sum(each.operations for each in block.convolutions),
        outputs=block.num_outputs,
        stored=stored,
        other_bytes=_INDEX * sum(largest),  # index of each maximum
        backward_ratio=1.0 if block.inputs == 3 else 2.0,  # images need no gradient
    )

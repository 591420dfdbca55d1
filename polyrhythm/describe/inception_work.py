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

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from polyrhythm.describe.convolution import INDEX, LARGEST_IMAGE, Convolution, head_work
from polyrhythm.describe.layer_work import LayerWork
from polyrhythm.errors import DescriptionError

_SMALLEST_IMAGE = 75  # one point is left of it

# The branches of each block. `3:96` is a convolution of 3 x 3 points to 96 channels, `1x7:64` one
# of 1 x 7; with `-` the side shrinks by 2 (no padding), with `/2` to the half (a stride of 2 and no
# padding). `a|b` are two parallel convolutions.
_A = ("1:96", "1:64 3:96", "1:64 3:96 3:96", "mean 1:96")
_B = (
    "1:384",
    "1:192 1x7:224 7x1:256",
    "1:192 7x1:192 1x7:224 7x1:224 1x7:256",
    "mean 1:128",
)
_C = (
    "1:256",
    "1:384 1x3:256|3x1:256",
    "1:384 3x1:448 1x3:512 1x3:256|3x1:256",
    "mean 1:256",
)
_BLOCKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("stem0", ("3/2:32",)),
    ("stem1", ("3-:32",)),
    ("stem2", ("3:64",)),
    ("stem3", ("largest", "3/2:96")),
    ("stem4", ("1:64 3-:96", "1:64 1x7:64 7x1:64 3-:96")),
    ("stem5", ("3/2:192", "largest")),
    *((f"a{number}", _A) for number in range(4)),
    ("reduction_a", ("3/2:384", "1:192 3:224 3/2:256", "largest")),
    *((f"b{number}", _B) for number in range(7)),
    ("reduction_b", ("1:192 3/2:192", "1:256 1x7:256 7x1:320 3/2:320", "largest")),
    *((f"c{number}", _C) for number in range(3)),
)


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


def inceptionv4(*, image: int = 299) -> list[LayerWork]:
    """Return the layers for images of `image` x `image` points."""
    blocks = blocks_of(image)
    return [*map(_work, blocks), head_work(blocks[-1].channels)]


def blocks_of(image: int) -> list[InceptionBlock]:
    """Return all blocks before the head, in order."""
    if not _SMALLEST_IMAGE <= image <= LARGEST_IMAGE:
        raise DescriptionError(
            f"images of {image} x {image}",
            expected=f"at least {_SMALLEST_IMAGE} x {_SMALLEST_IMAGE} points, of which the "
            f"convolutions leave one, at most {LARGEST_IMAGE} x {LARGEST_IMAGE}",
            fix="use images of 299, as Inception-v4 was made for",
        )
    blocks: list[InceptionBlock] = []
    channels, side = 3, image
    for name, branches in _BLOCKS:
        blocks.append(_block(name, channels, side, branches))
        channels, side = blocks[-1].channels, blocks[-1].side
    return blocks


def _block(name: str, inputs: int, before: int, branches: Sequence[str]) -> InceptionBlock:
    built = [_branch(text.split(), inputs, before) for text in branches]
    side = built[0][1]
    assert all(each == side for _, each in built), "the outputs of branches are concatenated"
    return InceptionBlock(
        name=name,
        inputs=inputs,
        before=before,
        side=side,
        branches=tuple(branch for branch, _ in built),
    )


def _branch(words: Sequence[str], channels: int, side: int) -> tuple[Branch, int]:
    """Return the branch that the words describe, and the side of its output."""
    if words == [Pooling.LARGEST]:
        side = _halved(side)
        num_outputs = channels * side**2
        return Branch(convolutions=(), num_outputs=num_outputs, pooling=Pooling.LARGEST), side
    pooling = Pooling.MEAN if words[0] == Pooling.MEAN else Pooling.NONE
    convolutions: list[Convolution] = []
    for word in words[pooling is Pooling.MEAN :]:
        last = [_convolution(part, channels, side) for part in word.split("|")]
        convolutions += last
        channels, side = sum(each.outputs for each in last), last[0].side
    num_outputs = channels * side**2
    return Branch(convolutions=tuple(convolutions), num_outputs=num_outputs, pooling=pooling), side


def _convolution(text: str, inputs: int, before: int) -> Convolution:
    kernel, _, outputs = text.partition(":")
    size = kernel.removesuffix("/2").removesuffix("-")
    height, _, width = size.partition("x")
    side = _halved(before) if kernel.endswith("/2") else before - 2 * kernel.endswith("-")
    return Convolution(
        inputs=inputs,
        outputs=int(outputs),
        height=int(height),
        width=int(width or height),
        before=before,
        side=side,
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
        other_bytes=INDEX * sum(largest),  # index of each maximum
        backward_ratio=1.0 if block.inputs == 3 else 2.0,  # images need no gradient
    )

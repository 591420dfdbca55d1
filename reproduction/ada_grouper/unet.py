"""The U-Net of text-to-image diffusion, by its shape: what goes down, a middle, what comes up.

Every part on the way down leaves its output for a part on the way up, too: a skip.

Source of the shape: Rombach et al., arXiv:2112.10752, as released for text to image: widths of 1,
2, 4 and 4 times the first, two residual blocks on each level, each but on the last level with a
transformer that looks at 77 words of 768 numbers. With a width of 320 it has 860 M parameters.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from polyrhythm.describe.layer_work import LayerWork

_WIDTHS = (1, 2, 4, 4)
_NUM_BLOCKS = 2
_LATENT = 4  # channels of what is denoised
_WORDS, _WORD_WIDTH = 77, 768


Skip = tuple[int, int]  # the layer that gives, and the one that takes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    work: LayerWork
    gives: bool = False  # its output to a part on the way up
    takes: bool = False  # the last that was given and not yet taken


def unet(*, width: int, image: int) -> tuple[list[LayerWork], list[Skip]]:
    """Of that first width, for latent images of `image` x `image`: layers, and what skips some."""
    parts = list(_parts(width, image))
    given: list[int] = []
    skips = []
    for number, part in enumerate(parts):
        if part.takes:
            skips.append((given.pop(), number))
        if part.gives:
            given.append(number)
    assert not given, "what went down has come up"
    return [part.work for part in parts], skips


def _parts(width: int, image: int) -> Iterator[_Part]:
    embedded = 4 * width  # of the time step
    first = _convolution("input", _LATENT, width, image)
    steps = width * embedded + embedded**2 + 2 * embedded  # what embeds the time step
    yield _Part(work=replace(first, parameters=first.parameters + steps), gives=True)
    channels, side = width, image
    stack = [width]
    last = len(_WIDTHS) - 1
    for level, wide in enumerate(_WIDTHS):
        for number in range(_NUM_BLOCKS):
            work = _residual(f"down{level}.{number}", channels, wide * width, side, embedded)
            channels = wide * width
            work = work if level == last else _seen(work, channels, side)
            yield _Part(work=work, gives=True)
            stack.append(channels)
        if level < last:
            side //= 2
            yield _Part(work=_convolution(f"down{level}", channels, channels, side), gives=True)
            stack.append(channels)
    middle = _seen(_residual("middle.0", channels, channels, side, embedded), channels, side)
    yield _Part(work=middle)
    yield _Part(work=_residual("middle.1", channels, channels, side, embedded))
    for level in reversed(range(len(_WIDTHS))):
        for number in range(_NUM_BLOCKS + 1):
            joined, channels = channels + stack.pop(), _WIDTHS[level] * width
            work = _residual(f"up{level}.{number}", joined, channels, side, embedded)
            work = work if level == last else _seen(work, channels, side)
            yield _Part(work=work, takes=True)
        if level > 0:
            side *= 2
            yield _Part(work=_convolution(f"up{level}", channels, channels, side))
    yield _Part(work=_convolution("output", channels, _LATENT, side))


def _convolution(name: str, inputs: int, outputs: int, side: int) -> LayerWork:
    """3 x 3; `side` is that of what it gives."""
    weights = 9 * inputs * outputs
    return LayerWork(
        name=name,
        parameters=weights + outputs,
        operations=2 * weights * side**2,
        outputs=outputs * side**2,
        stored=inputs * side**2,
    )


def _residual(name: str, inputs: int, outputs: int, side: int, embedded: int) -> LayerWork:
    """Two convolutions behind norms, the time step added between, and a way past them."""
    past = 0 if inputs == outputs else inputs * outputs
    products = 9 * inputs * outputs + 9 * outputs**2 + past
    return LayerWork(
        name=name,
        parameters=products + embedded * outputs + 2 * inputs + 5 * outputs,
        operations=2 * products * side**2 + 2 * embedded * outputs,
        outputs=outputs * side**2,
        stored=2 * (inputs + outputs) * side**2,  # inputs of norms and of convolutions
    )


def _seen(work: LayerWork, channels: int, side: int) -> LayerWork:
    """With a transformer behind it: attention to itself, to the words, and an inner layer.

    In channels squared: 2 for the ways in and out, 4 and 2 for the two attentions, 12 for an inner
    layer that is gated. Keys and values of the words come on top. Kept, in channels per point: 24.
    """
    points, words = side**2, 2 * _WORD_WIDTH * channels
    attention = 4 * points * channels * (points + _WORDS)
    return replace(
        work,
        parameters=work.parameters + 20 * channels**2 + words + 23 * channels,
        operations=work.operations + 40 * channels**2 * points + 2 * _WORDS * words + attention,
        stored=work.stored + 24 * channels * points,
    )

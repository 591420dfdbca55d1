"""Ada-Grouper's models split into stages: what each stage computes and sends on a platform.

A stage is one program whose outputs exist when it ends (section 2.4): the input of the next stage,
and inputs of later stages, such as the skips of a U-Net, which are sent to them directly. All of
them leave through one uplink at the same time, so the message to the next stage takes as long as
all together. Later stages need their inputs much later, so these delay nobody.

The U-Net is that of text-to-image diffusion: layers on the way down, a middle, layers on the way
up. Every layer on the way down also gives its output to a layer on the way up: a skip. Source:
Rombach et al., arXiv:2112.10752, as released for text to image: widths of 1, 2, 4 and 4 times the
first, two residual blocks per level, each except on the last level with a transformer that attends
to 77 words of 768 numbers. With a width of 320 it has 860 M parameters.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes
from polyrhythm.describe.layer_work import BYTES_OF, LayerWork
from polyrhythm.describe.profiles import layers_of
from polyrhythm.plan.partition import partition_layers
from polyrhythm.types import Bytes, Seconds
from reproduction.ada_grouper.testbed import Platform

_SEQUENCE = 1024
_ACCUMULATION = 3  # memory accesses per gradient that is added to the sum: two reads and a write
_WIDTHS = (1, 2, 4, 4)  # of the U-Net's levels
_NUM_BLOCKS = 2
_LATENT = 4  # channels of the image that is denoised
_WORDS, _WORD_WIDTH = 77, 768

Skip = tuple[int, int]  # the layer that produces it, and the layer that consumes it


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaGrouperModel:
    layers: tuple[LayerWork, ...]
    dtype: str
    num_parameters: int  # a matrix that two layers share counts once
    skips: tuple[Skip, ...] = ()

    @property
    def element_bytes(self) -> Bytes:
        return BYTES_OF[self.dtype]

    @property
    def operations(self) -> float:
        """Operations per sample; the backward counts as two forwards, as in [23]."""
        return 3 * sum(layer.operations for layer in self.layers)


def _gpt(num_blocks: int, hidden: int, num_heads: int) -> AdaGrouperModel:
    layers = layers_of(f"gpt-{num_blocks}x{hidden}x{_SEQUENCE}x{num_heads}")
    shared = layers[-1].parameters - 2 * hidden  # the embedding, which the head uses as well
    num_parameters = sum(layer.parameters for layer in layers) - shared
    return AdaGrouperModel(layers=tuple(layers), dtype="float16", num_parameters=num_parameters)


def _unet(width: int) -> AdaGrouperModel:
    """U-Net of a first width, for latent images of 32 x 32."""
    channels, side, last = width, 32, len(_WIDTHS) - 1
    embedded = 4 * width  # numbers of the time step's embedding
    first = _convolution("input", _LATENT, width, side)
    embedding = width * embedded + embedded**2 + 2 * embedded
    layers = [replace(first, parameters=first.parameters + embedding)]
    pending, skips = [(0, width)], list[Skip]()  # layers whose output is a skip, and its channels

    def block(name: str, inputs: int, level: int) -> LayerWork:
        outputs = _WIDTHS[level] * width
        work = _residual(name, inputs, outputs, side, embedded)
        return work if level == last else _with_transformer(work, outputs, side)

    for level, wide in enumerate(_WIDTHS):
        for number in range(_NUM_BLOCKS):
            pending.append((len(layers), wide * width))
            layers.append(block(f"down{level}.{number}", channels, level))
            channels = wide * width
        if level < last:
            side //= 2
            pending.append((len(layers), channels))
            layers.append(_convolution(f"down{level}", channels, channels, side))
    middle = [_residual(f"middle.{n}", channels, channels, side, embedded) for n in (0, 1)]
    layers += [_with_transformer(middle[0], channels, side), middle[1]]
    for level in reversed(range(len(_WIDTHS))):
        for number in range(_NUM_BLOCKS + 1):
            giver, joined = pending.pop()
            skips.append((giver, len(layers)))
            layers.append(block(f"up{level}.{number}", channels + joined, level))
            channels = _WIDTHS[level] * width
        if level > 0:
            side *= 2
            layers.append(_convolution(f"up{level}", channels, channels, side))
    assert not pending, "every skip is consumed"
    layers.append(_convolution("output", channels, _LATENT, side))
    return AdaGrouperModel(
        layers=tuple(layers),
        dtype="float32",
        num_parameters=sum(layer.parameters for layer in layers),
        skips=tuple(skips),
    )


def _convolution(name: str, inputs: int, outputs: int, side: int) -> LayerWork:
    """A 3 x 3 convolution whose output is `side` x `side`."""
    weights = 9 * inputs * outputs
    return LayerWork(
        name=name,
        parameters=weights + outputs,
        operations=2 * weights * side**2,
        outputs=outputs * side**2,
        stored=inputs * side**2,
    )


def _residual(name: str, inputs: int, outputs: int, side: int, embedded: int) -> LayerWork:
    """Two convolutions after norms, the time step added between them, and a shortcut."""
    shortcut = 0 if inputs == outputs else inputs * outputs
    products = 9 * inputs * outputs + 9 * outputs**2 + shortcut
    return LayerWork(
        name=name,
        parameters=products + embedded * outputs + 2 * inputs + 5 * outputs,
        operations=2 * products * side**2 + 2 * embedded * outputs,
        outputs=outputs * side**2,
        stored=2 * (inputs + outputs) * side**2,  # inputs of norms and of convolutions
    )


def _with_transformer(work: LayerWork, channels: int, side: int) -> LayerWork:
    """Add a transformer: self-attention, attention to the words, and an inner layer.

    Weights in channels squared: 2 for the projections in and out, 4 and 2 for the two attentions,
    12 for a gated inner layer; keys and values of the words come on top. Stored: 24 channels per
    point.
    """
    points, words = side**2, 2 * _WORD_WIDTH * channels
    attention = 4 * points * channels * (points + _WORDS)
    return replace(
        work,
        parameters=work.parameters + 20 * channels**2 + words + 23 * channels,
        operations=work.operations + 40 * channels**2 * points + 2 * _WORDS * words + attention,
        stored=work.stored + 24 * channels * points,
    )


GPT = {  # Table 1
    "GPT-Medium": _gpt(24, 1024, 16),
    "GPT-Large": _gpt(24, 1536, 16),
    "GPT-XL": _gpt(24, 2048, 32),
    "GPT-2.7B": _gpt(32, 2560, 32),
}
UNET = {"UNet-Base": _unet(64), "UNet-Medium": _unet(320)}  # Table 2


def unshared_times(
    model: AdaGrouperModel, platform: Platform, num_stages: int, size: int
) -> PipelineTimes:
    """Times of micro-batches of `size` samples on links that no other flow uses."""
    rate = platform.rate(model.dtype) / size
    element = size * model.element_bytes / platform.bandwidth  # seconds per element of a sample
    stages = _partition(model, num_stages, 1 / rate, element)
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    outputs = [element * layer.outputs for layer in model.layers]
    ends = [layers[-1] for layers in stages]

    def activations(stage: int) -> Seconds:
        far = {(a, stage_of[b]) for a, b in model.skips if stage_of[a] == stage < stage_of[b]}
        return math.fsum(outputs[layer] for layer, _ in far | {(ends[stage], stage + 1)})

    def gradients(stage: int) -> Seconds:
        far = {(a, stage_of[a]) for a, b in model.skips if stage_of[a] < stage == stage_of[b]}
        return math.fsum(outputs[layer] for layer, _ in far | {(ends[stage - 1], stage - 1)})

    def links(times: Iterator[Seconds]) -> tuple[LinkTimes, ...]:
        return tuple(LinkTimes(busy=(busy,), latency=platform.latency) for busy in times)

    works = [[model.layers[layer] for layer in layers] for layers in stages]
    return PipelineTimes(
        forward=tuple(sum(work.operations for work in stage) / rate for stage in works),
        backward=tuple(
            sum(work.operations * work.backward_ratio for work in stage) / rate
            + _accumulation_time(stage, model, platform)
            for stage in works
        ),
        activations=links(activations(stage) for stage in range(num_stages - 1)),
        gradients=links(gradients(stage) for stage in range(1, num_stages)),
    )


def _partition(
    model: AdaGrouperModel, num_stages: int, operation: Seconds, element: Seconds
) -> list[range]:
    """Layers of each stage by the planner's rule, which minimises the slowest stage or message."""
    work = [layer.operations * (1 + layer.backward_ratio) * operation for layer in model.layers]
    sent = [0.0, *(layer.outputs * element for layer in model.layers)]
    counts = partition_layers(work, [1.0] * num_stages, transfers=np.tile(sent, (num_stages, 1)))
    return [range(begin, end) for begin, end in pairwise(accumulate(counts, initial=0))]


def _accumulation_time(
    stage: Sequence[LayerWork], model: AdaGrouperModel, platform: Platform
) -> Seconds:
    """Adding the gradients of a micro-batch to the sum."""
    gradients = model.element_bytes * sum(work.parameters for work in stage)
    return _ACCUMULATION * gradients / platform.memory_bandwidth

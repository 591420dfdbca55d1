"""A model cut into stages: what each takes on a platform, and what it sends through its uplink.

A stage is one program, whose outputs are there at its end (section 2.4): what the next stage needs,
and what later ones do, such as the skips of a U-Net, sent to them directly. All of it leaves
through one uplink at the same time, so that the message to the next stage takes as long as all of
it. What is not for the next stage is awaited much later, and delays nobody.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes
from polyrhythm.describe.layer_work import BYTES_OF, LayerWork
from polyrhythm.describe.profiles import layers_of
from polyrhythm.plan.partition import partition_layers
from polyrhythm.types import Bytes, Seconds
from reproduction.ada_grouper.platforms import Platform
from reproduction.ada_grouper.unet import Skip, unet

_SEQUENCE = 1024
_PASSES = 3  # over a gradient, to add it to the sum: two reads and a write


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    layers: tuple[LayerWork, ...]
    dtype: str
    num_parameters: int  # each once, also where two layers share it
    skips: tuple[Skip, ...] = ()

    @property
    def width(self) -> Bytes:
        """Of one number."""
        return BYTES_OF[self.dtype]

    @property
    def operations(self) -> float:
        """Of one sample, forward and backward; the backward is two forwards, as [23] counts it."""
        return 3 * sum(layer.operations for layer in self.layers)


def _gpt(num_blocks: int, hidden: int, num_heads: int) -> Model:
    layers = layers_of(f"gpt-{num_blocks}x{hidden}x{_SEQUENCE}x{num_heads}")
    # The head's product is with the embedding: one matrix, counted by both layers.
    shared = layers[-1].parameters - 2 * hidden
    num_parameters = sum(layer.parameters for layer in layers) - shared
    return Model(layers=tuple(layers), dtype="float16", num_parameters=num_parameters)


def _unet(width: int) -> Model:
    layers, skips = unet(width=width, image=32)
    num_parameters = sum(layer.parameters for layer in layers)
    return Model(
        layers=tuple(layers), dtype="float32", num_parameters=num_parameters, skips=tuple(skips)
    )


GPT = {  # Table 1
    "GPT-Medium": _gpt(24, 1024, 16),
    "GPT-Large": _gpt(24, 1536, 16),
    "GPT-XL": _gpt(24, 2048, 32),
    "GPT-2.7B": _gpt(32, 2560, 32),
}
UNET = {"UNet-Base": _unet(64), "UNet-Medium": _unet(320)}  # Table 2


def alone(model: Model, platform: Platform, num_stages: int, size: int) -> PipelineTimes:
    """Times of micro-batches of `size` samples on links of one's own."""
    rate = platform.rate(model.dtype) / size
    second = size * model.width / platform.bandwidth  # of one number of each sample, on the way
    stages = _stages(model, num_stages, 1 / rate, second)
    place = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    outputs = [second * layer.outputs for layer in model.layers]
    ends = [layers[-1] for layers in stages]
    down = [
        math.fsum(outputs[layer] for layer, _ in _sent_by(stage, model.skips, place, ends))
        for stage in range(num_stages - 1)
    ]
    up = [
        math.fsum(outputs[layer] for layer, _ in _sent_back_by(stage, model.skips, place, ends))
        for stage in range(1, num_stages)
    ]
    works = [[model.layers[layer] for layer in layers] for layers in stages]
    return PipelineTimes(
        forward=tuple(sum(work.operations for work in stage) / rate for stage in works),
        backward=tuple(
            sum(work.operations * work.backward_ratio for work in stage) / rate
            + _accumulated(stage, model, platform)
            for stage in works
        ),
        activations=tuple(LinkTimes(busy=(busy,), latency=platform.latency) for busy in down),
        gradients=tuple(LinkTimes(busy=(busy,), latency=platform.latency) for busy in up),
    )


def _stages(model: Model, num_stages: int, operation: Seconds, number: Seconds) -> list[range]:
    """Layers of each stage, by the planner's rule: the slowest stage or message is the fastest."""
    work = [layer.operations * (1 + layer.backward_ratio) * operation for layer in model.layers]
    sent = [0.0, *(layer.outputs * number for layer in model.layers)]
    counts = partition_layers(work, [1.0] * num_stages, transfers=np.tile(sent, (num_stages, 1)))
    return [range(begin, end) for begin, end in pairwise(accumulate(counts, initial=0))]


def _sent_by(
    stage: int, skips: Sequence[Skip], place: dict[int, int], ends: Sequence[int]
) -> set[tuple[int, int]]:
    """Layers whose outputs leave the stage, and the stages that they go to."""
    far = {(a, place[b]) for a, b in skips if place[a] == stage < place[b]}
    return far | {(ends[stage], stage + 1)}


def _sent_back_by(
    stage: int, skips: Sequence[Skip], place: dict[int, int], ends: Sequence[int]
) -> set[tuple[int, int]]:
    """Layers whose outputs' gradients leave the stage, and the stages that they go to."""
    far = {(a, place[a]) for a, b in skips if place[a] < stage == place[b]}
    return far | {(ends[stage - 1], stage - 1)}


def _accumulated(stage: Sequence[LayerWork], model: Model, platform: Platform) -> Seconds:
    """Adding the gradients of a micro-batch to the sum."""
    gradients = model.width * sum(work.parameters for work in stage)
    return _PASSES * gradients / platform.memory_bandwidth

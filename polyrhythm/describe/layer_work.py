"""Count a layer by its shape: operations and stored numbers for one sample, not measured.

This gives a profile for a device of known speed. Time is operations over operations per second:
layers that only move numbers (an embedding, a norm) take none, unlike in a measured profile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from polyrhythm.describe.model import AtSize, Layer
from polyrhythm.types import Bytes

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Counts for one sample; a multiplication and its addition are two operations."""

    name: str
    parameters: int
    operations: int  # of products of matrices, in the forward
    outputs: int
    stored: int  # kept from the forward to the backward, the layer's input among them
    other_bytes: Bytes = 0  # also stored, with their own type: indices
    backward_ratio: float = 2.0  # of a backward's operations: gradients of weights and of the input


def layer_of(
    work: LayerWork, flops: float, size: int, other_sizes: Sequence[int], width: Bytes
) -> Layer:
    own = _at_size(work, flops, size, width)
    return Layer(
        name=work.name,
        forward=own.forward,
        backward=own.backward,
        parameter_bytes=width * work.parameters,
        activation_bytes=own.activation_bytes,
        stored_bytes=own.stored_bytes,
        sizes=tuple(_at_size(work, flops, other, width) for other in other_sizes),
    )


def _at_size(work: LayerWork, flops: float, size: int, width: Bytes) -> AtSize:
    forward = size * work.operations / flops
    return AtSize(
        microbatch_size=size,
        forward=forward,
        backward=work.backward_ratio * forward,
        activation_bytes=size * width * work.outputs,
        stored_bytes=size * (width * work.stored + work.other_bytes),
    )

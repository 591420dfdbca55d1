"""Assign parameters to buckets: neighbours in forward order, of one dtype and device.

The assignment is the same on all workers: rank 0 broadcasts the order first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from polyrhythm.sync.fusion.layers import by_bytes
from polyrhythm.types import Bytes


@dataclass(frozen=True, slots=True)
class ParameterOrder:
    """The order in which the forward uses the parameters, by index."""

    indices: tuple[int, ...]  # of all parameters
    late: frozenset[int] = frozenset()  # parameters whose gradients come in no known order

    @classmethod
    def of(cls, seen: Sequence[int], num_parameters: int, late: frozenset[int]) -> "ParameterOrder":
        """Put parameters that the forward has not used last, and mark them late."""
        unseen = frozenset(range(num_parameters)) - set(seen)
        return cls((*seen, *sorted(unseen)), late | unseen)


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """The parameters of one bucket."""

    indices: tuple[int, ...]
    is_late: bool


def assign_buckets(
    parameters: Sequence[nn.Parameter], order: ParameterOrder, bucket_bytes: Bytes
) -> tuple[BucketSpec, ...]:
    """Fill buckets of about `bucket_bytes`, sorted by the first use of a bucket in the forward."""
    kinds: dict[tuple[object, object, bool], list[int]] = {}
    for index in order.indices:
        kind = parameters[index].dtype, parameters[index].device, index in order.late
        kinds.setdefault(kind, []).append(index)
    position = {index: number for number, index in enumerate(order.indices)}
    specs = [
        BucketSpec(tuple(indices[i] for i in run), is_late)
        for (_, _, is_late), indices in kinds.items()
        for run in by_bytes([parameters[i].nbytes for i in indices], bucket_bytes)
    ]
    return tuple(sorted(specs, key=lambda spec: position[spec.indices[0]]))

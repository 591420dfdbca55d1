"""Which parameters travel together: neighbours in the order of the forward, of one kind.

The same on all workers, who agree on the order first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from polyrhythm.sync.fusion.layers import by_bytes
from polyrhythm.types import Bytes


@dataclass(frozen=True, slots=True)
class ParameterOrder:
    """Of parameters, by index."""

    indices: tuple[int, ...]  # all of them, as the forward needs them
    late: frozenset[int] = frozenset()  # whose gradients do not come in the reverse order

    @classmethod
    def of(cls, seen: Sequence[int], num_parameters: int, late: frozenset[int]) -> "ParameterOrder":
        """What the forward was not seen to use comes last, and late."""
        unseen = frozenset(range(num_parameters)) - set(seen)
        return cls((*seen, *sorted(unseen)), late | unseen)


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Parameters of one bucket."""

    indices: tuple[int, ...]
    is_late: bool


def assign_buckets(
    parameters: Sequence[nn.Parameter], order: ParameterOrder, bucket_bytes: Bytes
) -> tuple[BucketSpec, ...]:
    """In the order in which the forward first needs them."""
    kinds: dict[tuple[object, object, bool], list[int]] = {}
    for index in order.indices:
        kind = parameters[index].dtype, parameters[index].device, index in order.late
        kinds.setdefault(kind, []).append(index)
    position = {index: number for number, index in enumerate(order.indices)}
    groups = [
        BucketSpec(tuple(indices[i] for i in run), is_late)
        for (_, _, is_late), indices in kinds.items()
        for run in by_bytes([parameters[i].nbytes for i in indices], bucket_bytes)
    ]
    return tuple(sorted(groups, key=lambda group: position[group.indices[0]]))

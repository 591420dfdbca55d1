"""Which parameters travel together: neighbours in the order of the forward, of one kind.

The same on all workers, who agree on the order first.
"""

from collections.abc import Sequence

from torch import nn

from polyrhythm.sync.fusion.layers import by_bytes
from polyrhythm.types import Bytes


def grouped(
    parameters: Sequence[nn.Parameter], order: Sequence[int], bucket_bytes: Bytes
) -> list[list[int]]:
    """Indices of each bucket; buckets in the order in which the forward first needs them."""
    kinds: dict[object, list[int]] = {}
    for index in order:
        kind = parameters[index].dtype, parameters[index].device
        kinds.setdefault(kind, []).append(index)
    place = {index: number for number, index in enumerate(order)}
    buckets = [
        [indices[i] for i in run]
        for indices in kinds.values()
        for run in by_bytes([parameters[i].nbytes for i in indices], bucket_bytes)
    ]
    return sorted(buckets, key=lambda bucket: place[bucket[0]])


def completed(order: Sequence[int], num_parameters: int) -> list[int]:
    """The order, and behind it those that were not used, as they are listed."""
    known = set(order)
    return [*order, *(i for i in range(num_parameters) if i not in known)]

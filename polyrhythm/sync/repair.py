"""Repair of an average whose members are lost between reduce-scatter and all-gather.

Every member owns a shard of the mean and sends it to all others. If a member is lost before the
all-gather ends, some of the others may have its shard already, and training may use it. So the
survivors forward shards: the first survivor that has a shard sends it to those without it. A shard
that no survivor has is lost: the first survivor's values from before the average replace it
everywhere. Afterwards all survivors have the same values.

Source: none.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from polyrhythm.types import Worker


class ShardTransfer(NamedTuple):
    """A shard that one survivor sends to others."""

    part: int
    source: Worker
    receivers: tuple[Worker, ...]
    is_lost: bool  # no survivor has it: the source sends its values from before the average


def plan_transfers(has: Mapping[Worker, Collection[int]], num_parts: int) -> list[ShardTransfer]:
    """Plan the transfers in the order of parts; `has` maps each survivor to its parts."""
    survivors, transfers = sorted(has), []
    for part in range(num_parts):
        holders = [worker for worker in survivors if part in has[worker]]
        source = holders[0] if holders else survivors[0]
        receivers = tuple(w for w in survivors if w not in holders and w != source)
        if receivers:
            transfers.append(ShardTransfer(part, source, receivers, is_lost=not holders))
    return transfers

"""Mending: who gives whom what, when members are lost between the two halves of an average.

Every member owns a part of the mean, and is to send it to all others. If one is lost on the way,
some of the others may have its part already, and training may use it. So those who are left hand
parts on: each comes from the first of them who has it. A part that nobody has is lost, and the
first one's own numbers, as they were before the average, take its place for everybody. In the end
all who are left have the same numbers.

Source: none.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from polyrhythm.types import Worker


class PartTransfer(NamedTuple):
    """A part that one worker sends to others."""

    part: int
    source: Worker
    receivers: tuple[Worker, ...]
    is_lost: bool  # the source has it no more than the others: it sends its own numbers


def plan_transfers(has: Mapping[Worker, Collection[int]], num_parts: int) -> list[PartTransfer]:
    """By part; `has` says of each worker that is left which parts it has."""
    left, found = sorted(has), []
    for part in range(num_parts):
        holders = [worker for worker in left if part in has[worker]]
        source = holders[0] if holders else left[0]
        receivers = tuple(w for w in left if w not in holders and w != source)
        if receivers:
            found.append(PartTransfer(part, source, receivers, is_lost=not holders))
    return found

"""A row of what the paper states, which gives a reason only if ours differs."""

from collections.abc import Sequence
from dataclasses import replace

from polyrhythm.simulate.reproduce.claim import Row

OVERHEADS = (
    "here nothing costs anything but compute and network: launching a collective, copying into "
    "buffers, and the update, which the paper's system makes during the forward, take no time"
)


def stated(
    place: str,
    what: str,
    printed: float,
    ours: float,
    *,
    printed_order: tuple[str, ...] = (),
    our_order: tuple[str, ...] = (),
    why: str = OVERHEADS,
) -> Row:
    row = Row(
        place=place,
        what=what,
        printed=printed,
        ours=ours,
        printed_order=printed_order,
        our_order=our_order,
    )
    return row if row.passes else replace(row, why=why)


def always(
    place: str, what: str, order: tuple[str, str], holds: Sequence[bool], *, why: str = OVERHEADS
) -> Row:
    """In how many cases one is better than the other; the order is kept if it is so in all."""
    return stated(
        place,
        f"{what}: cases of {len(holds)}",
        len(holds),
        sum(holds),
        printed_order=order,
        our_order=order if all(holds) else order[::-1],
        why=why,
    )

"""A row of what the paper states, which gives a reason only if ours differs."""

from collections.abc import Sequence
from dataclasses import replace

from polyrhythm.simulate.reproduce.claim import Row


def stated(
    place: str,
    what: str,
    printed: float,
    ours: float,
    *,
    why: str,
    printed_order: tuple[str, ...] = (),
    our_order: tuple[str, ...] = (),
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


def always(place: str, what: str, holds: Sequence[bool], *, why: str) -> Row:
    """A statement without a figure: in how many of the cases that it is about it is true."""
    return stated(place, f"{what}: cases", len(holds), sum(holds), why=why)


def sometimes(place: str, what: str, holds: Sequence[bool], *, why: str) -> Row:
    """A statement that there are such cases: whether there is one."""
    return stated(place, f"{what}: is there a case", 1, any(holds), why=why)

"""Rows that give a reason only if they need one, and rows of statements without a figure."""

from collections.abc import Sequence
from dataclasses import replace

from reproduction.claim import Row


def explained(row: Row, why: str) -> Row:
    """With the reason if it differs, else without one."""
    return replace(row, why="" if row.passes else why)


def stated(
    place: str, what: str, printed: float, ours: float, *, why: str = "", is_given: bool = False
) -> Row:
    row = Row(place=place, what=what, printed=printed, ours=ours, is_given=is_given)
    return explained(row, why)


def always(place: str, what: str, holds: Sequence[bool], *, why: str = "") -> Row:
    """It passes if the statement is true in every case that it is about."""
    cases = f"{what}: cases of {len(holds)}"
    row = Row(place=place, what=cases, printed=len(holds), ours=sum(holds), is_exact=True)
    return explained(row, why)


def sometimes(place: str, what: str, holds: Sequence[bool], *, why: str = "") -> Row:
    """It passes if there is a case in which the statement is true."""
    found = f"{what}: is there a case"
    row = Row(place=place, what=found, printed=1, ours=any(holds), is_exact=True)
    return explained(row, why)

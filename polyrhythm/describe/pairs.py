"""Rounds in which every pair is measured once, next to pairs that do not disturb it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def round_robin_pairs(members: Sequence[T]) -> Iterator[list[tuple[T, T]]]:
    """Rounds of pairs without a common member; every directed pair is in one of them.

    The circle method of tournaments: the first stays, the others move on by one place each round.
    """
    # The number of a member, not itself: None is a free round.
    circle: list[int | None] = [*range(len(members)), *([None] if len(members) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        there = [(members[a], members[b]) for a, b in facing if a is not None and b is not None]
        if there:
            yield there
            yield [(b, a) for a, b in there]
        circle[1:] = [circle[-1], *circle[1:-1]]


def disjoint_rounds(
    pairs: Sequence[tuple[T, T]], place: Mapping[T, str]
) -> Iterator[list[tuple[T, T]]]:
    """The pairs in rounds of their own, in none of which two pairs have a place in common.

    First fit: a pair joins the first round in which both of its places are free.
    """
    rounds: list[tuple[set[str], list[tuple[T, T]]]] = []
    for a, b in pairs:
        here = {place[a], place[b]}
        for taken, together in rounds:
            if not taken & here:
                taken |= here
                together.append((a, b))
                break
        else:
            rounds.append((here, [(a, b)]))
    yield from (together for _, together in rounds)

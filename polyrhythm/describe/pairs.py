"""Arrange pairs in rounds, so that pairs measured concurrently do not share a member."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def round_robin_pairs(members: Sequence[T]) -> Iterator[list[tuple[T, T]]]:
    """Yield rounds of pairs without a common member; every ordered pair is in one of them.

    The circle method of tournaments: the first stays, the others rotate by one each round.
    """
    # Indices instead of members: None is a bye.
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
    """Yield rounds of pairs, such that no two pairs of a round share a `place` (a machine).

    First fit: a pair joins the first round in which both of its places are free.
    """
    rounds: list[tuple[set[str], list[tuple[T, T]]]] = []
    for a, b in pairs:
        places = {place[a], place[b]}
        for taken, batch in rounds:
            if not taken & places:
                taken |= places
                batch.append((a, b))
                break
        else:
            rounds.append((places, [(a, b)]))
    yield from (batch for _, batch in rounds)

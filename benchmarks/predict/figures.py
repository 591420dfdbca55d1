"""From predictions and measurements to three figures: the usual error, the worst, the ranking."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.predict.rows import Row

TIE = 0.02  # two step times that differ by less are not ranked: so far may two runs be apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    median_error: float
    worst_error: float
    ranking: float  # of the pairs of alternatives that are no tie, those in the predicted order
    ranking_with_ties: float  # of all pairs
    num_pairs: int
    num_ties: int
    worst_spread: float  # between two measurements of the same; 0 where nothing was repeated


def figures(rows: Sequence[Row]) -> Figures:
    errors = [row.error for row in rows]
    pairs = list(_pairs(rows))
    apart = [pair for pair in pairs if not _is_tie(*pair)]
    return Figures(
        median_error=statistics.median(errors),
        worst_error=max(errors),
        ranking=_share_in_order(apart),
        ranking_with_ties=_share_in_order(pairs),
        num_pairs=len(pairs),
        num_ties=len(pairs) - len(apart),
        worst_spread=max((row.spread for row in rows if row.spread is not None), default=0.0),
    )


def _pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Alternatives on the same network: that is what a user chooses between."""
    return ((a, b) for a, b in combinations(rows, 2) if a.network == b.network)


def _is_tie(a: Row, b: Row) -> bool:
    return abs(a.measured - b.measured) < TIE * min(a.measured, b.measured)


def _share_in_order(pairs: Sequence[tuple[Row, Row]]) -> float:
    """1 if there is nothing to rank."""
    if not pairs:
        return 1.0
    agree = [(a.predicted < b.predicted) == (a.measured < b.measured) for a, b in pairs]
    return statistics.fmean(agree)

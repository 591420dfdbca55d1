"""What a paper says, and what comes out here: rows with a verdict each, and plots.

A row passes if our figure is within 20 % of the printed one and, where it compares methods, they
come in the same order. Nothing is fitted: what goes in is the paper's set-up, and where ours
differs, the row says why.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TOLERANCE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of the paper, as its text or its table states it."""

    place: str  # in the paper: "Fig. 4", "Table II", "section 5.2"
    what: str  # is compared with what, and where
    printed: float
    ours: float
    printed_order: tuple[str, ...] = ()  # of methods, the best first; none where one stands alone
    our_order: tuple[str, ...] = ()
    why: str = ""  # it differs, if it does

    @property
    def is_near(self) -> bool:
        return abs(self.ours - self.printed) <= TOLERANCE * abs(self.printed)

    @property
    def keeps_order(self) -> bool:
        return self.printed_order == self.our_order

    @property
    def passes(self) -> bool:
        return self.is_near and self.keeps_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines over numbers, or bars over words."""

    name: str  # of its file
    title: str
    x: str  # what is along the axes, with units
    y: str
    series: Mapping[str, Sequence[tuple[float | str, float]]]
    printed: Mapping[str, Sequence[tuple[float | str, float]]]  # the paper's; dashed, or outlined


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    paper: str  # "sdpipe"
    title: str
    source: str  # authors, venue, year
    setup: str  # of the paper, and how it is modelled here; Markdown
    rows: tuple[Row, ...]
    plots: tuple[Plot, ...]

    @property
    def num_passed(self) -> int:
        return sum(row.passes for row in self.rows)


Reproduce = Callable[[Callable[[str], None]], Reproduction]  # told what it is at


def ordered(values: Mapping[str, float], *, highest_first: bool = True) -> tuple[str, ...]:
    """Names from the best to the worst; equal ones as they are given."""
    return tuple(sorted(values, key=values.__getitem__, reverse=highest_first))

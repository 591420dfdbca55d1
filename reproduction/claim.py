"""What a paper says, and what comes out here: rows with a verdict each, and plots.

A row passes if all of these hold:

- Our figure is within 20 % of the printed one; a choice, or a number of cases, is the same.
- What is printed as a gain is one here: where the printed figure is above 1, ours is above 1 by a
  tenth of that or more; where it is below 1, likewise. Else 1.0 would be near many small gains.
- Methods come in the same order, where the row compares several.

Rows that go in, or that follow from other rows, are shown but do not count. No constant is fitted:
what goes in is the paper's set-up. Where a reading of the paper was chosen with the figures known,
the set-up says so; where ours differs, the row says why.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TOLERANCE = 0.2
LEAST_GAIN = 0.1  # of the printed one


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
    is_exact: bool = False  # a choice, or a number of cases: nothing is near it but itself
    is_given: bool = False  # it goes in, or follows from other rows

    @property
    def is_near(self) -> bool:
        if self.is_exact:
            return self.ours == self.printed
        return abs(self.ours - self.printed) <= TOLERANCE * abs(self.printed)

    @property
    def keeps_gain(self) -> bool:
        """Or loss, where less than 1 is printed."""
        gain, printed = self.ours - 1, self.printed - 1
        return gain * printed >= LEAST_GAIN * printed**2

    @property
    def keeps_order(self) -> bool:
        return self.printed_order == self.our_order

    @property
    def passes(self) -> bool:
        return self.is_near and self.keeps_gain and self.keeps_order


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
    def counted(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.is_given)

    @property
    def num_passed(self) -> int:
        return sum(row.passes for row in self.counted)


Reproduce = Callable[[Callable[[str], None]], Reproduction]  # told what it is at


def ordered(values: Mapping[str, float], *, highest_first: bool = True) -> tuple[str, ...]:
    """Names from the best to the worst; equal ones as they are given."""
    return tuple(sorted(values, key=values.__getitem__, reverse=highest_first))

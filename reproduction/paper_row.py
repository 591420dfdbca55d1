"""Rows that compare a printed figure with ours, and the plots and papers that hold them.

A row passes if all of these hold:

- Ours is within 20 % of the printed figure; a choice or a number of cases is equal to it.
- A printed gain stays a gain: where the printed figure is above 1, ours exceeds 1 by a tenth of the
  printed gain or more; likewise for losses. Otherwise 1.0 would be near many small gains.
- Methods come in the printed order, if the row compares several.

A `given` row is an input or follows from other rows: it is shown but not counted. No constant is
fitted; the inputs are the paper's set-up. Where a reading of the paper was chosen with the figures
known, the set-up text says so; where ours differs, the row states the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

TOLERANCE = 0.2
MIN_GAIN = 0.1  # of the printed gain

Points = Sequence[tuple[float | str, float]]


@dataclass(frozen=True, slots=True)
class PaperRow:
    """One figure that the paper's text or a table states, and ours."""

    place: str  # in the paper: "Fig. 4", "Table II", "section 5.2"
    what: str  # is compared
    printed: float
    ours: float
    _: KW_ONLY
    why: str = ""  # ours differs; shown only if the row does not pass
    printed_order: tuple[str, ...] = ()  # of methods, best first; empty if only one is measured
    our_order: tuple[str, ...] = ()
    is_exact: bool = False  # a choice or a number of cases: only the same value passes
    is_given: bool = False  # an input, or a consequence of other rows

    @property
    def is_near(self) -> bool:
        if self.is_exact:
            return self.ours == self.printed
        return abs(self.ours - self.printed) <= TOLERANCE * abs(self.printed)

    @property
    def keeps_gain(self) -> bool:
        """Whether a printed gain (above 1) is a gain here, and a printed loss (below 1) a loss."""
        gain, printed = self.ours - 1, self.printed - 1
        return gain * printed >= MIN_GAIN * printed**2

    @property
    def keeps_order(self) -> bool:
        return self.printed_order == self.our_order

    @property
    def passes(self) -> bool:
        return self.is_near and self.keeps_gain and self.keeps_order


def always(place: str, what: str, holds: Sequence[bool], *, why: str = "") -> PaperRow:
    """A statement that the paper makes about every case; passes if it holds in all of them."""
    cases = f"{what}: cases of {len(holds)}"
    return PaperRow(place, cases, len(holds), sum(holds), why=why, is_exact=True)


def sometimes(place: str, what: str, holds: Sequence[bool], *, why: str = "") -> PaperRow:
    """A statement that the paper makes about some case; passes if it holds in one or more."""
    return PaperRow(place, f"{what}, in at least one case", 1, any(holds), why=why, is_exact=True)


def ordered(values: Mapping[str, float], *, highest_first: bool = True) -> tuple[str, ...]:
    """Names sorted by value, best first; ties keep their order."""
    return tuple(sorted(values, key=values.__getitem__, reverse=highest_first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Line charts have numbers on the x axis, bar charts have names."""

    name: str  # part of the file name
    title: str
    x: str  # axis labels, with units
    y: str
    series: Mapping[str, Points]
    printed: Mapping[str, Points] = field(default_factory=dict)  # the paper's values
    is_log: bool = False  # both axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    paper: str  # "sdpipe"
    title: str
    source: str  # authors, venue, year
    setup: str  # of the paper, and how it is modelled here; Markdown
    rows: tuple[PaperRow, ...]
    plots: tuple[Plot, ...]

    @property
    def counted(self) -> tuple[PaperRow, ...]:
        return tuple(row for row in self.rows if not row.is_given)

    @property
    def num_passed(self) -> int:
        return sum(row.passes for row in self.counted)


Reproduce = Callable[[Callable[[str], None]], Reproduction]  # takes a logger of progress

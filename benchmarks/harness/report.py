"""What a benchmark reports: ratios held against bars, tables, and one line of JSON."""

import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from rich.console import Console

from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Seconds

Row = TypeVar("Row")
_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt}


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio of a benchmark and the value that it must reach; None: it is reported only."""

    name: str  # of the ratio
    sign: Literal[">=", "<=", ">"]
    value: float | None
    about: str = ""

    def is_met(self, ratio: float) -> bool:
        return self.value is None or bool(_COMPARE[self.sign](ratio, self.value))

    def verdict(self, ratio: float) -> str:
        if self.value is None:
            return "reported"
        return "met" if self.is_met(ratio) else "MISSED"

    def __str__(self) -> str:
        return "" if self.value is None else f"{self.sign} {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a benchmark measured. Percentages are fractions; `rows` are dataclasses."""

    bench: str
    ratios: Mapping[str, float]  # one per bar
    figures: Mapping[str, float] = field(default_factory=dict)
    rows: Sequence[object] = ()  # for the file only
    failures: Mapping[str, str] = field(default_factory=dict)  # why a ratio is not there, by name

    def line(self, *, quick: bool, duration: Seconds) -> str:
        """Return the ratios and figures as one JSON object on one line."""
        return msgspec.json.encode(self._content(quick, duration)).decode()

    def save(self, folder: Path, *, quick: bool, duration: Seconds) -> Path:
        """Write the same object with the rows to NAME.json in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.bench}.json"
        content = {**self._content(quick, duration), "rows": self.rows}
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
        return path

    def _content(self, quick: bool, duration: Seconds) -> dict[str, object]:
        return {
            "bench": self.bench,
            "ratios": {name: _rounded(value) for name, value in self.ratios.items()},
            "figures": {name: _rounded(value) for name, value in self.figures.items()},
            "quick": quick,
            "seconds": round(duration, 1),
            **({"failures": dict(self.failures)} if self.failures else {}),
        }


def _rounded(value: float) -> float:
    """Round to the digits that a measurement has; keep a count as it is."""
    return value if isinstance(value, int) else float(f"{value:.5g}")


def names_of(bars: Iterable[Bar]) -> set[str]:
    return {bar.name for bar in bars}


def select(rows: Iterable[Row], **where: object) -> list[Row]:
    """Return the rows with these values, such as `side="torch"`."""
    return [row for row in rows if all(getattr(row, name) == where[name] for name in where)]


def median_of(rows: Iterable[Row], value: str, **where: object) -> float:
    """Return the median of an attribute of the rows with these values."""
    return float(statistics.median(getattr(row, value) for row in select(rows, **where)))


def ratio_over_rounds(
    rows: Sequence[Any], value: str, side: str, other: str, **where: object
) -> float:
    """Return the ratio of two sides' values: the median over the rounds that have both."""
    one, two = (
        {row.round: getattr(row, value) for row in select(rows, side=name, **where)}
        for name in (side, other)
    )
    return float(statistics.median(one[number] / two[number] for number in one.keys() & two.keys()))


def print_bars(
    console: Console,
    bars: Iterable[Bar],
    ratios: Mapping[str, float],
    *,
    quick: bool,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Print each ratio beside its bar; a note replaces what the bar is about."""
    if quick:
        print_line(console, "quick: a smoke test; its figures prove nothing: omit --quick")
        return
    notes = notes or {}
    cells = [
        (
            bar.name,
            f"{ratios[bar.name]:.5g}",
            str(bar),
            bar.verdict(ratios[bar.name]),
            notes.get(bar.name, bar.about),
        )
        for bar in bars
    ]
    print_table(console, ["ratio", "measured", "bar", "", ""], cells)


def print_rows(
    console: Console,
    rows: Iterable[Row],
    columns: Mapping[str, Callable[[Row], str]],
    *,
    title: str | None = None,
    numbers: bool = True,
) -> None:
    """Print a table: `columns` maps each header to the text of its cell."""
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    print_table(console, list(columns), cells, title=title, numbers=numbers)


def print_disturbed(console: Console, is_disturbed: Sequence[bool]) -> None:
    """Print a warning if the emulated network was late during some runs."""
    if any(is_disturbed):
        print_line(
            console,
            f"not to be trusted: the emulated network was late in {sum(is_disturbed)} of "
            f"{len(is_disturbed)} runs: repeat it while the machine has nothing else to do",
        )


def progress_printer(console: Console) -> Callable[[str], None]:
    """Return a function which prints a line on a terminal, and nothing elsewhere."""

    def show(line: str) -> None:
        if console.is_terminal:
            print_line(console, line)

    return show

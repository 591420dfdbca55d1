"""The last table of a benchmark: each ratio that it found, beside the bar it is held against."""

from collections.abc import Iterable

from rich.console import Console

from polyrhythm.tables import print_line, print_table


def print_bars(console: Console, rows: Iterable[tuple[str, str, str, str]], *, quick: bool) -> None:
    """Of name, value, bar and verdict; a quick run has no ratios to speak of, nor all of them."""
    if quick:
        print_line(console, "quick: it runs, and its figures say nothing; leave --quick out")
    else:
        print_table(console, ["ratio", "measured", "bar", ""], rows, numbers=True)

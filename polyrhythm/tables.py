"""Print tables as wide as their content, without truncation or markup.

A number truncated to fit a narrow screen is a wrong number, and brackets in a user's names are not
markup.
"""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


def print_table(
    console: Console,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    numbers: bool = False,
) -> None:
    """Print a table; with `numbers`, all columns after the first are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for place, name in enumerate(header):
        table.add_column(Text(name), justify="right" if numbers and place else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if title is not None:  # printed separately: inside the table it would wrap at the table's width
        console.print(Text(title, style="italic"), soft_wrap=not console.is_terminal)
    endless = console.options.update(max_width=10_000)
    width = Measurement.get(console, endless, table).maximum
    Console(file=console.file, width=max(width, console.width)).print(table)


def print_line(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)

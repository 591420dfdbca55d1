"""Tables for people: as wide as their content, and every text as it is.

A number cut short to fit a narrow screen is a wrong number, and brackets in a user's names are not
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
    """`numbers`: columns after the first stand right."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for place, name in enumerate(header):
        table.add_column(Text(name), justify="right" if numbers and place else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if title is not None:  # on its own: inside it would be broken at the table's width
        console.print(Text(title, style="italic"), soft_wrap=not console.is_terminal)
    endless = console.options.update(max_width=10_000)
    width = Measurement.get(console, endless, table).maximum
    Console(file=console.file, width=max(width, console.width)).print(table)


def print_line(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)

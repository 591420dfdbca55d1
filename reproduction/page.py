"""A reproduction as a page: the set-up, every row with its verdict, the plots; and a list of pages.

All pages of a folder are listed in its README.md, with their counts, which are read from the pages:
one paper can be done again without the others. What somebody else has written is never replaced.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.errors import UserError
from polyrhythm.tables import print_line, print_table
from reproduction.axis import figure
from reproduction.chart import draw_plot
from reproduction.claim import (
    LEAST_GAIN,
    TOLERANCE,
    Plot,
    Reproduction,
    Row,
)

if TYPE_CHECKING:
    from rich.console import Console

INDEX = "README.md"
_HEADER = ("place", "what", "printed", "ours", "ratio", "verdict", "why")
_MARK = "<!-- polyrhythm reproduce writes this file -->"
_TITLE = re.compile(r"^# (.*)$", re.MULTILINE)
_COUNT = re.compile(r"^\*\*(\d+) of (\d+) rows pass\*\*", re.MULTILINE)
_RULE = (
    f": within {TOLERANCE:.0%} of the printed figure, a choice or a number of cases equal to it; "
    f"a printed gain or loss kept, by {LEAST_GAIN:.0%} of it at the least; methods in the printed "
    "order. Rows that are `given` go in, or follow from other rows, and do not count."
).replace("%", " %")
_NARROWEST, _GAP = 20, 2  # letters of what a row is about, and between columns
_FILE_NAME = re.compile(r"[\w.-]+")


def counted(num_passed: int, num_rows: int) -> str:
    return f"{num_passed} of {num_rows} rows pass"


def page(reproduction: Reproduction) -> str:
    """Markdown."""
    count = counted(reproduction.num_passed, len(reproduction.counted))
    parts = [
        _MARK,
        f"# {_line(reproduction.title)}",
        reproduction.source.strip(),
        f"**{count}**{_RULE}",
        "## Set-up",
        reproduction.setup.strip(),
        "## Rows",
        "\n".join(_table(reproduction.rows)),
    ]
    if reproduction.plots:
        parts.append("## Plots")
    for plot in reproduction.plots:
        parts.append(f"![{_line(plot.title)}]({_file(reproduction, plot)})")
    return "\n\n".join(parts) + "\n"


def write(reproduction: Reproduction, folder: Path) -> Path:
    """Its page and its plots, and the list of all pages in the folder; returns the page."""
    path = folder / f"{reproduction.paper}.md"
    _refuse_foreign(path)
    _refuse_foreign(folder / INDEX)
    folder.mkdir(parents=True, exist_ok=True)
    for plot in reproduction.plots:
        _save(folder / _file(reproduction, plot), draw_plot(plot))
    _save(path, page(reproduction))
    _save(folder / INDEX, index(folder))
    return path


def index(folder: Path) -> str:
    """Markdown: the pages of a folder, and how many of their rows pass."""
    rows, num_passed, num_rows = [], 0, 0
    for path in sorted(folder.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        title, count = _TITLE.search(text), _COUNT.search(text)
        if path.name == INDEX or _MARK not in text or title is None or count is None:
            continue
        passed, of = map(int, count.groups())
        num_passed, num_rows = num_passed + passed, num_rows + of
        rows.append(f"| [{_cell(title[1])}]({path.name}) | {passed} of {of} |")
    head = ["| paper | rows that pass |", "|---|---|"]
    parts = [
        _MARK,
        "# Reproductions",
        "What papers print, and what comes out here: by the planner, the schedules, the policies\n"
        "and costs that train for real, in virtual time; each page says which of these it uses, "
        "and\nwhat is its own. No constant is fitted; where a reading of the paper was chosen with "
        "the figures\nknown, the page says so. `polyrhythm reproduce all` writes these pages anew.",
        f"**{counted(num_passed, num_rows)}**",
        "\n".join([*head, *rows]),
    ]
    return "\n\n".join(parts) + "\n"


def show(reproduction: Reproduction, console: "Console") -> None:
    """The rows as a table; below it why they differ, a line each.

    On a terminal both are broken between words where they are too long for it.
    """
    title = f"{reproduction.title} ({reproduction.source})"
    rows = [_cells(row)[:-1] for row in reproduction.rows]
    if console.is_terminal:
        rows = _narrowed(rows, console.width)
    print_table(console, _HEADER[:-1], rows, title=title)
    for row in reproduction.rows:
        if why := _why(row):
            line = _line(f"{row.place}, {row.what}: {why}")
            if console.is_terminal:
                line = textwrap.fill(line, console.width, subsequent_indent="  ")
            print_line(console, line)


def _narrowed(rows: list[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """With what a row is about in lines as long as the other columns leave room for."""
    others = [max(map(len, cells)) for cells in zip(_HEADER[:-1], *rows, strict=True)]
    room = max(_NARROWEST, width - sum(others) - _GAP * len(others) + others[1])
    return [
        (place, textwrap.fill(what, room, break_on_hyphens=False), *figures)
        for place, what, *figures in rows
    ]


def _table(rows: tuple[Row, ...]) -> Iterator[str]:
    yield f"| {' | '.join(_HEADER)} |"
    yield "|---|---|--:|--:|--:|---|---|"
    for row in rows:
        yield f"| {' | '.join(map(_cell, _cells(row)))} |"


def _cells(row: Row) -> tuple[str, ...]:
    ratio = f"{row.ours / row.printed:.2f}" if row.printed else "-"
    verdict = "given" if row.is_given else "passes" if row.passes else "differs"
    printed, ours = figure(row.printed), figure(row.ours)
    return row.place, row.what, printed, ours, ratio, verdict, _why(row)


def _why(row: Row) -> str:
    """The reason, and what is amiss if it is not the distance."""
    if row.passes or (row.keeps_order and (row.keeps_gain or not row.is_near)):
        return row.why
    printed, ours = ", ".join(row.printed_order), ", ".join(row.our_order)
    amiss = f"the order is {ours}; printed: {printed}"
    if row.keeps_order:
        amiss = f"near, but the printed {'gain' if row.printed > 1 else 'loss'} is not there"
    return f"{row.why} ({amiss})" if row.why else amiss


def _file(reproduction: Reproduction, plot: Plot) -> str:
    name = f"{reproduction.paper}-{plot.name}.svg"
    assert _FILE_NAME.fullmatch(name), f"{name!r} is the name of a file and stands in a link"
    return name


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _line(text: str) -> str:
    return " ".join(text.split())


def _save(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _refuse_foreign(path: Path) -> None:
    if path.exists() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise UserError(
            f"{path} is there already, and not by polyrhythm reproduce",
            expected="a folder for reproductions alone: a page for each paper and their list",
            fix=f"give another folder, such as --out {path.parent / 'reproduction'}",
        )

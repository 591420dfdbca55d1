"""Write a reproduction as a Markdown page with its plots, and an index of all pages in a folder.

The index reads the counts from the pages, so one paper can be reproduced again without the others.
Files that `polyrhythm reproduce` did not write are never overwritten.
"""

import math
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.errors import UserError
from polyrhythm.tables import print_line, print_table
from reproduction.chart import draw_plot
from reproduction.paper_row import MIN_GAIN, TOLERANCE, PaperRow, Plot, Reproduction

if TYPE_CHECKING:
    from rich.console import Console

INDEX = "README.md"
_HEADER = ("place", "what", "printed", "ours", "ratio", "verdict", "why")
_MARK = "<!-- polyrhythm reproduce writes this file -->"
_TITLE = re.compile(r"^# (.*)$", re.MULTILINE)
_COUNT = re.compile(r"^\*\*(\d+) of (\d+) rows pass\*\*", re.MULTILINE)
_RULE = (
    f". A row passes if ours is within {TOLERANCE:.0%} of the printed figure (a choice or a number "
    f"of cases: if it is equal), if at least {MIN_GAIN:.0%} of a printed gain or loss remains, and "
    "if methods come in the printed order. Rows marked `given` are inputs or follow from other "
    "rows; they do not count."
).replace("%", " %")
_MIN_WIDTH, _GAP = 20, 2  # characters: of the column `what`, and between columns
_FILE_NAME = re.compile(r"[\w.-]+")


def format_count(num_passed: int, num_rows: int) -> str:
    return f"{num_passed} of {num_rows} rows pass"


def format_number(value: float) -> str:
    """Three significant digits, or all digits before the point; exponents only for extremes."""
    if value == 0 or not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def page(reproduction: Reproduction) -> str:
    """Return the Markdown text of a reproduction's page."""
    count = format_count(reproduction.num_passed, len(reproduction.counted))
    parts = [
        _MARK,
        f"# {_one_line(reproduction.title)}",
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
        parts.append(f"![{_one_line(plot.title)}]({_file_name(reproduction, plot)})")
    return "\n\n".join(parts) + "\n"


def write(reproduction: Reproduction, folder: Path) -> Path:
    """Write the page, its plots and the folder's index; return the path of the page."""
    path = folder / f"{reproduction.paper}.md"
    _refuse_foreign(path)
    _refuse_foreign(folder / INDEX)
    folder.mkdir(parents=True, exist_ok=True)
    for plot in reproduction.plots:
        _save(folder / _file_name(reproduction, plot), draw_plot(plot))
    _save(path, page(reproduction))
    _save(folder / INDEX, index(folder))
    return path


def index(folder: Path) -> str:
    """Return the Markdown text that lists the pages of a folder and how many of their rows pass."""
    rows, num_passed, num_rows = [], 0, 0
    for path in sorted(folder.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        title, count = _TITLE.search(text), _COUNT.search(text)
        if path.name == INDEX or _MARK not in text or title is None or count is None:
            continue
        passed, of = map(int, count.groups())
        num_passed, num_rows = num_passed + passed, num_rows + of
        rows.append(f"| [{_cell(title[1])}]({path.name}) | {passed} of {of} |")
    parts = [
        _MARK,
        "# Reproductions",
        "The figures that five papers print, next to those that this code gives in virtual time.\n"
        "Each page says which parts of the project it runs (planner, schedules, policies, cost\n"
        "models: the same code that trains) and what was written for the page only. No constant\n"
        "is fitted; where a reading of the paper was chosen with the figures known, the page says\n"
        "so. `polyrhythm reproduce all` writes these pages again.",
        f"**{format_count(num_passed, num_rows)}**",
        "\n".join(["| paper | rows that pass |", "|---|---|", *rows]),
    ]
    return "\n\n".join(parts) + "\n"


def show(reproduction: Reproduction, console: "Console") -> None:
    """Print the rows as a table and, below it, one line with the reason for each that differs.

    On a terminal, long texts are wrapped between words.
    """
    title = f"{reproduction.title} ({reproduction.source})"
    rows = [_cells(row)[:-1] for row in reproduction.rows]
    if console.is_terminal:
        rows = _wrap_what(rows, console.width)
    print_table(console, _HEADER[:-1], rows, title=title)
    for row in reproduction.rows:
        if reason := _reason(row):
            line = _one_line(f"{row.place}, {row.what}: {reason}")
            if console.is_terminal:
                line = textwrap.fill(line, console.width, subsequent_indent="  ")
            print_line(console, line)


def _wrap_what(rows: list[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """Wrap the column `what` to the width that the other columns leave."""
    widths = [max(map(len, cells)) for cells in zip(_HEADER[:-1], *rows, strict=True)]
    available = max(_MIN_WIDTH, width - sum(widths) - _GAP * len(widths) + widths[1])
    return [
        (place, textwrap.fill(what, available, break_on_hyphens=False), *figures)
        for place, what, *figures in rows
    ]


def _table(rows: tuple[PaperRow, ...]) -> Iterator[str]:
    yield f"| {' | '.join(_HEADER)} |"
    yield "|---|---|--:|--:|--:|---|---|"
    for row in rows:
        yield f"| {' | '.join(map(_cell, _cells(row)))} |"


def _cells(row: PaperRow) -> tuple[str, ...]:
    ratio = f"{row.ours / row.printed:.2f}" if row.printed else "-"
    verdict = "given" if row.is_given else "passes" if row.passes else "differs"
    printed, ours = format_number(row.printed), format_number(row.ours)
    return row.place, row.what, printed, ours, ratio, verdict, _reason(row)


def _reason(row: PaperRow) -> str:
    """Why the row does not pass, and which criterion fails if it is not the distance."""
    if row.passes:
        return ""
    if row.keeps_order and (row.keeps_gain or not row.is_near):
        return row.why
    printed, ours = ", ".join(row.printed_order), ", ".join(row.our_order)
    failed = f"the order is {ours}; printed: {printed}"
    if row.keeps_order:
        failed = f"near, but the printed {'gain' if row.printed > 1 else 'loss'} is missing"
    return f"{row.why} ({failed})" if row.why else failed


def _file_name(reproduction: Reproduction, plot: Plot) -> str:
    name = f"{reproduction.paper}-{plot.name}.svg"
    assert _FILE_NAME.fullmatch(name), f"{name!r} is not a file name that a link can hold"
    return name


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _save(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _refuse_foreign(path: Path) -> None:
    if path.exists() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise UserError(
            f"{path} exists, and polyrhythm reproduce did not write it",
            expected="a folder that holds nothing but reproductions",
            fix=f"pass another folder, such as --out {path.parent / 'reproduction'}",
        )

"""A check as a table: what every link should be and what it is, and whether to believe it."""

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from polyrhythm.lab.measure import Check, PairCheck
from polyrhythm.types import BytesPerSecond

MEGABIT: BytesPerSecond = 125e3


def show(check: Check, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="described and measured", title_justify="left")
    for heading in ("from", "to"):
        table.add_column(heading)
    for heading in ("round trip, ms", "measured", "error", "Mbit/s", "measured", "error"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in check.rows:
        table.add_row(*_cells(row))
    # As wide as it is: a number cut short to fit a narrow screen is a wrong number.
    width = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    Console(file=console.file, width=max(width, console.width)).print(table)
    for line in _summary(check):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _cells(row: PairCheck) -> list[str]:
    return [
        row.source,
        row.target,
        f"{1e3 * row.described_round_trip:.2f}",
        f"{1e3 * row.round_trip:.2f}",
        f"{1e3 * row.round_trip_error:+.2f}",
        _megabits(row.link.bandwidth),
        _megabits(row.goodput),
        f"{row.goodput_error:+.1%}",
        row.doubt or "",
    ]


def _megabits(rate: BytesPerSecond) -> str:
    """Four digits, but none that are only zeros of an exponent."""
    return f"{rate / MEGABIT:.4g}" if rate < 1e4 * MEGABIT else f"{rate / MEGABIT:.0f}"


def _summary(check: Check) -> list[str]:
    lines = []
    certain = [row for row in check.rows if row.doubt is None]
    if certain:
        slowest = max(certain, key=lambda row: abs(row.goodput_error))
        latest = max(certain, key=lambda row: abs(row.round_trip_error))
        lines += [
            f"largest errors of {len(certain)} links: "
            f"bandwidth {slowest.goodput_error:+.1%} ({slowest.source} to {slowest.target}), "
            f"round trip {1e3 * latest.round_trip_error:+.2f} ms "
            f"({latest.source} to {latest.target})"
        ]
    if doubtful := len(check.rows) - len(certain):
        lines.append(
            f"{doubtful} links are in doubt, since the switch may have been the limit: "
            "use fewer --hosts, or a smaller --byte-scale"
        )
    lines.append(
        f"switch: {check.punctuality}; {check.num_rejected} rounds were repeated as it was late"
    )
    return lines

"""Print a check of all links as a table: described and measured values, errors, doubts."""

from rich.console import Console

from polyrhythm.lab.measure import LinkCheck, PairCheck
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import BytesPerSecond

MEGABIT: BytesPerSecond = 125e3


def show(check: LinkCheck, console: Console) -> None:
    header = ["from", "to", "round trip, ms", "measured", "error"]
    header += ["Mbit/s", "measured", "error", ""]
    rows = [_cells(row) for row in check.rows]
    print_table(console, header, rows, title="described and measured", numbers=True)
    for line in _summary(check):
        print_line(console, line)


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
    """Format with four significant digits, and large values without an exponent."""
    return f"{rate / MEGABIT:.4g}" if rate < 1e4 * MEGABIT else f"{rate / MEGABIT:.0f}"


def _summary(check: LinkCheck) -> list[str]:
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
            f"{doubtful} links are unreliable: the switch may have been the bottleneck; "
            "use fewer --hosts, or a smaller --byte-scale"
        )
    lines.append(
        f"switch: {check.switch_timing}; {check.num_rejected} rounds repeated because it was late"
    )
    return lines

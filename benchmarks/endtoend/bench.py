"""The whole of it against torch alone: a stormy world, a quiet room, saving, and a script."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from benchmarks.bars import print_bars
from benchmarks.endtoend.lines import lines_to_change
from benchmarks.endtoend.quiet import quiet
from benchmarks.endtoend.saving import saving
from benchmarks.endtoend.stormy import StormyRow, stormy
from benchmarks.endtoend.turns import TurnRow
from benchmarks.result import Result
from polyrhythm.tables import print_line, print_table

BARS = {"stormy": 3.0, "stormy_loss": 0.02, "quiet": 1.0, "checkpoint": 1.05, "lines": 10.0}
AT_MOST = ("stormy_loss", "checkpoint", "lines")


def run(*, quick: bool, console: Console) -> Result:
    def say(line: str) -> None:
        if console.is_terminal:
            print_line(console, line)

    lines = lines_to_change()
    quiet_ratio, quiet_rows = quiet(quick=quick, say=say)
    _show_turns(console, quiet_rows, "equal machines, fast network: a step of each turn, s")
    checkpoint, saving_rows = saving(quick=quick, say=say)
    _show_turns(console, saving_rows, "two local processes: a step of each turn, s")
    storm = stormy(quick=quick, say=say)
    _show_storm(console, storm.rows)
    ratios = {
        **storm.ratios,
        "quiet": quiet_ratio,
        "checkpoint": checkpoint,
        "lines": float(lines),
    }
    _show(console, ratios, quick=quick)
    return Result(
        bench="endtoend",
        ratios=ratios,
        figures=storm.figures,
        rows=[*storm.rows, *quiet_rows, *saving_rows],
    )


def _show_turns(console: Console, rows: Sequence[TurnRow], title: str) -> None:
    sides = list(dict.fromkeys(row.side for row in rows))
    print_table(
        console,
        ["side", "turns"],
        [[side, "  ".join(f"{r.step:.3f}" for r in rows if r.side == side)] for side in sides],
        title=title,
    )


def _show_storm(console: Console, rows: Sequence[StormyRow]) -> None:
    print_table(
        console,
        ["side", "places", "micro-batch", "steps", "s", "samples/s", "at last", "cores' load"],
        [
            [
                row.side + (" (disturbed)" if row.disturbed else ""),
                row.layout,
                str(row.microbatch_size),
                str(row.num_steps),
                f"{row.seconds:.1f}",
                f"{row.rate:.2f}",
                f"{row.steady_rate:.2f}",
                f"{row.load:.2f}",
            ]
            for row in rows
        ],
        title="16 workers around the world, slow at random, on bursty links",
        numbers=True,
    )


def _show(console: Console, ratios: Mapping[str, float], *, quick: bool) -> None:
    rows = (
        (
            name,
            f"{ratios[name]:.4g}",
            f"{'<=' if name in AT_MOST else '>='} {bar:g}",
            "reached" if _reached(name, ratios[name]) else "MISSED",
        )
        for name, bar in BARS.items()
    )
    print_bars(console, rows, quick=quick)


def _reached(name: str, ratio: float) -> bool:
    return ratio <= BARS[name] if name in AT_MOST else ratio >= BARS[name]

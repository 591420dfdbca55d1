"""How true the simulator is: predicted steps against those of real processes in the lab.

A prediction is made from what `polyrhythm probe` and `polyrhythm profile` measure in the same lab
beforehand, and from the scenario that the workers play. Nothing is fitted.
"""

from collections.abc import Sequence

from rich.console import Console

from benchmarks.predict.figures import TIE, Figures, figures
from benchmarks.predict.rows import Row, predicted_and_measured
from benchmarks.predict.setting import FULL, QUICK
from benchmarks.result import Result
from polyrhythm.tables import print_line, print_table

AT_MOST = {"median_error": 0.05, "worst_error": 0.15}
AT_LEAST = {"ranking": 0.95}


def run(*, quick: bool, console: Console) -> Result:
    def say(line: str) -> None:
        if console.is_terminal:
            print_line(console, line)

    rows = predicted_and_measured(QUICK if quick else FULL, on_progress=say)
    found = figures(rows)
    _show_rows(console, rows)
    _show_figures(console, found, rows, quick=quick)
    return Result(
        bench="predict",
        ratios={
            "median_error": found.median_error,
            "worst_error": found.worst_error,
            "ranking": found.ranking,
        },
        figures={
            "ranking_with_ties": found.ranking_with_ties,
            "pairs": found.num_pairs,
            "ties": found.num_ties,
            "worst_spread": found.worst_spread,
            "disturbed": sum(row.disturbed for row in rows),
        },
        rows=rows,
    )


def _show_rows(console: Console, rows: Sequence[Row]) -> None:
    print_table(
        console,
        ("network", "alternative", "measured, s", "again, s", "predicted, s", "off by"),
        [
            [
                row.network,
                row.alternative + (" (disturbed)" if row.disturbed else ""),
                f"{row.measured:.3f}",
                "" if row.again is None else f"{row.again:.3f}",
                f"{row.predicted:.3f}",
                f"{row.error:.1%}",
            ]
            for row in rows
        ],
        title="a step of all pipelines, in the lab and simulated",
        numbers=True,
    )


def _show_figures(console: Console, found: Figures, rows: Sequence[Row], *, quick: bool) -> None:
    """With the bars; what a quick run finds is not held against them."""
    bars = {name: ("<=", bar) for name, bar in AT_MOST.items()}
    bars |= {name: (">=", bar) for name, bar in AT_LEAST.items()}
    table = []
    for name, (sign, bar) in bars.items():
        value = getattr(found, name)
        is_met = value <= bar if sign == "<=" else value >= bar
        verdict = "" if quick else "met" if is_met else "missed"
        table.append([name, f"{value:.3f}", f"{sign} {bar:g}", verdict])
    print_table(console, ("ratio", "found", "bar", ""), table)
    print_line(
        console,
        f"ranking: {found.num_pairs} pairs of alternatives on the same network, of which "
        f"{found.num_ties} differ by less than {TIE:.0%} and are not ranked; with them it is "
        f"{found.ranking_with_ties:.3f}",
    )
    disturbed = sum(row.disturbed for row in rows)
    if disturbed:
        print_line(
            console,
            f"not to be trusted: the emulated network was late in {disturbed} of {len(rows)} runs: "
            "repeat it while the machine has nothing else to do",
        )

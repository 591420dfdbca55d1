"""What the planner's benchmark prints of steps as they really run, and of the lab."""

from collections.abc import Collection, Mapping, Sequence

from rich.console import Console

from benchmarks.plan.lab_rows import LabFigures
from benchmarks.plan.real_rows import Row
from polyrhythm.tables import print_line, print_table


def show_real(console: Console, rows: Sequence[Row]) -> None:
    print_table(
        console,
        ("cluster", "workload", "gradients", "ours, s", "DT-FM, s", "x", "random, s", "x"),
        [
            [
                row.case,
                str(row.workload),
                row.sync,
                f"{row.ours:.2f}",
                f"{row.dtfm:.2f}",
                f"{row.vs_dtfm:.3f}",
                "" if row.random is None else f"{row.random:.2f}",
                "" if row.vs_random is None else f"{row.vs_random:.2f}",
            ]
            for row in rows
        ],
        title="a step, simulated: our placement, DT-FM's, the mean of five random ones",
        numbers=True,
    )


def show_lab(console: Console, found: LabFigures) -> None:
    print_table(
        console,
        ("for", "plan", "step, s", "predicted, s", "off by", "layers", "micro-batches"),
        [
            [
                row.ratio,
                row.side + (" (disturbed)" if row.disturbed else ""),
                f"{row.measured:.3f}",
                f"{row.predicted:.3f}",
                f"{row.error:.3f}",
                " ".join(map(str, row.layers)),
                " ".join(map(str, row.microbatches)),
            ]
            for row in found.rows
        ],
        title="carried out in the lab",
        numbers=True,
    )
    if found.warning is not None:
        print_line(console, f"not to be trusted: {found.warning}")


def show_ratios(
    console: Console,
    found: Mapping[str, float],
    bars: Mapping[str, float],
    at_most: Collection[str],
    *,
    quick: bool,
) -> None:
    """With the bars; what a quick run finds is not held against them."""
    rows = []
    for name, value in found.items():
        bar = bars.get(name)
        sign = "<=" if name in at_most else ">="
        met = bar is None or (value <= bar if name in at_most else value >= bar)
        verdict = "" if bar is None or quick else "met" if met else "missed"
        rows.append([name, f"{value:.4g}", "" if bar is None else f"{sign} {bar:g}", verdict])
    print_table(console, ("ratio", "found", "bar", ""), rows)

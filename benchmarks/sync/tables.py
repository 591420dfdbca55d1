"""What the synchronisation benchmark prints: a table of sides per setting, then ratios and bars."""

import math
import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console

from benchmarks.sync.figures import Row
from benchmarks.sync.ratios import (
    BARS,
    MOST_GRADIENT_ERROR,
    RATIOS,
    best,
    distance,
    gradient_error,
    ratio_to,
    verdict,
)
from benchmarks.sync.settings import ALL_REDUCE, Setting
from polyrhythm.tables import print_line, print_table


def show_sides(console: Console, setting: Setting, rows: Sequence[Row]) -> None:
    table = []
    for side in setting.sides:
        of_side = [row for row in rows if row.side == side.name]
        size = statistics.median(row.group_size for row in of_side)
        table.append(
            [
                side.name,
                "  ".join(f"{row.samples_per_s:.1f}" for row in of_side),
                f"{ratio_to(rows, setting.name, side.name, ALL_REDUCE.name):.2f}",
                f"{distance(rows, setting.name, side.name):.4f}",
                f"{statistics.median(row.loss for row in of_side):.4f}",
                "" if math.isnan(size) else f"{size:.1f}",
                " ".join("-".join(map(str, row.steps)) for row in of_side),
                f"{statistics.median(row.cpu for row in of_side):.2f}",
            ]
        )
    header = ["side", "samples/s", "ratio", "distance", "loss", "group", "steps", "cores"]
    compute = f"{setting.forward + setting.backward:.3g} s"
    title = f"{setting.name}: a step computes {compute}, {setting.measured:g} s measured"
    print_table(console, header, table, title=title, numbers=True)


def show_ratios(
    console: Console, ratios: Mapping[str, float], rows: Sequence[Row], *, quick: bool
) -> None:
    if quick:
        print_line(console, "quick: it runs, and its figures say nothing; leave --quick out")
        return
    table = []
    for name, bar in BARS.items():
        side, apart = "", ""
        if name in RATIOS:
            setting, side = RATIOS[name].setting, best(rows, RATIOS[name])
            apart = f"{distance(rows, setting, side):.4f}"
        table.append(
            [name, f"{ratios[name]:.5g}", f"{bar:g}", verdict(name, ratios[name]), side, apart]
        )
    print_table(console, ["ratio", "measured", "bar", "", "side", "distance"], table, numbers=True)
    error = gradient_error(rows)
    word = "reached" if error <= MOST_GRADIENT_ERROR else "MISSED"
    print_line(
        console,
        f"balanced: gradients differ from those of equal shares by {error:.1g} of the largest "
        f"(at most {MOST_GRADIENT_ERROR:g}: {word})",
    )

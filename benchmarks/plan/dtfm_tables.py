"""What the planner's benchmark prints about DT-FM's cost."""

from rich.console import Console

from benchmarks.plan.dtfm_rows import DtfmRows
from polyrhythm.tables import print_line, print_table


def show_dtfm(console: Console, measured: DtfmRows) -> None:
    """A row for each run."""
    header = ("cluster", "seed", "cost, s", "best known, s", "gap to bound", "found by", "CPU s")
    print_table(
        console,
        header,
        [
            [
                row.case,
                str(row.seed),
                f"{row.cost:.4f}",
                f"{row.best:.4f}",
                f"{row.gap_to_bound:.3f}",
                row.found_by,
                f"{row.cpu:.2f}",
            ]
            for row in (*measured.optima, *measured.large)
        ],
        title="DT-FM's cost: clusters whose best layout is known",
        numbers=True,
    )
    print_table(
        console,
        ("seed", "ours, s", "DT-FM, s", "equal CPU, s", "below", "equal", "gap to bound", "CPU s"),
        [
            [
                str(row.seed),
                f"{row.cost:.3f}",
                f"{row.dtfm_cost:.3f}",
                f"{row.dtfm_cost_equal_cpu:.3f}",
                f"{row.below:.3f}",
                f"{row.below_equal_cpu:.3f}",
                f"{row.gap_to_bound:.3f}",
                f"{row.cpu:.2f} / {row.dtfm_cpu:.2f}",
            ]
            for row in measured.noisy
        ],
        title="world-wide, each link times lognormal(0, 0.3): against DT-FM's search",
        numbers=True,
    )
    print_line(console, "CPU s: ours / DT-FM's; equal CPU: DT-FM's search in as long as ours took")

"""The Trainer against torch: heterogeneous and homogeneous clusters, checkpoints, a script."""

from collections.abc import Sequence

from rich.console import Console

from benchmarks.endtoend.heterogeneous import heterogeneous
from benchmarks.endtoend.homogeneous import checkpoint, homogeneous
from benchmarks.endtoend.job import SlotRow
from benchmarks.endtoend.lines import lines_to_change
from benchmarks.harness.report import Bar, Result, print_bars, print_rows, progress_printer, select

BARS = (
    Bar("heterogeneous", ">=", 3.0, "samples per second over torch's, heterogeneous cluster"),
    Bar(
        "heterogeneous_loss", "<=", 0.02, "held-out loss above that of one process on equal batches"
    ),
    Bar("homogeneous", ">=", 1.0, "steps per second over torch's, homogeneous cluster"),
    Bar("checkpoint", "<=", 1.05, "a step with asynchronous checkpoints over one without"),
    Bar("lines", "<=", 10.0, "lines of a plain script that change"),
)


def run(*, quick: bool, console: Console) -> Result:
    show = progress_printer(console)
    lines = lines_to_change()  # first: it refuses to run outside a checkout
    homogeneous_ratio, homogeneous_rows = homogeneous(quick=quick, show=show)
    _print_slots(console, homogeneous_rows, "equal machines, fast network: a step of each slot, s")
    checkpoint_ratio, checkpoint_rows = checkpoint(quick=quick, show=show)
    _print_slots(console, checkpoint_rows, "two local processes: a step of each slot, s")
    heterogeneous_ratios, figures, heterogeneous_rows = heterogeneous(quick=quick, show=show)
    print_rows(
        console,
        heterogeneous_rows,
        {
            "side": lambda row: row.side + (" (disturbed)" if row.disturbed else ""),
            "places": lambda row: row.layout,
            "micro-batch": lambda row: f"{row.microbatch_size}",
            "steps": lambda row: f"{row.num_steps}",
            "s": lambda row: f"{row.seconds:.1f}",
            "samples/s": lambda row: f"{row.rate:.2f}",
            "second half": lambda row: f"{row.steady_rate:.2f}",
            "cores' load": lambda row: f"{row.load:.2f}",
        },
        title="16 workers around the world, slow at random, on bursty links",
    )
    ratios = {
        **heterogeneous_ratios,
        "homogeneous": homogeneous_ratio,
        "checkpoint": checkpoint_ratio,
        "lines": float(lines),
    }
    print_bars(console, BARS, ratios, quick=quick)
    return Result(
        bench="endtoend",
        ratios=ratios,
        figures=figures,
        rows=[*heterogeneous_rows, *homogeneous_rows, *checkpoint_rows],
    )


def _print_slots(console: Console, rows: Sequence[SlotRow], title: str) -> None:
    print_rows(
        console,
        dict.fromkeys(row.side for row in rows),
        {
            "side": lambda side: side,
            "slots": lambda side: "  ".join(f"{row.step:.3f}" for row in select(rows, side=side)),
        },
        title=title,
        numbers=False,
    )

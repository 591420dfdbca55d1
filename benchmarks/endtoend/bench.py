"""The Trainer against torch: heterogeneous and homogeneous clusters, checkpoints, a script."""

import ast
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from rich.console import Console

import polyrhythm
from benchmarks.endtoend.heterogeneous import heterogeneous
from benchmarks.endtoend.homogeneous import checkpoint, homogeneous
from benchmarks.endtoend.job import SlotRow
from benchmarks.harness.report import Bar, Result, print_bars, print_rows, progress_printer, select
from polyrhythm.errors import LaunchError

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


PLAIN, TRAINER = "plain.py", "trainer.py"


def examples() -> Path:
    """Return the folder of the example scripts."""
    folder = Path(polyrhythm.__file__).parents[1] / "examples"
    if not (folder / PLAIN).is_file():
        raise LaunchError(
            f"no {PLAIN} in {folder}",
            expected="the examples, which are in the repository and not in the package",
            fix="run the benchmark from a checkout: make venv, then .venv/bin/polyrhythm bench",
        )
    return folder


def lines_to_change() -> int:
    folder = examples()
    return num_changed(*((folder / name).read_text() for name in (PLAIN, TRAINER)))


def num_changed(before: str, after: str) -> int:
    old, new = counted_lines(before), counted_lines(after)
    changes = SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in changes if tag != "equal")


def counted_lines(script: str) -> list[str]:
    lines, first = script.splitlines(), ast.parse(script).body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines = lines[first.end_lineno :]
    return [line.rstrip() for line in lines if line.strip()]

"""Group averaging against all-reduce and against none, where machines are slow, uneven or equal.

Sixteen workers on hosts of the lab, data-parallel or as a grid of pipelines; real processes, an
emulated compute of 300 ms a step. Sides take turns, in rounds with the same seeds. Throughput is
that of the whole job; beside it stands how far the models are apart at the end, since hardly
synchronising is fast, too. Then the scheduler alone, under the load of a thousand workers.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.result import Result
from benchmarks.sync.figures import Row, row
from benchmarks.sync.jobs import Workers, cluster, run_together
from benchmarks.sync.plan import FULL_PLAN, HOMOGENEOUS, Plan, calibrated, quick_plan
from benchmarks.sync.ratios import BARS, figures, ratios_of
from benchmarks.sync.settings import ALL_REDUCE, LAST_GROUPS, MAX_AGE, STALENESS, Setting
from benchmarks.sync.tables import show_ratios, show_sides
from polyrhythm.lab.lab import Lab
from polyrhythm.tables import print_line

__all__ = ["BARS", "run"]


def run(*, quick: bool, console: Console) -> Result:
    # Here, since it takes a coordinator along that only this part needs in this process.
    from benchmarks.sync.scheduler import measure

    plan = quick_plan() if quick else FULL_PLAN
    print_line(
        console,
        f"{plan.num_workers} workers; P = {LAST_GROUPS} groups, age <= {MAX_AGE}, "
        f"groups of about 3, staleness {STALENESS}",
    )
    print_line(console, "distance: of models from their mean, at the end (root mean square)")
    print_line(console, "loss: half the mean square of the weights, which noise keeps from 0")
    rows: list[Row] = []
    with _lanes(plan) as lanes:
        for setting in plan.settings:
            if setting.name == HOMOGENEOUS.name and not quick:
                setting = _calibrated(lanes, setting, console)
            measured = _measure(lanes, setting)
            rows += measured
            show_sides(console, setting, measured)
            for trouble in filter(None, (lane.trouble() for lane in lanes)):
                print_line(console, f"not to be trusted: {trouble}")
    scheduler = measure(quick=quick, console=console)
    ratios = {
        **ratios_of(rows),
        "scheduler_per_s": scheduler.per_s,
        "scheduler_p99_ms": scheduler.p99_ms,
    }
    show_ratios(console, ratios, rows, quick=quick)
    return Result(bench="sync", ratios=ratios, figures=figures(rows), rows=rows)


@contextmanager
def _lanes(plan: Plan) -> Iterator[list[Workers]]:
    """Workers in a lab each."""
    with ExitStack() as stack:
        lanes = []
        for _ in range(plan.num_lanes):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            lab = stack.enter_context(Lab(cluster(plan.num_workers)))
            workers = Workers(lab, num_stages=plan.num_stages, folder=folder)
            lanes.append(stack.enter_context(workers))
        yield lanes


def _measure(lanes: Sequence[Workers], setting: Setting) -> list[Row]:
    """All sides in turns, as many at the same time as the setting allows."""
    num_rounds = max(side.num_rounds for side in setting.sides)
    turns = [
        (number, side)
        for number in range(num_rounds)
        for side in setting.sides
        if number < side.num_rounds
    ]
    rows = []
    for first in range(0, len(turns), setting.num_lanes):
        at_once = turns[first : first + setting.num_lanes]
        answers = run_together(lanes, [(setting.seeded(number), side) for number, side in at_once])
        for (number, side), answer in zip(at_once, answers, strict=True):
            rows.append(row(setting, number, side, answer))
    return rows


def _calibrated(lanes: Sequence[Workers], setting: Setting, console: Console) -> Setting:
    """Measure what one all-reduce takes without compute, and set the compute by it."""
    empty = replace(setting, forward=0.0, backward=0.0)
    (answers,) = run_together(lanes, [(empty, ALL_REDUCE)])
    measured = row(empty, 0, ALL_REDUCE, answers)
    steps_per_s = measured.samples_per_s / setting.samples_per_step(ALL_REDUCE)
    seconds = setting.num_workers / steps_per_s
    print_line(console, f"one all-reduce of {setting.num_floats} floats: {1e3 * seconds:.1f} ms")
    return calibrated(setting, seconds)

"""Real training on slow machines: how soon groups reach a loss, and what they pay for it in loss.

Workers are real processes with real gradients and real averages; only the pace of the machines is
emulated, such that this machine can keep up. Runs of one seed go on at the same time: `all_reduce`,
and beside it `adaptive`, `age` and `age` with overlap (once the learning rate has risen), after one
another. The loss is that of the
mean of all workers' models, on data that nobody trains on; models are kept at fixed moments and
evaluated afterwards. Every side has the learning rate that a search found best for it, and learns
from equally many batches.
"""

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from benchmarks.bars import print_bars
from benchmarks.converge.curve import Curve, best, median_ratio, speedup
from benchmarks.converge.depth import losses_by_depth
from benchmarks.converge.plan import (
    ADAPTIVE,
    AGE,
    ALL_REDUCE,
    DEEP,
    FULL,
    OVERLAP,
    QUICK,
    SHALLOW,
    Plan,
    Run,
    Setting,
    Trial,
    make_side,
)
from benchmarks.converge.runs import Ran, compute_time, side_by_side
from benchmarks.converge.tasks import NoisyDigits, SourceText, Task
from benchmarks.result import Result
from polyrhythm.tables import print_table
from polyrhythm.types import Seconds

# Workers compute for less than half of the time, as they wait or are held back; but several at a
# time on one core are slower than one alone.
_ROOM = 1.1
AT_LEAST = {"time_to_loss": 1.5, "trace_time_to_loss": 1.6}
AT_MOST = {"final_loss": 1.02, "overlap_final_loss": 1.02}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run."""

    setting: str
    task: str
    side: str
    seed: int
    lr: float
    target: float
    seconds: Seconds  # the whole run
    seconds_to_target: Seconds
    batches_to_target: float
    final_loss: float  # of the consolidated model
    distance: float  # of a worker's model from the mean at the end, the mean over workers
    late_share: float  # of steps whose real compute took longer than the emulated
    curve: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthRow:
    schedule: str
    seed: int
    lr: float
    final_loss: float


def run(*, quick: bool, console: Console) -> Result:
    plan = QUICK if quick else FULL
    text, digits = SourceText(), NoisyDigits()
    tasks: dict[str, Task] = {task.name: task for task in (text, digits)}
    rows: list[Row] = []
    for trial in plan.trials:
        found = list(_compare(trial, tasks[trial.task], plan))
        _show_runs(console, found)
        rows += found
    depths = list(_compare_depths(plan, text))
    _show_depths(console, depths)
    ratios = _ratios(rows, depths)
    bars = ((name, f"{value:.3f}", *_verdict(name, value)) for name, value in ratios.items())
    print_bars(console, bars, quick=quick)
    return Result(bench="converge", ratios=ratios, figures=_figures(rows), rows=[*rows, *depths])


def _compare(trial: Trial, task: Task, plan: Plan) -> Iterator[Row]:
    setting = trial.setting
    if plan.keeps_up:
        setting = _paced(setting, task, num_lanes=1 + len(trial.lanes))
    for seed in plan.seeds:
        lanes = [
            [
                Run(task=task, setting=setting, side=make_side(task.name, name), seed=seed)
                for name in lane
            ]
            for lane in ((ALL_REDUCE,), *trial.lanes)
        ]
        for ran in side_by_side(*lanes):
            yield _row(ran, trial.target)


def _paced(setting: Setting, task: Task, *, num_lanes: int) -> Setting:
    """With steps in which each core can compute those of all its workers."""
    per_core = num_lanes * setting.num_workers / (os.cpu_count() or 1)
    return setting.paced(max(setting.step, _ROOM * per_core * compute_time(task)))


def _row(ran: Ran, target: float) -> Row:
    run, record = ran.run, ran.record
    curve = record.curve()
    return Row(
        setting=run.setting.name,
        task=run.task.name,
        side=run.side.name,
        seed=run.seed,
        lr=run.side.lr,
        target=target,
        seconds=record.ended,
        seconds_to_target=curve.time_to(target),
        batches_to_target=curve.batches_to(target),
        final_loss=record.final_loss,
        distance=float(record.distances.mean()),
        late_share=record.late_share,
        curve=curve,
    )


def _compare_depths(plan: Plan, text: SourceText) -> Iterator[DepthRow]:
    for seed in plan.seeds:
        losses = losses_by_depth(text, plan.depth_rates, seed=seed, steps=plan.depth_steps)
        for schedule, loss in losses.items():
            lr = plan.depth_rates[schedule]
            yield DepthRow(schedule=schedule, seed=seed, lr=lr, final_loss=loss)


def _ratios(rows: Sequence[Row], depths: Sequence[DepthRow]) -> dict[str, float]:
    """Medians over seeds, of the worse model. The loss is that of the policy whose time counts."""
    tasks = dict.fromkeys(row.task for row in rows if row.setting == "b")
    times, losses, overlaps = [], [], []
    for task in tasks:
        of_task = [row for row in rows if row.setting == "b" and row.task == task]
        speedups = {name: _speedup(of_task, name) for name in (ADAPTIVE, AGE)}
        chosen = best(speedups)
        times.append(speedups[chosen])
        losses.append(_loss_ratio(of_task, chosen))
        overlaps.append(_loss_ratio(of_task, OVERLAP))
    by_schedule = [
        [row.final_loss for row in depths if row.schedule == schedule]
        for schedule in (DEEP, SHALLOW)
    ]
    return {
        "time_to_loss": min(times),
        "final_loss": max(losses),
        "overlap_final_loss": max(overlaps),
        "trace_time_to_loss": _speedup([row for row in rows if row.setting == "trace"], AGE),
        "depth_final_loss": median_ratio(*by_schedule),
    }


def _speedup(rows: Sequence[Row], name: str) -> float:
    """How many times sooner than all_reduce: the median over seeds."""
    return statistics.median(
        speedup(slow.seconds_to_target, fast.seconds_to_target, slow.seconds)
        for slow, fast in zip(_of(rows, ALL_REDUCE), _of(rows, name), strict=True)
    )


def _loss_ratio(rows: Sequence[Row], name: str) -> float:
    ours, theirs = ([row.final_loss for row in _of(rows, side)] for side in (name, ALL_REDUCE))
    return median_ratio(ours, theirs)


def _of(rows: Sequence[Row], side: str) -> list[Row]:
    """In the order of seeds."""
    return sorted((row for row in rows if row.side == side), key=lambda row: row.seed)


def _sides(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.side for row in rows))


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    found: dict[str, float] = {}
    for setting, task in dict.fromkeys((row.setting, row.task) for row in rows):
        these = [row for row in rows if (row.setting, row.task) == (setting, task)]
        for side in _sides(these):
            of_side, name = _of(these, side), f"{setting}_{task}_{side}"
            found[f"{name}_lr"] = of_side[0].lr
            found[f"{name}_final_loss"] = statistics.median(row.final_loss for row in of_side)
            found[f"{name}_seconds"] = statistics.median(row.seconds for row in of_side)
            if side != ALL_REDUCE:
                found[f"{name}_time_to_loss"] = _speedup(these, side)
                found[f"{name}_loss_ratio"] = _loss_ratio(these, side)
    found["late_share"] = max(row.late_share for row in rows)
    return found


def _show_runs(console: Console, rows: Sequence[Row]) -> None:
    first = rows[0]
    print_table(
        console,
        [
            "side",
            "lr",
            f"s to loss {first.target:g}",
            "sooner",
            "batches",
            "final loss",
            "ratio",
            "s in all",
            "distance",
            "late",
        ],
        [_side_cells(rows, side) for side in _sides(rows)],
        title=f"{first.task}, setting {first.setting}: each seed; medians of ratios",
    )


def _side_cells(rows: Sequence[Row], side: str) -> list[str]:
    these = _of(rows, side)
    return [
        side,
        f"{these[0].lr:g}",
        _each("{:.1f}", (row.seconds_to_target for row in these)),
        f"{_speedup(rows, side):.2f}",
        _each("{:.0f}", (row.batches_to_target for row in these)),
        _each("{:.4f}", (row.final_loss for row in these)),
        f"{_loss_ratio(rows, side):.4f}",
        _each("{:.1f}", (row.seconds for row in these)),
        f"{statistics.median(row.distance for row in these):.3f}",
        f"{max(row.late_share for row in these):.1%}",
    ]


def _each(form: str, values: Iterator[float]) -> str:
    return "  ".join(form.format(value) for value in values)


def _show_depths(console: Console, rows: Sequence[DepthRow]) -> None:
    print_table(
        console,
        ["schedule", "lr", "final loss"],
        [
            [
                name,
                f"{next(row.lr for row in rows if row.schedule == name):g}",
                _each("{:.4f}", (row.final_loss for row in rows if row.schedule == name)),
            ]
            for name in (SHALLOW, DEEP)
        ],
        title="gpt, a pipeline of four stages without a flush: each seed",
    )


def _verdict(name: str, value: float) -> tuple[str, str]:
    if name in AT_LEAST:
        return f">= {AT_LEAST[name]:g}", "reached" if value >= AT_LEAST[name] else "MISSED"
    if name in AT_MOST:
        return f"<= {AT_MOST[name]:g}", "reached" if value <= AT_MOST[name] else "MISSED"
    return "", "reported"

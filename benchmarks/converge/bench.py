"""Real training on slow machines: how soon group averages reach a loss, and what they cost in loss.

Workers are real processes with real gradients and real averages; only the speed of the machines is
emulated, such that this machine can keep up. Runs of one seed are concurrent: `all_reduce`, and
beside it `adaptive`, `age` and `age` with overlap (once the learning rate has risen), one after
another. The loss is that of the mean of all workers' models, on data that nobody trains on; models
are kept at fixed moments and evaluated afterwards. Every side has the learning rate that a search
found best for it, and learns from equally many batches.
"""

import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from benchmarks.converge.loss_curves import ConvergeRow, compare, compute_time, losses_by_depth
from benchmarks.converge.setting import (
    ADAPTIVE,
    AGE,
    ALL_REDUCE,
    DEEP,
    DEPTH_RATES,
    FULL,
    OVERLAP,
    QUICK,
    SHALLOW,
    ConvergeRun,
)
from benchmarks.converge.tasks import LearningTask, NoisyDigits, SourceText
from benchmarks.harness.report import Bar, Result, median_of, print_bars, print_rows, select
from polyrhythm.types import Seconds

# Workers compute for less than half of the time, as they wait or are slowed; but several at a time
# on one core are slower than one alone.
_ROOM = 1.1
BARS = (
    Bar("time_to_loss", ">=", 1.5, "all_reduce's time to a loss over that of groups, setting B"),
    Bar("final_loss", "<=", 1.02, "final loss of groups over all_reduce's"),
    Bar("overlap_final_loss", "<=", 1.02, "the same with overlap"),
    Bar("trace_time_to_loss", ">=", 1.6, "time to a loss with recorded machines"),
    Bar("depth_final_loss", ">=", None, "final loss of a deep pipeline over a shallow one's"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthRow:
    schedule: str
    seed: int
    lr: float
    final_loss: float


def run(*, quick: bool, console: Console) -> Result:
    setting = QUICK if quick else FULL
    text, digits = SourceText(), NoisyDigits()
    tasks: dict[str, LearningTask] = {task.name: task for task in (text, digits)}
    rows: list[ConvergeRow] = []
    for trial in setting.trials:
        machines, task = trial.machines, tasks[trial.task]
        if not quick:  # each core can compute the steps of all its workers
            per_core = 2 * machines.num_workers / (os.cpu_count() or 1)
            needed = _ROOM * per_core * compute_time(task)
            machines = machines.with_step(max(machines.step, needed))
        found = []
        for seed in setting.seeds:
            run = partial(ConvergeRun, task=task, machines=machines, target=trial.target, seed=seed)
            lanes = ((ALL_REDUCE,), trial.others)
            found += compare([[run(side=side) for side in lane] for lane in lanes])
        _print_sides(console, found)
        rows += found
    depths = [
        DepthRow(schedule=schedule, seed=seed, lr=DEPTH_RATES[schedule], final_loss=loss)
        for seed in setting.seeds
        for schedule, loss in losses_by_depth(text, seed=seed, steps=setting.depth_steps).items()
    ]
    print_rows(
        console,
        (SHALLOW, DEEP),
        {
            "schedule": lambda name: name,
            "lr": lambda name: f"{DEPTH_RATES[name]:g}",
            "final loss": lambda name: _each("final_loss", ".4f", select(depths, schedule=name)),
        },
        title="gpt, a pipeline of four stages without a flush: each seed",
        numbers=False,
    )
    ratios = _ratios(rows, depths)
    print_bars(console, BARS, ratios, quick=quick)
    return Result(bench="converge", ratios=ratios, figures=_figures(rows), rows=[*rows, *depths])


def speedup(slow: Seconds, fast: Seconds, slow_end: Seconds) -> float:
    """Return how many times sooner `fast` came, 0 if never; if `slow` never came, at its end."""
    return min(slow, slow_end) / fast if fast < math.inf else 0.0


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over pairs, such as the runs of two sides with the same seed."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def _ratios(rows: Sequence[ConvergeRow], depths: Sequence[DepthRow]) -> dict[str, float]:
    """Return medians over seeds, of the worse model; the loss of the policy whose time counts."""
    times, losses, overlaps = [], [], []
    for task in dict.fromkeys(row.task for row in select(rows, setting="b")):
        of_task = select(rows, setting="b", task=task)
        speedups = {name: _speedup(of_task, name) for name in (ADAPTIVE, AGE)}
        chosen = max(speedups, key=lambda name: speedups[name])
        times.append(speedups[chosen])
        losses.append(_loss_ratio(of_task, chosen))
        overlaps.append(_loss_ratio(of_task, OVERLAP))
    deep, shallow = (
        [row.final_loss for row in select(depths, schedule=name)] for name in (DEEP, SHALLOW)
    )
    return {
        "time_to_loss": min(times),
        "final_loss": max(losses),
        "overlap_final_loss": max(overlaps),
        "trace_time_to_loss": _speedup(select(rows, setting="trace"), AGE),
        "depth_final_loss": median_ratio(deep, shallow),
    }


def _speedup(rows: Sequence[ConvergeRow], side: str) -> float:
    """Return how many times sooner than all_reduce: the median over seeds."""
    return statistics.median(
        speedup(slow.seconds_to_target, fast.seconds_to_target, slow.seconds)
        for slow, fast in zip(select(rows, side=ALL_REDUCE), select(rows, side=side), strict=True)
    )


def _loss_ratio(rows: Sequence[ConvergeRow], side: str) -> float:
    ours, theirs = (
        [row.final_loss for row in select(rows, side=name)] for name in (side, ALL_REDUCE)
    )
    return median_ratio(ours, theirs)


def _figures(rows: Sequence[ConvergeRow]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for setting, task, side in dict.fromkeys((r.setting, r.task, r.side) for r in rows):
        these, name = select(rows, setting=setting, task=task), f"{setting}_{task}_{side}"
        for value in ("lr", "final_loss", "seconds"):
            figures[f"{name}_{value}"] = median_of(these, value, side=side)
        if side != ALL_REDUCE:
            figures[f"{name}_time_to_loss"] = _speedup(these, side)
            figures[f"{name}_loss_ratio"] = _loss_ratio(these, side)
    figures["late_share"] = max(row.late_share for row in rows)
    return figures


def _print_sides(console: Console, rows: Sequence[ConvergeRow]) -> None:
    def each(value: str, form: str) -> Callable[[str], str]:
        return lambda side: _each(value, form, select(rows, side=side))

    first = rows[0]
    print_rows(
        console,
        dict.fromkeys(row.side for row in rows),
        {
            "side": lambda side: side,
            "lr": lambda side: f"{median_of(rows, 'lr', side=side):g}",
            f"s to loss {first.target:g}": each("seconds_to_target", ".1f"),
            "sooner": lambda side: f"{_speedup(rows, side):.2f}",
            "batches": each("batches_to_target", ".0f"),
            "final loss": each("final_loss", ".4f"),
            "ratio": lambda side: f"{_loss_ratio(rows, side):.4f}",
            "s in all": each("seconds", ".1f"),
            "distance": lambda side: f"{median_of(rows, 'distance', side=side):.3f}",
            "late": lambda side: f"{max(row.late_share for row in select(rows, side=side)):.1%}",
        },
        title=f"{first.task}, setting {first.setting}: each seed; medians of ratios",
        numbers=False,
    )


def _each(value: str, form: str, rows: Iterable[object]) -> str:
    return "  ".join(f"{getattr(row, value):{form}}" for row in rows)

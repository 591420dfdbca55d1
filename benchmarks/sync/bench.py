"""Group averaging against all-reduce and against no synchronisation, with stragglers and without.

Sixteen workers on hosts of the lab, data-parallel or as a grid of pipelines; real processes, an
emulated compute of 300 ms a step. Sides alternate, in rounds with the same seeds. Throughput is
that of the whole job; beside it stands how far the models are apart at the end, since hardly
synchronising is fast, too. Then the scheduler alone, under the load of a thousand workers.
"""

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np
from rich.console import Console

from benchmarks.harness.network import set_links, uniform_cluster
from benchmarks.harness.pool import TIMEOUT, WorkerPool
from benchmarks.harness.report import (
    Bar,
    Result,
    median_of,
    print_bars,
    print_rows,
    ratio_over_rounds,
    select,
)
from benchmarks.harness.timing import undisturbed
from benchmarks.sync import settings
from benchmarks.sync.settings import ALL_REDUCE, BANDWIDTH, LATENCY, SyncSetting, SyncSide
from benchmarks.sync.worker import SyncAnswer, SyncOrder, work
from polyrhythm.describe.cluster import Cluster
from polyrhythm.errors import LabError
from polyrhythm.lab.lab import Lab
from polyrhythm.tables import print_line
from polyrhythm.types import Seconds

_HEAD_START: Seconds = 0.05  # from sending the start time until that time
_MAX_TRIES = 3  # of a run that the host disturbs


@dataclass(frozen=True, slots=True)
class SyncRatio:
    """The throughput of the best of `sides` over that of `other`."""

    setting: str
    sides: tuple[str, ...]
    other: str
    bar: float


_GROUPS = ("age", "adaptive", "age, overlap", "adaptive, overlap")
_SLACK = ("age, overlap, slack", "adaptive, overlap, slack")
_EQUAL = ("adaptive, overlap", "static", "smart")

RATIOS: Mapping[str, SyncRatio] = {
    "dp5x_smart": SyncRatio("dp5x", ("smart",), "all_reduce", 4.3),
    "dp5x_age": SyncRatio("dp5x", ("age",), "all_reduce", 4.3),
    "dp5x_adaptive": SyncRatio("dp5x", ("adaptive",), "all_reduce", 3.0),
    "dp5x_balanced": SyncRatio("dp5x", ("balanced",), "all_reduce", 5.0),
    "dp_b": SyncRatio("dp_b", _GROUPS, "all_reduce", 2.2),
    "grid_b": SyncRatio("grid_b", _GROUPS, "all_reduce", 1.25),
    "grid_b_vs_nosync": SyncRatio("grid_b", _GROUPS, "none", 0.85),
    "grid_b_combined": SyncRatio("grid_b", _SLACK, "all_reduce", 1.65),
    "homogeneous": SyncRatio("homogeneous", _EQUAL, "all_reduce", 1.03),
    "homogeneous_vs_nosync": SyncRatio("homogeneous", _EQUAL, "none", 0.92),
    "trace16": SyncRatio("trace16", ("age",), "all_reduce", 2.1),
    "trace16_overlap": SyncRatio("trace16", ("age, overlap",), "all_reduce", 2.3),
}
BARS = (
    *(Bar(name, ">=", ratio.bar) for name, ratio in RATIOS.items()),
    Bar("scheduler_per_s", ">=", 10_000, "cycles of workers per second"),
    Bar("scheduler_p99_ms", "<=", 10, "99 % of its answers, at half that load"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRow:
    """One side in one round."""

    setting: str
    round: int
    side: str
    samples_per_s: float
    consensus_distance: float
    loss: float
    group_size: float  # mean; nan where no group is recorded
    steps: tuple[int, int]  # of the slowest and the fastest worker, within the measured time
    gradient_error: float
    cpu: float  # cores that all workers together kept busy, without the emulated network


def run(*, quick: bool, console: Console) -> Result:
    # Here, since it imports the coordinator, which only this part needs in this process.
    from benchmarks.sync.scheduler import measure

    # First, before the lanes fork their workers: it needs both cores for itself.
    scheduler = measure(quick=quick, console=console)
    suite = settings.quick_suite() if quick else settings.FULL_SUITE
    print_line(
        console,
        f"{suite.num_workers} workers; P = {settings.LAST_GROUPS} groups, "
        f"age <= {settings.MAX_AGE}, groups of about 3, staleness {settings.STALENESS}",
    )
    print_line(console, "distance: of models from their mean, at the end (root mean square)")
    print_line(console, "loss: half the mean square of the weights, which noise keeps from 0")
    rows: list[SyncRow] = []
    with ExitStack() as stack:
        lanes = list[SyncPool]()  # in a lab each
        for _ in range(suite.num_lanes):
            lab = stack.enter_context(Lab(cluster(suite.num_workers)))
            lanes.append(stack.enter_context(SyncPool(lab, num_stages=suite.num_stages)))
        for setting in suite.settings:
            if setting.name == settings.HOMOGENEOUS.name and not quick:
                setting = _calibrated(lanes, setting, console)
            measured = _measure(lanes, setting, max_tries=1 if quick else _MAX_TRIES)
            rows += measured
            _print_sides(console, setting, measured)
            for trouble in filter(None, (lane.trouble() for lane in lanes)):
                print_line(console, f"not to be trusted: {trouble}")
    ratios = {
        **ratios_of(rows),
        "scheduler_per_s": scheduler["per_s"],
        "scheduler_p99_ms": scheduler["p99_ms"],
    }
    notes = {name: _note(rows, ratio) for name, ratio in RATIOS.items()}
    print_bars(console, BARS, ratios, quick=quick, notes=notes)
    if not quick:
        error, bar = max(row.gradient_error for row in rows), Bar("gradient_error", "<=", 1e-6)
        print_line(
            console,
            f"balanced: gradients differ from those of equal shares by {error:.1g} of the largest "
            f"({bar}: {bar.verdict(error)})",
        )
    return Result(bench="sync", ratios=ratios, figures=_figures(rows), rows=rows)


def cluster(num_workers: int) -> Cluster:
    """Return equal hosts with a fast link between any two; the last one is for the server."""
    names = [*(settings.device_name(rank) for rank in range(num_workers)), "server"]
    return uniform_cluster(names, LATENCY, BANDWIDTH)


class SyncPool(WorkerPool):
    """The workers of one lane: a process per host of a lab, the last of them the server."""

    def __init__(self, lab: Lab, *, num_stages: int) -> None:
        """`num_stages`: of the pipelines in a grid."""
        super().__init__(lab, work, num_stages, serves_orders=True)
        self.lab, self.numbers = lab, count()  # numbers of orders

    def trouble(self) -> str | None:
        """Return why the emulated network cannot be trusted since the last call, if so."""
        return self.lab.report(reset=True).switch_timing.trouble


def run_together(
    lanes: Sequence[SyncPool], jobs: Sequence[tuple[SyncSetting, SyncSide]]
) -> list[list[SyncAnswer]]:
    """Run each job in a lane of its own, all at the same time; return an answer per worker."""
    pairs = [(lane, *job) for lane, job in zip(lanes, jobs, strict=False)]
    for lane, setting, side in pairs:
        set_links(lane.lab, LATENCY, BANDWIDTH)  # fast: making connections takes many messages
        lane.broadcast(SyncOrder(number=next(lane.numbers), setting=setting, side=side))
    for lane, setting, side in pairs:
        lane.gather(f"preparing {side.name} in {setting.name}")
        set_links(lane.lab, setting.latency, setting.bandwidth)
    start = time.monotonic() + _HEAD_START
    for lane, _, _ in pairs:
        lane.broadcast(start)
    answers = []
    for lane, setting, side in pairs:
        action = f"training {side.name} in {setting.name}"
        *of_workers, lost = lane.gather(action, setting.length + TIMEOUT)
        if lost:
            raise LabError(
                f"the parameter server lost {len(lost)} workers: {lost[0]}",
                expected="every worker leaves the server by itself",
                fix="report this error with the workers' output",
            )
        answers.append(of_workers)
    return answers


def _measure(lanes: Sequence[SyncPool], setting: SyncSetting, *, max_tries: int) -> list[SyncRow]:
    """Run all sides alternately, as many at the same time as the setting allows."""
    num_rounds = max(side.num_rounds for side in setting.sides)
    runs = [
        (number, side)
        for number in range(num_rounds)
        for side in setting.sides
        if number < side.num_rounds
    ]
    rows = []
    for first in range(0, len(runs), setting.num_lanes):
        jobs = runs[first : first + setting.num_lanes]
        seeded = [(setting.seeded(number), side) for number, side in jobs]
        answers = undisturbed(partial(run_together, lanes, seeded), max_tries=max_tries)
        for (number, side), of_side in zip(jobs, answers, strict=True):
            rows.append(row(setting, number, side, of_side))
    return rows


def _calibrated(lanes: Sequence[SyncPool], setting: SyncSetting, console: Console) -> SyncSetting:
    """Measure what one all-reduce takes without compute, and set the compute by it."""
    empty = replace(setting, forward=0.0, backward=0.0)
    (answers,) = run_together(lanes, [(empty, ALL_REDUCE)])
    measured = row(empty, 0, ALL_REDUCE, answers)
    steps_per_s = measured.samples_per_s / setting.samples_per_step(ALL_REDUCE)
    seconds = setting.num_workers / steps_per_s
    print_line(console, f"one all-reduce of {setting.num_floats} floats: {1e3 * seconds:.1f} ms")
    return setting.calibrated(seconds)


def row(
    setting: SyncSetting, number: int, side: SyncSide, answers: Sequence[SyncAnswer]
) -> SyncRow:
    windows = [
        (answer.completions, answer.start + setting.warm_up, answer.start + setting.length)
        for answer in answers
    ]
    # All stages of a pipeline see the same samples.
    steps_per_s = math.fsum(rate(*window) for window in windows) / setting.num_stages
    if steps_per_s == 0:
        raise LabError(
            f"no step of {side.name} in {setting.name} within {setting.measured:g} s",
            expected=f"steps of about {setting.step:g} s",
            fix="run the benchmark while the machine has nothing else to do",
        )
    counts = [sum(start <= at <= end for at in done) for done, start, end in windows]
    stages = [
        [answers[rank].weights for rank in range(stage, len(answers), setting.num_stages)]
        for stage in range(setting.num_stages)
    ]
    weights = [weight for answer in answers for weight in answer.weights]
    return SyncRow(
        setting=setting.name,
        round=number,
        side=side.name,
        samples_per_s=steps_per_s * setting.samples_per_step(side),
        consensus_distance=math.sqrt(statistics.fmean(distance(s) ** 2 for s in stages)),
        loss=statistics.fmean(weight * weight for weight in weights) / 2,
        group_size=mean_group_size(
            (size for answer in answers for size in answer.group_sizes),
            sum(len(answer.completions) for answer in answers),
        ),
        steps=(min(counts), max(counts)),
        gradient_error=max(answer.gradient_error for answer in answers),
        cpu=math.fsum(answer.cpu for answer in answers) / setting.length,
    )


def rate(completions: Iterable[Seconds], start: Seconds, end: Seconds) -> float:
    """Return the steps per second from the first completion in the window to the last.

    A single one counts as one step in the whole window.
    """
    inside = [moment for moment in completions if start <= moment <= end]
    if len(inside) < 2:
        return len(inside) / (end - start)
    return (len(inside) - 1) / (inside[-1] - inside[0])


def distance(models: Sequence[Sequence[float]]) -> float:
    """Return the root mean square, over models and weights, of the difference from the mean."""
    return float(np.sqrt(np.var(models, axis=0).mean()))


def mean_group_size(sizes: Iterable[int], num_steps: int) -> float:
    """Return the mean per group of the sizes that all members saw.

    A step without an average is a group of one.
    """
    seen = list(sizes)
    if not seen:
        return math.nan
    num_alone = max(0, num_steps - len(seen))
    num_groups = math.fsum(1 / size for size in seen) + num_alone
    return (len(seen) + num_alone) / num_groups


def ratio_to(rows: Sequence[SyncRow], setting: str, side: str, other: str) -> float:
    """Return the ratio of two throughputs; rounds have a seed each."""
    return ratio_over_rounds(rows, "samples_per_s", side, other, setting=setting)


def best(rows: Sequence[SyncRow], ratio: SyncRatio) -> str:
    """Return the measured side with the highest ratio."""
    measured = {row.side for row in select(rows, setting=ratio.setting)}
    candidates = [side for side in ratio.sides if side in measured]
    return max(candidates, key=lambda side: ratio_to(rows, ratio.setting, side, ratio.other))


def ratios_of(rows: Sequence[SyncRow]) -> dict[str, float]:
    return {
        name: ratio_to(rows, ratio.setting, best(rows, ratio), ratio.other)
        for name, ratio in RATIOS.items()
    }


def _figures(rows: Sequence[SyncRow]) -> dict[str, float]:
    """Return the throughput of each side in each setting and the distance of its models."""
    figures = {"dp5x_balanced_gradient_error": max(row.gradient_error for row in rows)}
    for setting, side in dict.fromkeys((row.setting, row.side) for row in rows):
        name = f"{setting}_{side}".replace(", ", "_").replace(" ", "_")
        of_side = select(rows, setting=setting, side=side)
        figures[f"{name}_samples_per_s"] = median_of(of_side, "samples_per_s")
        figures[f"{name}_distance"] = median_of(of_side, "consensus_distance")
    return figures


def _note(rows: Sequence[SyncRow], ratio: SyncRatio) -> str:
    side = best(rows, ratio)
    distance = median_of(rows, "consensus_distance", setting=ratio.setting, side=side)
    return f"{side}, distance {distance:.4f}"


def _print_sides(console: Console, setting: SyncSetting, rows: Sequence[SyncRow]) -> None:
    def group_size(of: Sequence[SyncRow]) -> str:
        size = median_of(of, "group_size")
        return "" if math.isnan(size) else f"{size:.1f}"

    def ratio(of: Sequence[SyncRow]) -> float:
        return ratio_to(rows, setting.name, of[0].side, ALL_REDUCE.name)

    print_rows(
        console,
        [select(rows, side=side.name) for side in setting.sides],
        {
            "side": lambda of: of[0].side,
            "samples/s": lambda of: "  ".join(f"{row.samples_per_s:.1f}" for row in of),
            "ratio": lambda of: f"{ratio(of):.2f}",
            "distance": lambda of: f"{median_of(of, 'consensus_distance'):.4f}",
            "loss": lambda of: f"{median_of(of, 'loss'):.4f}",
            "group": group_size,
            "steps": lambda of: " ".join("-".join(map(str, row.steps)) for row in of),
            "cores": lambda of: f"{median_of(of, 'cpu'):.2f}",
        },
        title=f"{setting.name}: a step computes {setting.step:.3g} s, "
        f"{setting.measured:g} s measured",
    )

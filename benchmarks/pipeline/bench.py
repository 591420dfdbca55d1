"""Pipelines on slow, uneven and changing networks: `auto` against 1F1B, ours and torch's.

Four stages on four hosts of the lab, real gloo processes, emulated compute; sides take turns, a
step each, and ratios are taken between the steps of one round. `auto` starts at 1F1B and is told
nothing of the network; it has a few steps to adapt before rounds count. The ideal is the simulated
length of the best schedule on the described network.
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.bars import print_bars
from benchmarks.pipeline.follow import follow
from benchmarks.pipeline.loop import plain_loop
from benchmarks.pipeline.networks import (
    BURSTY,
    FAST,
    FULL,
    HALF,
    SLOW_LINK,
    Network,
    cluster,
    ideal,
)
from benchmarks.pipeline.stages import Stages
from benchmarks.pipeline.worker import Load, Order
from benchmarks.result import Result
from polyrhythm.lab.lab import Lab
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Seconds

BARS = {
    "half_vs_own": 1.14,
    "half_vs_torch": 1.30,
    "half_vs_ideal": 0.95,
    "full_vs_own": 1.25,
    "full_vs_torch": 1.55,
    "full_vs_ideal": 0.95,
    "bursty_vs_own": 1.20,
    "bursty_vs_torch": 1.40,
    "slowlink_vs_own": 1.15,
    "slowlink_memory": 1.0,
    "fast_vs_own": 0.99,
    "fast_vs_torch": 1.00,
    "fast_vs_ideal": 0.97,
    "plain_loop": 0.97,
    "follows": 1.0,
}
TORCH, OWN, AUTO = "torch", "1f1b", "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    network: Network
    sides: tuple[str, ...]
    num_rounds: int
    adapting: int  # steps of auto that do not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    experiments: tuple[Experiment, ...]
    load: Load
    forward: Seconds
    follow_forward: Seconds
    follow_steps: int
    loop_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step of one side."""

    network: str
    round: int
    side: str
    seconds: Seconds
    spec: str
    in_flight: tuple[int, ...]  # measured peak per stage


_ALL = (TORCH, OWN, AUTO)


def _experiments(num_rounds: int, adapting: int) -> tuple[Experiment, ...]:
    """The last network differs least from the ideal, and gets more rounds."""
    once = {"num_rounds": num_rounds, "adapting": adapting}
    return (
        Experiment(network=HALF, sides=_ALL, **once),
        Experiment(network=FULL, sides=_ALL, **once),
        Experiment(network=BURSTY, sides=_ALL, **once),
        Experiment(network=SLOW_LINK, sides=(OWN, AUTO, "kfkb:2"), **once),
        Experiment(network=FAST, sides=_ALL, num_rounds=2 * num_rounds - 1, adapting=adapting),
    )


FULL_PLAN = Plan(
    experiments=_experiments(num_rounds=3, adapting=3),
    load=Load(num_microbatches=12, num_floats=8192),
    forward=0.080,
    follow_forward=0.030,
    follow_steps=20,
    loop_steps=12,
)
QUICK_PLAN = Plan(
    experiments=_experiments(num_rounds=1, adapting=1),
    load=Load(num_microbatches=4, num_floats=8192),
    forward=0.012,
    follow_forward=0.012,
    follow_steps=2,
    loop_steps=1,
)


def run(*, quick: bool, console: Console) -> Result:
    plan = QUICK_PLAN if quick else FULL_PLAN
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(cluster()) as lab,
        Stages(lab, plan.load, Path(folder)) as stages,
    ):
        _warm_up(stages, plan)
        for experiment in plan.experiments:
            measured = _measure(stages, experiment, plan)
            rows += measured
            _show_steps(console, experiment, measured)
        phases = follow(stages, plan.follow_forward, plan.follow_steps, plan.load.num_microbatches)
    loop = plain_loop(plan.loop_steps)
    ratios = {
        **_ratios(rows, plan),
        "plain_loop": loop,
        "follows": float(all(phase.followed for phase in phases)),
    }
    _show(console, ratios, quick=quick)
    for phase in phases:
        print_line(console, str(phase))
    return Result(bench="pipeline", ratios=ratios, figures=_figures(rows, plan), rows=rows)


def _warm_up(stages: Stages, plan: Plan) -> None:
    """Connections, buffers, torch's exchange of shapes."""
    stages.set_network(FAST, plan.forward)
    for side in (TORCH, OWN, "kfkb:2"):
        stages.step(Order(side=side, forward=0.002), network=FAST, seed=0)


def _measure(stages: Stages, experiment: Experiment, plan: Plan) -> list[Row]:
    network = experiment.network
    stages.set_network(network, plan.forward)
    for number in range(experiment.adapting):
        order = Order(side=AUTO, forward=plan.forward, anew=number == 0)
        stages.step(order, network=network, seed=1000 + number)
    rows = []
    for number in range(experiment.num_rounds):
        for side in experiment.sides:
            order = Order(side=side, forward=plan.forward)
            answers = stages.step(order, network=network, seed=number)
            rows.append(
                Row(
                    network=network.name,
                    round=number,
                    side=side,
                    seconds=answers[0].seconds,
                    spec=answers[0].spec,
                    in_flight=tuple(answer.peak_in_flight for answer in answers),
                )
            )
    return rows


def _ratios(rows: Sequence[Row], plan: Plan) -> dict[str, float]:
    found = {}
    for experiment in plan.experiments:
        name = experiment.network.name
        of_network = [row for row in rows if row.network == name]
        found[f"{name}_vs_own"] = _ratio(of_network, OWN)
        if TORCH in experiment.sides:
            found[f"{name}_vs_torch"] = _ratio(of_network, TORCH)
        if f"{name}_vs_ideal" in BARS:
            times = [row.seconds for row in of_network if row.side == AUTO]
            found[f"{name}_vs_ideal"] = _ideal(experiment, plan) / statistics.median(times)
        if "kfkb:2" in experiment.sides:
            found["slowlink_memory"] = _in_flight(of_network, "kfkb:2") / _in_flight(
                of_network, AUTO
            )
    return found


def _ratio(rows: Sequence[Row], other: str) -> float:
    """How many times longer the other takes: the median over rounds."""
    auto = {row.round: row.seconds for row in rows if row.side == AUTO}
    return statistics.median(row.seconds / auto[row.round] for row in rows if row.side == other)


def _in_flight(rows: Sequence[Row], side: str) -> int:
    """Activations held at the peak, of all stages."""
    return max(sum(row.in_flight) for row in rows if row.side == side)


def _ideal(experiment: Experiment, plan: Plan) -> Seconds:
    return ideal(experiment.network, plan.forward, plan.load.num_microbatches)


def _figures(rows: Sequence[Row], plan: Plan) -> dict[str, float]:
    found: dict[str, float] = {}
    for experiment in plan.experiments:
        name = experiment.network.name
        for side in experiment.sides:
            times = [r.seconds for r in rows if r.network == name and r.side == side]
            found[f"{name}_{side}_forwards"] = statistics.median(times) / plan.forward
        if not experiment.network.bursty:
            found[f"{name}_ideal_forwards"] = _ideal(experiment, plan) / plan.forward
        found[f"{name}_in_flight"] = _in_flight([r for r in rows if r.network == name], AUTO)
    return found


def _show_steps(console: Console, experiment: Experiment, rows: Sequence[Row]) -> None:
    print_table(
        console,
        ["side", "steps, s", "schedule", "held per stage"],
        [
            [
                side,
                "  ".join(f"{row.seconds:.2f}" for row in rows if row.side == side),
                next(row.spec for row in reversed(rows) if row.side == side),
                ",".join(map(str, next(r.in_flight for r in reversed(rows) if r.side == side))),
            ]
            for side in experiment.sides
        ],
        title=f"network {experiment.network.name}",
    )


def _show(console: Console, ratios: Mapping[str, float], *, quick: bool) -> None:
    rows = (
        (name, f"{ratios[name]:.3f}", f"{bar:g}", _verdict(name, ratios[name], bar))
        for name, bar in BARS.items()
        if name in ratios
    )
    print_bars(console, rows, quick=quick)


def _verdict(name: str, ratio: float, bar: float) -> str:
    reached = ratio > bar if name == "slowlink_memory" else ratio >= bar
    return "reached" if reached else "MISSED"

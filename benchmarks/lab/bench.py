"""How true the lab is: described and measured, from 1 to 200 Mbit/s and from 1 to 150 ms one way.

A grid of single pairs, each alone on its link; a ring of 16 hosts that all send at once; faster
rings, up to where the switch is late; and flows without a limit of their own, which find the
switch's. A round in which the switch was late is rejected and repeated. An error is the worst of
all cells and of all rounds that count.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from benchmarks.lab.plan import FULL, MEGABIT, QUICK, Experiment, Plan
from benchmarks.result import Result
from polyrhythm.lab.lab import Lab
from polyrhythm.lab.measure import MIN_GOODPUT
from polyrhythm.lab.meter import Meter, Pair, described_round_trip
from polyrhythm.lab.timing import TimedRounds, rounds_on_time
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import BytesPerSecond, Seconds

BARS = {"bandwidth_error": 0.08, "rtt_error": 0.10, "ring16_error": 0.15}
ALLOWED: Seconds = 3e-3  # of a round trip: two processes, and the switch twice, must wake up

_Figures = tuple[list[Seconds], list[BytesPerSecond]]  # of the pairs: round trips, and goodput


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pair in one round that counts."""

    part: str  # grid or ring16
    pair: Pair
    round: int
    bandwidth: BytesPerSecond
    goodput: BytesPerSecond
    described_round_trip: Seconds
    round_trip: Seconds

    @property
    def bandwidth_error(self) -> float:
        return abs(self.goodput / self.bandwidth - 1)

    @property
    def rtt_excess(self) -> Seconds:
        return self.round_trip - self.described_round_trip

    @property
    def rtt_error(self) -> float:
        return max(0.0, abs(self.rtt_excess) - ALLOWED) / self.described_round_trip


def run(*, quick: bool, console: Console) -> Result:
    plan = QUICK if quick else FULL
    deadline = time.monotonic() + plan.patience
    rows: list[Row] = []
    measured: list[TimedRounds[_Figures]] = []
    for experiment in plan.experiments:
        measured.append(_measure(experiment, plan, deadline))
        rows += _rows(experiment, measured[-1])
        print_line(
            console,
            f"{experiment.part}, {len(experiment.pairs)} pairs at once: "
            f"{len(measured[-1].values)} rounds, {measured[-1].num_rejected} rejected; "
            f"in the last {measured[-1].switch_timing}",
        )
    punctual = _punctual_limit(plan)
    limit = _switch_limit(plan)
    grid = [row for row in rows if row.part == "grid"]
    ratios = {
        "bandwidth_error": max(row.bandwidth_error for row in grid),
        "rtt_error": max(row.rtt_error for row in grid),
        "ring16_error": max(row.bandwidth_error for row in rows if row.part == "ring16"),
        "switch_limit_mbps": limit / MEGABIT,
    }
    figures = {
        "rtt_excess_ms": 1e3 * max(abs(row.rtt_excess) for row in grid),
        "punctual_limit_mbps": punctual / MEGABIT,
        "rounds": sum(len(rounds.values) for rounds in measured),
        "rejected_rounds": sum(rounds.num_rejected for rounds in measured),
        "doubtful_rounds": sum(rounds.trouble is not None for rounds in measured),
    }
    _show(console, rows, ratios, figures)
    return Result(bench="lab", ratios=ratios, figures=figures, rows=rows)


def _measure(experiment: Experiment, plan: Plan, deadline: Seconds) -> TimedRounds[_Figures]:
    with Lab(experiment.cluster) as lab, Meter(lab) as meter:

        def work() -> _Figures:
            pairs = experiment.pairs
            return meter.round_trips(pairs), meter.goodput(pairs, experiment.window)

        return rounds_on_time(
            lab, work, num_rounds=plan.num_rounds, tries=plan.tries, deadline=deadline
        )


def _rows(experiment: Experiment, rounds: TimedRounds[_Figures]) -> Iterator[Row]:
    for number, figures in enumerate(rounds.values):
        for pair, round_trip, goodput in zip(experiment.pairs, *figures, strict=True):
            yield Row(
                part=experiment.part,
                pair=pair,
                round=number,
                bandwidth=experiment.cluster.link(*pair).bandwidth,
                goodput=goodput,
                described_round_trip=described_round_trip(experiment.cluster, pair),
                round_trip=round_trip,
            )


def _punctual_limit(plan: Plan) -> BytesPerSecond:
    """The fastest ring that gets all it is described to have from a punctual switch; 0 if none."""
    carried = 0.0
    for experiment in plan.rings:
        with Lab(experiment.cluster) as lab, Meter(lab) as meter:
            work = partial(meter.goodput, experiment.pairs, experiment.window)
            rounds = rounds_on_time(lab, work, tries=2)
        (goodput,) = rounds.values
        described = experiment.cluster.link(*experiment.pairs[0]).bandwidth
        if rounds.trouble or min(goodput) < MIN_GOODPUT * described:
            break
        carried = sum(goodput)
    return carried


def _switch_limit(plan: Plan) -> BytesPerSecond:
    """What all flows together get; the switch is late then, and no round is rejected for it."""
    experiment = plan.unlimited
    with Lab(experiment.cluster) as lab, Meter(lab) as meter:
        return statistics.median(
            sum(meter.goodput(experiment.pairs, experiment.window)) for _ in range(plan.num_rounds)
        )


def _show(
    console: Console,
    rows: Sequence[Row],
    ratios: Mapping[str, float],
    figures: Mapping[str, float],
) -> None:
    cells: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        cells[row.pair[0].split(":")[0] if row.part == "grid" else row.part].append(row)
    print_table(
        console,
        ["", "Mbit/s", "measured", "error", "round trip, ms", "measured", "error, ms"],
        [_cell(name, of_cell) for name, of_cell in cells.items()],
        title="described and measured: medians, and the largest errors of all rounds",
        numbers=True,
    )
    print_table(
        console,
        ["worst", "measured", "bar", ""],
        [
            [name, f"{ratios[name]:.2%}", f"{bar:.0%}", _verdict(ratios[name], bar)]
            for name, bar in BARS.items()
        ],
        numbers=True,
    )
    for line in (
        f"the switch carries {ratios['switch_limit_mbps']:,.0f} Mbit/s at the most, and on time "
        f"{figures['punctual_limit_mbps']:,.0f} Mbit/s between 16 hosts",
        f"{figures['rounds']} rounds count; {figures['rejected_rounds']} were rejected as "
        f"the switch was late, {figures['doubtful_rounds']} count although it was",
    ):
        print_line(console, line)


def _cell(name: str, rows: Sequence[Row]) -> list[str]:
    return [
        name,
        f"{rows[0].bandwidth / MEGABIT:g}",
        f"{statistics.median(row.goodput for row in rows) / MEGABIT:.5g}",
        f"{max(row.bandwidth_error for row in rows):.2%}",
        f"{1e3 * rows[0].described_round_trip:g}",
        f"{1e3 * statistics.median(row.round_trip for row in rows):.2f}",
        f"{1e3 * max(abs(row.rtt_excess) for row in rows):.2f}",
    ]


def _verdict(ratio: float, bar: float) -> str:
    return "reached" if ratio <= bar else "MISSED"

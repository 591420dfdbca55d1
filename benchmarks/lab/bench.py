"""How accurate the lab is: described and measured links, 1 to 200 Mbit/s and 1 to 150 ms one way.

A grid of single pairs, each alone on its link; a ring of 16 hosts that all send at once; faster
rings, up to where the switch is late; and flows without a limit of their own, which reach the
switch's. A round in which the switch was late is rejected and repeated. An error is the worst of
all cells and of all rounds that count.
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from benchmarks.harness.network import uniform_cluster
from benchmarks.harness.report import Bar, Result, print_bars, print_rows, select
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.lab.agent import MeasureWindow
from polyrhythm.lab.lab import Lab
from polyrhythm.lab.measure import MIN_GOODPUT, TimedRounds, rounds_on_time
from polyrhythm.lab.meter import Meter, Pair, described_round_trip
from polyrhythm.tables import print_line
from polyrhythm.types import BytesPerSecond, Seconds

MEGABIT: BytesPerSecond = 125e3
_UNLIMITED: BytesPerSecond = 1e12
_RING_LATENCY: Seconds = 0.020
_RATES = (1, 10, 50, 200)  # Mbit/s
_LATENCIES = (1, 20, 75, 150)  # ms, one way
_TOLERANCE: Seconds = 3e-3  # of a round trip: two processes, and the switch twice, must wake up

BARS = (
    Bar("bandwidth_error", "<=", 0.08, "largest relative error of a pair's bandwidth"),
    Bar("rtt_error", "<=", 0.10, "largest relative error of a round trip, beyond 3 ms"),
    Bar("ring16_error", "<=", 0.15, "the same of bandwidth in a ring of 16 hosts"),
    Bar("switch_limit_mbps", ">=", None, "Mbit/s that the switch carries at most"),
)


@dataclass(frozen=True, slots=True)
class LinkExperiment:
    """Pairs of hosts that are measured at once."""

    part: str
    cluster: Cluster
    pairs: tuple[Pair, ...]
    window: MeasureWindow | None = None  # None: as long as the links need


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSetting:
    experiments: tuple[LinkExperiment, ...]
    rings: tuple[LinkExperiment, ...]  # each asks more of the switch than the one before
    unlimited: LinkExperiment
    num_rounds: int  # of each experiment, that count
    max_attempts: int
    budget: Seconds  # after which nothing is repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """One pair in one round that counts."""

    part: str  # grid or ring16
    pair: Pair
    round: int
    bandwidth: BytesPerSecond
    goodput: BytesPerSecond
    described_round_trip: Seconds
    round_trip: Seconds

    @property
    def cell(self) -> str:
        return self.pair[0].split(":")[0] if self.part == "grid" else self.part

    @property
    def bandwidth_error(self) -> float:
        return abs(self.goodput / self.bandwidth - 1)

    @property
    def rtt_excess(self) -> Seconds:
        return self.round_trip - self.described_round_trip

    @property
    def rtt_error(self) -> float:
        return max(0.0, abs(self.rtt_excess) - _TOLERANCE) / self.described_round_trip


def single_pairs(*cells: tuple[float, float]) -> LinkExperiment:
    """Return two hosts for each (Mbit/s, ms one way): a region, measured by the link inside it."""
    regions = tuple(f"{mbps:g} Mbit/s, {latency:g} ms" for mbps, latency in cells)
    cluster = Cluster(
        name="single pairs",
        devices=tuple(Device(name=f"{r}: {end}", region=r) for r in regions for end in "ab"),
        regions=regions,
        latency=tuple((latency * 1e-3,) * len(cells) for _, latency in cells),
        bandwidth=tuple((mbps * MEGABIT,) * len(cells) for mbps, _ in cells),
    )
    return LinkExperiment("grid", cluster, tuple((f"{r}: a", f"{r}: b") for r in regions))


def ring(num_hosts: int, mbps: float, window: MeasureWindow) -> LinkExperiment:
    """Return a ring: every host sends to the next, all at once."""
    hosts = [f"host {number}" for number in range(num_hosts)]
    cluster = uniform_cluster(hosts, _RING_LATENCY, mbps * MEGABIT)
    pairs = tuple(zip(hosts, hosts[1:] + hosts[:1], strict=True))
    return LinkExperiment(f"ring{num_hosts}", cluster, pairs, window)


def unlimited(num_pairs: int, window: MeasureWindow) -> LinkExperiment:
    """Return pairs at no distance, whose links carry whatever the switch does."""
    hosts = [f"host {number}" for number in range(2 * num_pairs)]
    pairs = tuple(zip(hosts[::2], hosts[1::2], strict=True))
    return LinkExperiment("limit", uniform_cluster(hosts, 0.0, _UNLIMITED), pairs, window)


FULL = LinkSetting(
    experiments=(
        # What is measured at once is far below the switch's limit: 44, 200, 400, 400, 320 Mbit/s.
        single_pairs(*((mbps, latency) for mbps in _RATES[:2] for latency in _LATENCIES)),
        single_pairs(*((_RATES[2], latency) for latency in _LATENCIES)),
        single_pairs(*((_RATES[3], latency) for latency in _LATENCIES[:2])),
        single_pairs(*((_RATES[3], latency) for latency in _LATENCIES[2:])),
        ring(16, 20, MeasureWindow(1.0, 4.0)),
    ),
    rings=tuple(ring(16, mbps, MeasureWindow(1.0, 2.0)) for mbps in (20, 50, 100, 200, 400)),
    unlimited=unlimited(4, MeasureWindow(1.0, 2.0)),
    num_rounds=3,
    max_attempts=6,
    budget=240.0,
)
QUICK = LinkSetting(
    experiments=(single_pairs((10, 1), (50, 20)), ring(16, 20, MeasureWindow(0.5, 0.5))),
    rings=(ring(16, 20, MeasureWindow(1.0, 0.5)),),
    unlimited=unlimited(2, MeasureWindow(0.3, 0.5)),
    num_rounds=1,
    max_attempts=2,
    budget=6.0,
)
PairFigures = tuple[list[Seconds], list[BytesPerSecond]]  # round trips and goodput of the pairs


def run(*, quick: bool, console: Console) -> Result:
    setting = QUICK if quick else FULL
    deadline = time.monotonic() + setting.budget
    rows: list[LinkRow] = []
    measured: list[TimedRounds[PairFigures]] = []
    for experiment in setting.experiments:
        rounds, found = _measure(experiment, setting, deadline)
        measured.append(rounds)
        rows += found
        print_line(
            console,
            f"{experiment.part}, {len(experiment.pairs)} pairs at once: {len(rounds.values)} "
            f"rounds, {rounds.num_rejected} rejected; in the last {rounds.switch_timing}",
        )
    lateness_limit, switch_limit = _lateness_limit(setting), _switch_limit(setting)
    grid = select(rows, part="grid")
    ratios = {
        "bandwidth_error": max(row.bandwidth_error for row in grid),
        "rtt_error": max(row.rtt_error for row in grid),
        "ring16_error": max(row.bandwidth_error for row in select(rows, part="ring16")),
        "switch_limit_mbps": switch_limit / MEGABIT,
    }
    figures = {
        "rtt_excess_ms": 1e3 * max(abs(row.rtt_excess) for row in grid),
        "punctual_limit_mbps": lateness_limit / MEGABIT,
        "rounds": sum(len(rounds.values) for rounds in measured),
        "rejected_rounds": sum(rounds.num_rejected for rounds in measured),
        "doubtful_rounds": sum(rounds.trouble is not None for rounds in measured),
    }
    _print_cells(console, rows)
    print_bars(console, BARS, ratios, quick=quick)
    for line in (
        f"the switch carries {ratios['switch_limit_mbps']:,.0f} Mbit/s at most, and on time "
        f"{figures['punctual_limit_mbps']:,.0f} Mbit/s between 16 hosts",
        f"{figures['rounds']} rounds count; {figures['rejected_rounds']} were rejected as "
        f"the switch was late, {figures['doubtful_rounds']} count although it was",
    ):
        print_line(console, line)
    return Result(bench="lab", ratios=ratios, figures=figures, rows=rows)


def _measure(
    experiment: LinkExperiment, setting: LinkSetting, deadline: Seconds
) -> tuple[TimedRounds[PairFigures], list[LinkRow]]:
    pairs, cluster = experiment.pairs, experiment.cluster
    with Lab(cluster) as lab, Meter(lab) as meter:

        def work() -> PairFigures:
            return meter.round_trips(pairs), meter.goodput(pairs, experiment.window)

        num_rounds, max_attempts = setting.num_rounds, setting.max_attempts
        rounds = rounds_on_time(
            lab, work, num_rounds=num_rounds, max_attempts=max_attempts, deadline=deadline
        )
    return rounds, [
        LinkRow(
            part=experiment.part,
            pair=pair,
            round=number,
            bandwidth=cluster.link(*pair).bandwidth,
            goodput=goodput,
            described_round_trip=described_round_trip(cluster, pair),
            round_trip=round_trip,
        )
        for number, figures in enumerate(rounds.values)
        for pair, round_trip, goodput in zip(pairs, *figures, strict=True)
    ]


def _lateness_limit(setting: LinkSetting) -> BytesPerSecond:
    """Return what the fastest ring carries in full while the switch is on time; 0 if none does."""
    carried = 0.0
    for experiment in setting.rings:
        with Lab(experiment.cluster) as lab, Meter(lab) as meter:
            work = partial(meter.goodput, experiment.pairs, experiment.window)
            rounds = rounds_on_time(lab, work, max_attempts=2)
        (goodput,) = rounds.values
        described = experiment.cluster.link(*experiment.pairs[0]).bandwidth
        if rounds.trouble or min(goodput) < MIN_GOODPUT * described:
            break
        carried = sum(goodput)
    return carried


def _switch_limit(setting: LinkSetting) -> BytesPerSecond:
    """Return what all flows together get; the switch is late then, and no round is rejected."""
    experiment, num_rounds = setting.unlimited, setting.num_rounds
    with Lab(experiment.cluster) as lab, Meter(lab) as meter:
        return statistics.median(
            sum(meter.goodput(experiment.pairs, experiment.window)) for _ in range(num_rounds)
        )


def _print_cells(console: Console, rows: list[LinkRow]) -> None:
    print_rows(
        console,
        [select(rows, cell=cell) for cell in dict.fromkeys(row.cell for row in rows)],
        {
            "": lambda cell: cell[0].cell,
            "Mbit/s": lambda cell: f"{cell[0].bandwidth / MEGABIT:g}",
            "measured": lambda cell: (
                f"{statistics.median(row.goodput for row in cell) / MEGABIT:.5g}"
            ),
            "error": lambda cell: f"{max(row.bandwidth_error for row in cell):.2%}",
            "round trip, ms": lambda cell: f"{1e3 * cell[0].described_round_trip:g}",
            "measured, ms": lambda cell: (
                f"{1e3 * statistics.median(row.round_trip for row in cell):.2f}"
            ),
            "error, ms": lambda cell: f"{1e3 * max(abs(row.rtt_excess) for row in cell):.2f}",
        },
        title="described and measured: medians, and the largest errors of all rounds",
    )

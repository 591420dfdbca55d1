"""How accurate the simulator is: predicted steps against those of real processes in the lab.

A prediction is made from what `polyrhythm probe` and `polyrhythm profile` measure in the same lab
beforehand, and from the scenario that slows the workers. Nothing is fitted. All predictions for a
network are made before the first run on it. A run during which the emulated network was late is
repeated while there is time.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rich.console import Console

from benchmarks.harness.pipeline_job import JobTimes, run_job
from benchmarks.harness.pool import PoolWorker, WorkerPool, use_realtime_priority
from benchmarks.harness.report import (
    Bar,
    Result,
    print_bars,
    print_disturbed,
    print_rows,
    progress_printer,
)
from benchmarks.predict.setting import FACTORY, FULL, QUICK, Alternative, PredictSetting
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.lab.lab import Lab
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.probe.probe import ProbeEffort, ProbeOptions, probe
from polyrhythm.run.profile.profile import measure_profile
from polyrhythm.simulate.simulator import simulate
from polyrhythm.tables import print_line
from polyrhythm.types import Seconds

TIE = 0.02  # two step times that differ by less are not ranked: two runs may be as far apart
_TRIES = 5  # of one run, the first one included
_PROBE_PORT = 29400
_PROBE_TIMEOUT: Seconds = 120.0
BARS = (
    Bar("median_error", "<=", 0.05, "median of |predicted - measured| / measured"),
    Bar("worst_error", "<=", 0.15, "the largest of them"),
    Bar("ranking", ">=", 0.95, "pairs of alternatives in the predicted order, ties left out"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictRow:
    """One alternative on one network; times are of a step of all pipelines."""

    network: str
    alternative: str
    predicted: Seconds
    measured: Seconds
    again: Seconds | None  # of the second measurement, where there is one
    disturbed: bool

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured

    @property
    def spread(self) -> float | None:
        """Return how far the two measurements are apart."""
        return None if self.again is None else abs(self.again - self.measured) / self.measured


def run(*, quick: bool, console: Console) -> Result:
    rows = predict_and_measure(QUICK if quick else FULL, progress_printer(console))
    print_rows(
        console,
        rows,
        {
            "network": lambda row: row.network,
            "alternative": lambda row: row.alternative + (" (disturbed)" if row.disturbed else ""),
            "measured, s": lambda row: f"{row.measured:.3f}",
            "again, s": lambda row: "" if row.again is None else f"{row.again:.3f}",
            "predicted, s": lambda row: f"{row.predicted:.3f}",
            "error": lambda row: f"{row.error:.1%}",
        },
        title="a step of all pipelines, in the lab and simulated",
    )
    ratios, figures = ratios_and_figures(rows)
    print_bars(console, BARS, ratios, quick=quick)
    print_line(
        console,
        f"ranking: {figures['pairs']} pairs of alternatives on the same network, of which "
        f"{figures['ties']} differ by less than {TIE:.0%} and are not ranked; with them it is "
        f"{figures['ranking_with_ties']:.3f}",
    )
    print_disturbed(console, [row.disturbed for row in rows])
    return Result(bench="predict", ratios=ratios, figures=figures, rows=rows)


def predict_and_measure(setting: PredictSetting, show: Callable[[str], None]) -> list[PredictRow]:
    budget, rows = RepeatBudget(setting.repeat_budget), list[PredictRow]()
    profile: ModelProfile | None = None

    def measure(lab: Lab, alternative: Alternative) -> tuple[Seconds, bool]:
        """Return the time of a step, and whether the network was late."""
        show(f"{lab.cluster.name}: {alternative.name}")
        workers = alternative.emulated_workers(setting.num_pipelines)
        job = budget.least_late(lambda: run_job(lab, workers, setting.num_steps))
        return step_time(job.ends, setting), job.switch_timing.trouble is not None

    for network in setting.networks:
        with Lab(network) as lab:
            if profile is None:
                show("profiling the model")
                profile = _ask(lab, _profile, setting, lab.hosts[:1])
            show(f"probing {network.name}")
            cluster: Cluster = _ask(lab, _probe, setting, lab.hosts)
            jobs = [each.simulated_job(cluster, profile) for each in setting.alternatives]
            simulated = [simulate(job, num_steps=setting.num_steps) for job in jobs]
            measured = [measure(lab, each) for each in setting.alternatives]
            # At the end, so that whatever changes in the meantime is in their difference.
            first = len(setting.alternatives) - setting.num_repeated
            again = [measure(lab, each)[0] for each in setting.alternatives[first:]]
        rows += [
            PredictRow(
                network=network.name,
                alternative=alternative.name,
                predicted=step_time(simulated[number].ends, setting),
                measured=measured[number][0],
                again=again[number - first] if number >= first else None,
                disturbed=measured[number][1],
            )
            for number, alternative in enumerate(setting.alternatives)
        ]
    return rows


def _ask(lab: Lab, work: Callable[..., None], setting: PredictSetting, hosts: Sequence[str]) -> Any:
    """Return the answer of the first of these hosts."""
    with WorkerPool(lab, work, setting, on=hosts, timeout=_PROBE_TIMEOUT, port=_PROBE_PORT) as pool:
        return pool.gather(work.__name__)[0]


def _profile(worker: PoolWorker, setting: PredictSetting) -> None:
    """Profile the model; nothing slows down the first host."""
    use_realtime_priority()  # as the emulated workers do
    repeat = setting.profile_repeat
    worker.send(measure_profile(FACTORY, sizes=(1,), repeat=repeat, device="cpu"))


def _probe(worker: PoolWorker, setting: PredictSetting) -> None:
    """Probe the lab's hosts and links from inside."""
    use_realtime_priority()
    worker.set_environment()
    place = DistContext.from_environment(os.environ)
    assert place is not None, "the variables are set"
    # Hosts of a lab share no network card, so pairs may be measured at the same time.
    options = ProbeOptions(
        cluster_name="lab",
        measured_at="",
        all_at_once=True,
        effort=ProbeEffort(seconds=setting.probe_seconds, repeat=setting.probe_repeat),
    )
    worker.send(probe(place, worker.host, options))


class RepeatBudget:
    """Time to repeat runs during which the emulated network was late, for all runs together.

    Which run counts follows from the lateness that the lab's switch reports, and never from what
    was measured.
    """

    def __init__(self, seconds: Seconds, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._left, self._clock = seconds, clock

    def least_late(self, run: Callable[[], JobTimes]) -> JobTimes:
        """Return the first run with the network on time; if there is none, the least late one."""
        late: list[JobTimes] = []
        while True:
            start = self._clock()
            job = run()
            if job.switch_timing.trouble is None:
                return job
            late.append(job)
            duration = self._clock() - start
            if len(late) == _TRIES or self._left < duration:
                return min(late, key=lambda each: each.switch_timing.late_p99)
            self._left -= duration


def step_time(ends: Sequence[Sequence[Seconds]], setting: PredictSetting) -> Seconds:
    """Return the time of one step of all pipelines, from the ends of the steps of each pipeline.

    Pipelines that wait for nobody make unequal numbers of steps: a step counts as made when all of
    them together have made as many as pipelines.
    """
    in_order = sorted(end for of_pipeline in ends for end in of_pipeline)
    counted = setting.num_warmup, setting.num_steps
    first, last = (in_order[number * len(ends) - 1] for number in counted)
    return (last - first) / (setting.num_steps - setting.num_warmup)


def ratios_and_figures(rows: Sequence[PredictRow]) -> tuple[dict[str, float], dict[str, float]]:
    errors = [row.error for row in rows]
    # Alternatives on the same network: a user chooses between these.
    pairs = [(a, b) for a, b in combinations(rows, 2) if a.network == b.network]
    apart = [
        (a, b)
        for a, b in pairs
        if abs(a.measured - b.measured) >= TIE * min(a.measured, b.measured)
    ]
    ratios = {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "ranking": _share_in_order(apart),
    }
    figures = {
        "ranking_with_ties": _share_in_order(pairs),
        "pairs": len(pairs),
        "ties": len(pairs) - len(apart),
        "worst_spread": max((row.spread for row in rows if row.spread is not None), default=0.0),
        "disturbed": sum(row.disturbed for row in rows),
    }
    return ratios, figures


def _share_in_order(pairs: Sequence[tuple[PredictRow, PredictRow]]) -> float:
    """Return the share of pairs in the predicted order; 1 if there is nothing to rank."""
    if not pairs:
        return 1.0
    agree = [(a.predicted < b.predicted) == (a.measured < b.measured) for a, b in pairs]
    return statistics.fmean(agree)

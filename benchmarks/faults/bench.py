"""What a loss costs: time until the survivors go on, throughput afterwards, a leave, many faults.

Processes of a Trainer's job on this machine, with emulated compute, are killed by SIGKILL or asked
to leave by SIGTERM, at random times. torchft's replicas get the same fault. What copies at buddies
cost is measured in the lab.
"""

import random
import signal
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from rich.console import Console

from benchmarks.faults import baseline
from benchmarks.faults.buddies import COMPUTE_BOUND, NETWORK_BOUND, buddy_costs
from benchmarks.faults.job import Fault, Outcome, Setting
from benchmarks.faults.job import run as run_job
from benchmarks.faults.links import BARS as LINK_BARS
from benchmarks.faults.links import measure_links
from benchmarks.faults.predicted import fault_predictions
from benchmarks.faults.soak import soak as run_soak
from benchmarks.harness.report import (
    Bar,
    Result,
    names_of,
    print_bars,
    print_rows,
    progress_printer,
)
from polyrhythm.lab import abilities
from polyrhythm.tables import print_line
from polyrhythm.types import Seconds

_NUM_LEAVES = _NUM_JOINS = 3
_LEAVE = Setting(num_stages=1, num_pipelines=4, num_microbatches=12, forward=0.05, num_steps=60)
BARS = (
    Bar("recover_s", "<=", 3.0, "2 x 4, decoupled: seconds from SIGKILL to the next global step"),
    Bar(
        "recover_vs_torchft",
        "<=",
        0.5,
        "4 replicas: the same / torchft's DDP example, whose heartbeat timeout is 5 s",
    ),
    Bar("degraded", ">=", 0.72, "throughput with one of 4 pipelines lost / with four"),
    Bar(
        "leave_lost_steps",
        "<=",
        1.0,
        "a leave: (50 steps around it - as many medians, of steps before and of longer ones after "
        f"it) / the median before, {_LEAVE.step:g} s; the median of {_NUM_LEAVES}",
    ),
    Bar(
        "rejoin_lost_steps",
        "<=",
        1.0,
        "a lost worker joins again: the same of the steps around that, of the others; the median "
        f"of {_NUM_JOINS}",
    ),
    Bar("fault_predicted", "<=", 0.15, "step after a fault: error of the simulator, the largest"),
    Bar("buddy_cost_network", "<=", 1.20, f"step with copies of shards / without: {NETWORK_BOUND}"),
    Bar("buddy_cost", "<=", 1.05, f"the same: {COMPUTE_BOUND}"),
    *LINK_BARS,
    Bar("soak_hangs", "<=", 0, "jobs with random faults that did not end in time"),
    Bar("soak_lost", "<=", 0, "jobs that failed, or did not use each sample once"),
    Bar("soak_diverged", "<=", 0, "jobs whose survivors end with other weights than they should"),
)
NUM_SOAK_FAULTS = 60
_TIMEOUT: Seconds = 120.0
_TORCHFT_VICTIMS = (0, 1, 2)
_OMITTED = "--quick omits it"


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    value: float


@dataclass(frozen=True, slots=True)
class _Found:
    """Ratios and rows so far; keys that this machine cannot have, with the reason."""

    show: Callable[[str], None]
    quick: bool
    num_soak_faults: int
    rows: list[Row] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # keys whose measurement has failed
    troubles: list[str] = field(default_factory=list)  # what else to print

    def add(self, what: str, value: float) -> None:
        self.rows.append(Row(what, value))


def run(*, quick: bool, console: Console, soak: int | None = None) -> Result:
    """`soak`: the number of random faults; None for the usual one."""
    found = _Found(progress_printer(console), quick, soak or (1 if quick else NUM_SOAK_FAULTS))
    for measure, keys in _MEASURES:
        _attempt(found, measure, keys)
    print_rows(console, found.rows, {"what": lambda r: r.what, "value": lambda r: f"{r.value:.4g}"})
    bars = [bar for bar in BARS if bar.name in found.ratios]
    print_bars(console, bars, found.ratios, quick=quick)
    for name, reason in found.missing.items():
        print_line(console, f"{name} is not measured: {reason}")
    for name, reason in found.failures.items():
        print_line(console, f"{name} FAILED: {reason}")
    for trouble in found.troubles:
        print_line(console, trouble)
    return Result(bench="faults", ratios=found.ratios, rows=found.rows, failures=found.failures)


def _attempt(found: _Found, measure: Callable[[_Found], None], keys: Iterable[str]) -> None:
    """Measure some keys. An error of one measurement leaves the others, but fails the benchmark."""
    try:
        measure(found)
    except (RuntimeError, TimeoutError, IndexError, statistics.StatisticsError) as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        for key in keys:
            found.ratios.pop(key, None)
            found.failures[key] = reason


def _measure_recovery(found: _Found) -> None:
    recovered = []
    for victim in (0,) if found.quick else (0, 1, 2, 3, 4, 7):
        found.show(f"killing process {victim} of 2 x 4")
        recovered.append(_recovery(victim, quick=found.quick))
        found.add(f"2 pipelines x 4 stages: process {victim} is killed, s", recovered[-1])
    found.ratios["recover_s"] = max(recovered)


def _measure_against_torchft(found: _Found) -> None:
    """Kill one of 4 replicas with steps of 100 ms: medians over victims, with equal compute."""
    missing = _OMITTED if found.quick else baseline.why_missing()
    if missing is not None:
        found.missing["recover_vs_torchft"] = missing
        return
    setting = Setting(
        num_stages=1, num_pipelines=4, num_microbatches=4, forward=0.0333, num_steps=60
    )
    ours = []
    for victim in _TORCHFT_VICTIMS:
        found.show(f"killing replica {victim} of 4")
        after = 1.0 + random.Random(victim).uniform(0, setting.step)
        fault = Fault(victim, signal.SIGKILL, after)
        ours.append(_time_to_next_step(run_job(setting, [fault], timeout=_TIMEOUT)))
    found.add("4 replicas: one is killed, s", statistics.median(ours))
    ratios = list[float]()
    for timeouts in baseline.TIMEOUTS:
        found.show(f"the same of torchft, {timeouts}")
        theirs = statistics.median(
            baseline.recovery(
                victim,
                timeouts,
                num_replicas=setting.num_pipelines,
                forward=setting.forward,
                timeout=_TIMEOUT,
            )
            for victim in _TORCHFT_VICTIMS
        )
        found.add(f"the same of torchft, {timeouts}, s", theirs)
        ratios.append(statistics.median(ours) / theirs)
    found.ratios["recover_vs_torchft"], with_short = ratios
    found.add("ours / torchft with short timeouts", with_short)


def _measure_degraded(found: _Found) -> None:
    found.show("throughput without one of 4 pipelines")
    found.ratios["degraded"], before, after = _degraded(quick=found.quick)
    found.add("a step of 4 pipelines, ms", 1e3 * before)
    found.add("a step of 3 pipelines, ms", 1e3 * after)


def _measure_leave(found: _Found) -> None:
    """Let one worker leave; the job with the median of what it costs, since one is noisy."""
    num_around = 8 if found.quick else 50
    setting = replace(_LEAVE, forward=0.01, num_steps=18) if found.quick else _LEAVE
    after, costs = num_around / 2 * setting.step, list[tuple[Seconds, Seconds, Seconds]]()
    for number in range(1 if found.quick else _NUM_LEAVES):
        found.show(f"a worker that leaves, job {number + 1}")
        outcome = run_job(setting, [Fault(3, signal.SIGTERM, after)], timeout=_TIMEOUT)
        costs.append(lost_time(outcome, num_around))
    costs.sort(key=lambda cost: cost[0] / cost[1])
    lost, before, later = costs[len(costs) // 2]
    found.ratios["leave_lost_steps"] = lost / before
    found.add("a step before the leave, ms", 1e3 * before)
    found.add("a step after the leave, ms", 1e3 * later)
    found.add("time that the leave costs, s", lost)
    found.add("the longest of them, s", max(cost[0] for cost in costs))


def _measure_join(found: _Found) -> None:
    """Kill one worker, and start it again when others have made half of the steps around that."""
    num_around = 8 if found.quick else 50
    setting = _LEAVE if not found.quick else replace(_LEAVE, forward=0.01, num_steps=60)
    after, costs = 2 * setting.step, list[tuple[Seconds, Seconds, Seconds]]()
    for number in range(1 if found.quick else _NUM_JOINS):
        found.show(f"a worker that joins again, job {number + 1}")
        delay = 4 / 3 * setting.step * num_around / 2
        fault = Fault(3, signal.SIGKILL, after)
        outcome = run_job(setting, [fault], timeout=_TIMEOUT, restart_delay=delay)
        costs.append(lost_time(outcome, num_around, change=2))
    costs.sort(key=lambda cost: cost[0] / cost[1])
    lost, before, later = costs[len(costs) // 2]
    found.ratios["rejoin_lost_steps"] = lost / before
    found.add("a step before the join, ms", 1e3 * before)
    found.add("a step after the join, ms", 1e3 * later)
    found.add("time that the join costs the others, s", lost)
    found.add("the longest of them, s", max(cost[0] for cost in costs))


def _measure_predictions(found: _Found) -> None:
    found.show("steps after faults, simulated and measured")
    predictions = fault_predictions(found.quick)
    for each in predictions:
        found.add(f"{each.what}: a step, ms", 1e3 * each.measured)
        found.add("the same, predicted", 1e3 * each.predicted)
        found.add("from the fault to the end of the next step, ms", 1e3 * each.measured_pause)
        if each.predicted_pause is not None:
            found.add("the same, predicted", 1e3 * each.predicted_pause)
    found.ratios["fault_predicted"] = max(each.error for each in predictions)


def _count_faults(found: _Found) -> None:
    counted = run_soak(found.num_soak_faults, found.show)
    found.add("jobs with random faults", counted.num_jobs)
    found.add("faults in them", counted.num_faults)
    found.ratios.update(counted.ratios)
    found.troubles.extend((*counted.hangs, *counted.lost, *counted.diverged))


def _measure_links(found: _Found) -> None:
    missing = _OMITTED if found.quick else _why_no_lab()
    if missing is not None:
        found.missing.update(dict.fromkeys(names_of(LINK_BARS), missing))
        return
    found.show("new and blackholed links")
    measured = measure_links(quick=False)
    found.ratios.update(measured.ratios)
    for row in measured.rows:
        found.add(row.what, row.value)
    found.troubles.extend(f"not to be trusted: {trouble}" for trouble in measured.troubles)


def _measure_buddies(found: _Found) -> None:
    if (missing := _why_no_lab()) is not None:
        found.missing.update(dict.fromkeys(("buddy_cost_network", "buddy_cost"), missing))
        return
    found.show("copies of shards")
    costs = buddy_costs(quick=found.quick)
    found.ratios["buddy_cost_network"] = costs[NETWORK_BOUND].ratio
    found.ratios["buddy_cost"] = costs[COMPUTE_BOUND].ratio
    for each in costs.values():
        found.add(f"{each.setting}: a step without communication, ms", 1e3 * each.alone)
        found.add("the same, decoupled, without copies", 1e3 * each.without)
        found.add("the same, with copies at buddies", 1e3 * each.buddies)
        found.add("bytes sent with copies / without", each.traffic)
        found.troubles.extend(f"not to be trusted: {doubt}" for doubt in each.doubts)


def _why_no_lab() -> str | None:
    results = abilities.check_results()
    needed = (each for each in results if each.subject != "real-time priority")
    missing = [each.found for each in needed if each.ok is False]
    return f"no lab here: {'; '.join(missing)}" if missing else None


def _recovery(victim: int, *, quick: bool) -> Seconds:
    """Return the time from SIGKILL to the end of the first step of the survivors."""
    setting = Setting(
        num_stages=4,
        num_pipelines=2,
        num_microbatches=8,
        forward=0.0047,  # (4 + 3) micro-batches of 14 ms: a step of 100 ms
        num_steps=16 if quick else 40,
    )
    after = random.Random(victim).uniform(0.3, 0.6) if quick else 1.0 + victim * 0.0137
    outcome = run_job(setting, [Fault(victim, signal.SIGKILL, after)], timeout=_TIMEOUT)
    return _time_to_next_step(outcome)


def _time_to_next_step(outcome: Outcome) -> Seconds:
    """Return the time from the fault to the end of the first step of all survivors."""
    return outcome.all_ended(_first_step(outcome, 1)) - outcome.faults_at[0]


def _degraded(*, quick: bool) -> tuple[float, Seconds, Seconds]:
    """Return throughput with three of four pipelines / with four, and both step times."""
    num_steps = 16 if quick else 50
    setting = Setting(
        num_stages=1, num_pipelines=4, num_microbatches=12, forward=0.012, num_steps=num_steps
    )
    after = 0.8 if quick else 2.0
    outcome = run_job(setting, [Fault(2, signal.SIGKILL, after)], timeout=_TIMEOUT)
    before, later = (statistics.median(part) for part in _split(outcome))
    return before / later, before, later


def lost_time(
    outcome: Outcome, num_around: int, *, change: int = 1
) -> tuple[Seconds, Seconds, Seconds]:
    """Return the time that a change costs beyond its steps, and medians of steps before and after.

    Of `num_around` steps around it, or fewer. Steps before and after differ, as there are more or
    fewer workers: those of each part should take the median of that part. `change`: the number of
    the epoch that begins with it, the first epoch being 0.
    """
    before, later = (statistics.median(part) for part in _split(outcome, change))
    survivor, first = max(outcome.ends.values(), key=len), _first_step(outcome, change)
    begin = max(min(survivor), 0 if change == 1 else _first_step(outcome, change - 1) + 1)
    start = max(begin, min(first - num_around // 2, max(survivor) - num_around))
    steps = range(start, min(max(survivor), start + num_around))
    num_before = sum(step + 1 < first for step in steps)
    expected = num_before * before + (len(steps) - num_before) * later
    return survivor[steps.stop] - survivor[steps.start] - expected, before, later


def _first_step(outcome: Outcome, epoch: int) -> int:
    """Return the first step of an epoch; each one counts its own commits."""
    begins = [event for event in outcome.events if event["event"] == "Begin"]
    if len(begins) <= epoch:
        what = f"{len(outcome.delivered)} faults delivered, {len(begins)} epochs in the log"
        raise RuntimeError(f"no epoch {epoch} followed: {what}")
    committed = (begin["committed"] for begin in begins[1 : epoch + 1])
    return sum(0 if number is None else int(number) + 1 for number in committed)


def _split(outcome: Outcome, change: int = 1) -> tuple[list[Seconds], list[Seconds]]:
    """Return the durations of the steps before and after a change of epoch."""
    first, last = _first_step(outcome, change), _first_step(outcome, change - 1)
    survivor = max(outcome.ends.values(), key=len)
    steps = sorted(survivor)
    durations = {b: survivor[b] - survivor[a] for a, b in pairwise(steps)}
    before = [d for step, d in durations.items() if last + 1 < step < first]
    return before, [d for step, d in durations.items() if step > first]


# What is measured, and its keys; the last ones in the lab: without root, a lab leaves the machine's
# network.
_MEASURES: tuple[tuple[Callable[[_Found], None], tuple[str, ...]], ...] = (
    (_measure_recovery, ("recover_s",)),
    (_measure_against_torchft, ("recover_vs_torchft",)),
    (_measure_degraded, ("degraded",)),
    (_measure_leave, ("leave_lost_steps",)),
    (_measure_join, ("rejoin_lost_steps",)),
    (_measure_predictions, ("fault_predicted",)),
    (_count_faults, ("soak_hangs", "soak_lost", "soak_diverged")),
    (_measure_buddies, ("buddy_cost_network", "buddy_cost")),
    (_measure_links, tuple(bar.name for bar in LINK_BARS)),
)

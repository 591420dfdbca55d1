"""What a loss costs: time until the survivors go on, throughput afterwards, a leave, many faults.

Processes of a Trainer's job on this machine, with emulated compute, are killed by SIGKILL or asked
to leave by SIGTERM, at random times. Survivors go on in lockstep, with the same global batch.
"""

import math
import random
import signal
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console

from benchmarks.faults.job import Fault, Outcome, Setting
from benchmarks.faults.job import run as run_job
from benchmarks.harness.report import Bar, Result, print_bars, print_rows, progress_printer
from polyrhythm.types import Seconds

BARS = (
    Bar("recover_s", "<=", 3.0, "2 x 4, decoupled: seconds from SIGKILL to the next global step"),
    Bar("degraded", ">=", 0.72, "throughput with one of 4 pipelines lost / with four"),
    Bar("leave_lost_steps", "<=", 1.0, "steps that a leave after SIGTERM costs the others"),
    Bar("soak_hangs", "<=", 0, "jobs with random faults that did not end in time"),
    Bar("soak_lost", "<=", 0, "jobs in which a step or the whole of them was lost"),
    Bar("soak_diverged", "<=", 0, "jobs whose survivors end with other losses than one another"),
)
_TIMEOUT: Seconds = 120.0
_MODES = ("decoupled", "all_reduce", "balanced")


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    value: float


def run(*, quick: bool, console: Console) -> Result:
    show = progress_printer(console)
    rows, ratios = list[Row](), dict[str, float]()
    victims = (0,) if quick else (0, 1, 2, 3, 4, 7)
    recovered = []
    for victim in victims:
        show(f"killing process {victim} of 2 x 4")
        recovered.append(_recovery(victim, quick=quick))
        rows.append(Row(f"2 pipelines x 4 stages: process {victim} is killed, s", recovered[-1]))
    ratios["recover_s"] = max(recovered)
    show("throughput without one of 4 pipelines")
    ratios["degraded"], before, after = _degraded(quick=quick)
    rows.append(Row("a step of 4 pipelines, ms", 1e3 * before))
    rows.append(Row("a step of 3 pipelines, ms", 1e3 * after))
    show("a worker that leaves")
    ratios["leave_lost_steps"], step = _leave(quick=quick)
    rows.append(Row("a step before the leave, ms", 1e3 * step))
    soak = _soak(1 if quick else 20, show)
    ratios |= soak
    print_rows(console, rows, {"what": lambda r: r.what, "value": lambda r: f"{r.value:.4g}"})
    print_bars(console, BARS, ratios, quick=quick)
    return Result(bench="faults", ratios=ratios, rows=rows)


def _recovery(victim: int, *, quick: bool) -> Seconds:
    """Return the time from SIGKILL to the end of the first step of the survivors."""
    setting = Setting(
        num_stages=4,
        num_pipelines=2,
        num_microbatches=8,
        forward=0.0047,  # (4 + 3) micro-batches of 14 ms: a step of 100 ms
        num_steps=20 if quick else 60,
    )
    after = random.Random(victim).uniform(0.3, 0.6) if quick else 1.0 + victim * 0.0137
    outcome = run_job(setting, [Fault(victim, signal.SIGKILL, after)], timeout=_TIMEOUT)
    return outcome.all_ended(_first_after_loss(outcome)) - outcome.faults_at[0]


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


def _leave(*, quick: bool) -> tuple[float, Seconds]:
    """Return how many steps the leave of one of four workers costs the others."""
    num_around = 8 if quick else 50
    setting = Setting(
        num_stages=1,
        num_pipelines=4,
        num_microbatches=12,
        forward=0.02 if quick else 0.05,
        num_steps=num_around + 10,
    )
    after = num_around / 2 * 9 * setting.forward
    outcome = run_job(setting, [Fault(3, signal.SIGTERM, after)], timeout=_TIMEOUT)
    before, later = (statistics.median(part) for part in _split(outcome))
    survivor = next(iter(outcome.ends.values()))
    steps = range(min(survivor), max(survivor))
    # Steps are longer without it: those of each part should take the median of that part.
    num_before = sum(step + 1 < _first_after_loss(outcome) for step in steps)
    expected = num_before * before + (len(steps) - num_before) * later
    took = survivor[steps.stop] - survivor[steps.start]
    return (took - expected) / later, before


def _first_after_loss(outcome: Outcome) -> int:
    """Return the first step of the second epoch."""
    begins = [event for event in outcome.events if event["event"] == "Begin"]
    return int(begins[1]["committed"]) + 1


def _split(outcome: Outcome) -> tuple[list[Seconds], list[Seconds]]:
    """Return the durations of the steps before and after the first change of epoch."""
    first = _first_after_loss(outcome)
    survivor = next(iter(outcome.ends.values()))
    steps = sorted(survivor)
    durations = {b: survivor[b] - survivor[a] for a, b in pairwise(steps)}
    before = [d for step, d in durations.items() if 1 < step < first]
    return before, [d for step, d in durations.items() if step > first]


def _soak(num_jobs: int, show: Callable[[str], None]) -> dict[str, float]:
    """Count jobs with random faults that hang, lose steps or diverge."""
    found = {"soak_hangs": 0.0, "soak_lost": 0.0, "soak_diverged": 0.0}
    for number in range(num_jobs):
        chosen = random.Random(number)
        setting = Setting(
            num_stages=chosen.choice((1, 2)),
            num_pipelines=chosen.choice((3, 4)),
            num_microbatches=12,
            forward=0.002,
            num_steps=40,
            sync=_MODES[number % len(_MODES)],
        )
        faults = list(_random_faults(chosen, setting))
        show(f"job {number + 1} of {num_jobs}: {setting.sync}, {len(faults)} faults")
        try:
            outcome = run_job(setting, faults, timeout=_TIMEOUT)
        except RuntimeError:
            found["soak_hangs"] += 1
            continue
        found["soak_lost"] += not _is_complete(outcome, setting)
        found["soak_diverged"] += not _is_equal(outcome)
    return found


def _random_faults(chosen: random.Random, setting: Setting) -> Iterator[Fault]:
    """Yield faults of processes of different pipelines, so that one whole one is left."""
    pipelines = chosen.sample(range(setting.num_pipelines), setting.num_pipelines - 1)
    for pipeline in pipelines[: chosen.randint(1, len(pipelines))]:
        rank = pipeline * setting.num_stages + chosen.randrange(setting.num_stages)
        what = chosen.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        yield Fault(rank, what, chosen.uniform(0.0, 1.5))


def _is_complete(outcome: Outcome, setting: Setting) -> bool:
    steps = set(range(setting.num_steps))
    return bool(outcome.ends) and steps <= {s for ends in outcome.ends.values() for s in ends}


def _is_equal(outcome: Outcome) -> bool:
    losses = [loss for loss in outcome.losses.values() if not math.isnan(loss)]
    return bool(losses) and max(losses) - min(losses) <= 1e-6 * abs(max(losses))

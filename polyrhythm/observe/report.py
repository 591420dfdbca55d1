"""The report of a run: steps, loss, samples per second, workers' time by activity, plan switches.

Percentages refer to the time of finished steps. A worker that ends within a step has logged actions
of that step but not its duration, so such actions do not count.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.console import Console

from polyrhythm.events import Event, Value
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Seconds, Worker

_Decision = tuple[int | None, str | None, str | None]  # step, name, why


@dataclass(slots=True)
class WorkerTime:
    steps: int = 0
    total: Seconds = 0.0  # of all its steps
    compute: Seconds = 0.0
    wait: Seconds = 0.0  # for activations and gradients of its neighbours
    sync: Seconds = 0.0  # with the replicas of its stage

    @property
    def other(self) -> Seconds:
        return max(0.0, self.total - self.compute - self.wait - self.sync)


@dataclass(slots=True, kw_only=True)
class RunReport:
    steps: set[int] = field(default_factory=set)  # finished by at least one worker
    num_planned: int | None = None
    workers: dict[Worker, WorkerTime] = field(default_factory=lambda: defaultdict(WorkerTime))
    step_times: dict[Worker, list[Seconds]] = field(default_factory=lambda: defaultdict(list))
    losses: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_samples: int = 0  # trained on
    start: Seconds = math.inf  # of the first step
    end: Seconds = -math.inf  # of the last
    switches: dict[_Decision, None] = field(default_factory=dict)  # a set in order
    stays: set[_Decision] = field(default_factory=set)
    sync_modes: list[_Decision] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> "RunReport":
        report = cls()
        events = list(events)
        finished = {(event.worker, event.step) for event in events if event.kind == "step"}
        for event in events:
            if event.kind == "run" and isinstance(planned := event.values.get("steps"), int):
                report.num_planned = planned
            elif event.kind == "plan":  # a decision counts once, even if all workers log it
                decision = (event.step, event.name, event.why)
                if is_switch(event):
                    report.switches[decision] = None
                else:
                    report.stays.add(decision)
            elif event.kind == "sync_mode":
                report.sync_modes.append((event.step, event.name, event.why))
            elif event.worker is not None:
                spent = report.workers[event.worker]
                if event.duration is not None and (event.worker, event.step) in finished:
                    report._add_time(event, event.worker, spent, event.duration)
        return report

    def _add_time(self, event: Event, worker: Worker, spent: WorkerTime, duration: Seconds) -> None:
        if event.kind == "action":
            spent.wait += waited(event)
            spent.compute += duration - waited(event)
        elif event.kind == "sync":
            spent.sync += duration
        elif event.kind == "step":
            spent.steps += 1
            spent.total += duration
            self.step_times[worker].append(duration)
            self.start = min(self.start, event.time)
            self.end = max(self.end, event.time + duration)
            if event.step is not None:
                self.steps.add(event.step)
                if "loss" in event.values:  # on last stages
                    self.losses[event.step].append(_number(event.values["loss"]))
                    self.num_samples += int(event.values.get("samples", 0))

    def show(self, console: Console) -> None:
        print_line(console, f"steps      {self._steps_text}")
        times = [seconds for times in self.step_times.values() for seconds in times]
        if times:
            print_line(console, f"step time  {_milliseconds(times)} (median)")
        if self.losses:
            print_line(console, f"loss       {self._loss_text}")
        if self.num_samples:
            num_samples, seconds = self.num_samples, self.end - self.start
            rate = f"{num_samples / seconds:,.0f} samples/s"
            print_line(console, f"rate       {num_samples:,} samples in {seconds:.1f} s: {rate}")
        if self.workers:
            print_line(console, "")
            header = ["worker", "steps", "step time", "compute", "wait", "sync", "other"]
            workers = sorted(self.workers, key=pipeline_then_stage)
            print_table(console, header, map(self._row, workers), numbers=True)
        if self.switches:
            print_line(console, "")
            rows = _decision_rows(self.switches)
            print_table(console, ["step", "plan", "why"], rows, title="plan switches")
        if self.stays:
            print_line(console, f"decisions to keep the plan: {len(self.stays)}")
        if self.sync_modes:
            print_line(console, "")
            rows = _decision_rows(self.sync_modes)
            print_table(console, ["step", "sync mode", "why"], rows, title="sync mode switches")

    @property
    def _steps_text(self) -> str:
        """Format the number of steps: with groups, fast workers may run more than planned."""
        if self.num_planned is not None and len(self.steps) > self.num_planned:
            counts = [len(times) for times in self.step_times.values()]
            return f"{min(counts)} to {max(counts)} a worker, {self.num_planned} planned on average"
        planned = "" if self.num_planned is None else f" of {self.num_planned}"
        return f"{len(self.steps)}{planned}"

    @property
    def _loss_text(self) -> str:
        steps = sorted(self.losses)
        last_steps = steps[-max(1, len(steps) // 20) :]  # a mean: one step's loss is noisy
        last = _mean([loss for step in last_steps for loss in self.losses[step]])
        over = f" over the last {len(last_steps)} steps" if len(last_steps) > 1 else " last"
        return f"{_mean(self.losses[steps[0]]):.3f} first, {last:.3f}{over}"

    def _row(self, worker: Worker) -> list[str]:
        spent = self.workers[worker]
        shares = (spent.compute, spent.wait, spent.sync, spent.other)
        return [
            str(worker),
            str(spent.steps),
            _milliseconds(self.step_times.get(worker, [])),
            *(f"{share / spent.total:.0%}" if spent.total > 0 else "-" for share in shares),
        ]


def pipeline_then_stage(worker: Worker | None) -> tuple[int, int]:
    """Sort key for workers in tables; events without a worker come first."""
    return (-1, -1) if worker is None else (worker.pipeline, worker.stage)


def _decision_rows(decisions: Iterable[_Decision]) -> list[list[str]]:
    return [["-" if part is None else str(part) for part in decision] for decision in decisions]


def is_switch(event: Event) -> bool:
    """Return whether a `plan` event switched the plan, rather than decided to keep it."""
    return event.kind == "plan" and event.values.get("switched", 1) == 1


def waited(event: Event) -> Seconds:
    """Return how long an action waited for a neighbour at its beginning."""
    wait = event.values.get("wait", 0.0)
    return 0.0 if isinstance(wait, str) else min(max(0.0, wait), event.duration or 0.0)


def _number(value: Value) -> float:
    """Convert a loss, which the log has as a string if it is nan or inf."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _milliseconds(times: Sequence[Seconds]) -> str:
    return f"{1000 * median(times):.1f} ms" if times else "-"

"""The summary of a run: loss, tokens per second, and each worker's time by activity."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console

from polyrhythm.events import Event
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Seconds, Worker


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


@dataclass(slots=True)
class Summary:
    workers: dict[Worker, WorkerTime] = field(default_factory=lambda: defaultdict(WorkerTime))
    losses: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: float = 0.0
    start: Seconds = float("inf")
    end: Seconds = float("-inf")

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Summary":
        summary = cls()
        for event in events:
            if event.worker is not None and event.duration is not None:
                summary._add(event, event.worker, event.duration)
        return summary

    def _add(self, event: Event, worker: Worker, duration: Seconds) -> None:
        spent = self.workers[worker]
        if event.kind == "action":
            wait = float(event.values["wait"])
            spent.wait += wait
            spent.compute += duration - wait
        elif event.kind == "sync":
            spent.sync += duration
        elif event.kind == "step":
            spent.steps += 1
            spent.total += duration
            self.start = min(self.start, event.time)
            self.end = max(self.end, event.time + duration)
            if event.step is not None and "loss" in event.values:
                self.losses[event.step].append(float(event.values["loss"]))
                self.tokens += float(event.values["tokens"])

    def mean_loss(self, steps: Iterable[int]) -> float:
        losses = [loss for step in steps for loss in self.losses[step]]
        return sum(losses) / len(losses)

    def show(self, console: Console) -> None:
        if not self.losses:
            console.print("no step was finished")
            return
        steps = sorted(self.losses)
        last = steps[-max(1, len(steps) // 20) :]  # a mean: one step's loss is noisy
        seconds = self.end - self.start
        header = ["worker", "step time", "compute", "wait", "sync", "other"]
        print_table(console, header, map(self._row, sorted(self.workers)), title="per worker")
        print_line(
            console,
            f"loss {self.mean_loss(steps[:1]):.3f} at the first step, "
            f"{self.mean_loss(last):.3f} over the last {len(last)} of {len(steps)} steps",
        )
        print_line(
            console,
            f"{self.tokens:,.0f} tokens in {seconds:.1f} s: {self.tokens / seconds:,.0f} tokens/s",
        )

    def _row(self, worker: Worker) -> list[str]:
        spent = self.workers[worker]
        total = spent.total or float("nan")
        return [
            str(worker),
            f"{1000 * spent.total / max(1, spent.steps):.0f} ms",
            f"{spent.compute / total:.0%}",
            f"{spent.wait / total:.0%}",
            f"{spent.sync / total:.0%}",
            f"{spent.other / total:.0%}",
        ]

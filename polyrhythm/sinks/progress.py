"""Show the live progress of a training from its event logs, and of simulations step by step.

A terminal shows a table or bars that are redrawn in place. Without a terminal, a training prints a
plain line now and then, a simulation nothing.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from polyrhythm.events import Event, LogReader
from polyrhythm.types import Seconds, Worker

WINDOW = 20  # steps over which the rate is counted
_MAX_UPDATES = 200  # per bar: drawing takes longer than simulating a worker's step


class RunReader:
    """Read the new events of all workers of a run."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "workers"
        self._readers: dict[Path, LogReader] = {}

    def new(self) -> Iterator[Event]:
        for path in sorted(self._folder.glob("*.jsonl")):
            reader = self._readers.setdefault(path, LogReader(path))
            yield from reader.new()


class PipelineProgress:
    """The progress of one pipeline, from the events of its last stage, which has the loss."""

    def __init__(self) -> None:
        self.step = 0
        self.loss = float("nan")
        self.losses: dict[int, float] = {}  # by finished steps, until all pipelines reach them
        self._recent: deque[tuple[Seconds, float]] = deque(maxlen=WINDOW + 1)

    def update(self, event: Event) -> None:
        self.step = int(event.values.get("global_step", event.step or 0)) + 1
        self.loss = self.losses[self.step] = float(event.values["loss"])
        end = event.time + (event.duration or 0.0)
        self._recent.append((end, float(event.values["samples"])))

    @property
    def rate(self) -> float:
        if len(self._recent) < 2:
            return float("nan")
        (begin, _), (end, _) = self._recent[0], self._recent[-1]
        amount = sum(amount for _, amount in list(self._recent)[1:])
        return amount / (end - begin) if end > begin else float("nan")


class RunProgress:
    """Show a running job; call `update` often: it draws only when there are new events."""

    def __init__(self, run: Path, *, num_steps: int, num_pipelines: int, console: Console) -> None:
        self._reader = RunReader(run)
        self._num_steps, self._console = num_steps, console
        self._pipelines = {number: PipelineProgress() for number in range(num_pipelines)}
        self._next_line = 1
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        if self._live:
            self._live.stop()

    def update(self) -> None:
        new = [event for event in self._reader.new() if "loss" in event.values]
        for event in new:
            assert event.worker is not None, "a step event names its worker"
            self._pipelines[event.worker.pipeline].update(event)
        if new and self._live:
            self._live.update(self._table(), refresh=True)
        elif new:
            self._print_line()

    def _table(self) -> Table:
        table = Table("pipeline", "step", "loss", "samples/s", title="training", min_width=44)
        for pipeline, progress in self._pipelines.items():
            table.add_row(
                f"p{pipeline}",
                f"{progress.step}/{self._num_steps}",
                f"{progress.loss:.3f}",
                _rate(progress.rate),
            )
        return table

    def _print_line(self) -> None:
        """Print a line per twentieth of the run, so that a log file stays readable."""
        step = min(progress.step for progress in self._pipelines.values())
        if step < min(self._next_line, self._num_steps):
            return
        self._next_line = step + max(1, self._num_steps // 20)
        losses = [p.losses.get(step, p.loss) for p in self._pipelines.values()]
        for progress in self._pipelines.values():
            progress.losses = {s: loss for s, loss in progress.losses.items() if s > step}
        rates = [
            f"p{pipeline} {_rate(progress.rate)}" for pipeline, progress in self._pipelines.items()
        ]
        self._console.print(
            f"step {step:>4}/{self._num_steps}  loss {sum(losses) / len(losses):.3f}"
            f"  samples/s {'  '.join(rates)}",
            highlight=False,
        )


def _rate(rate: float) -> str:
    return "-" if math.isnan(rate) else f"{rate:,.0f}"


class SimulationProgress:
    """Progress bars, one per simulation."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        columns = TextColumn("{task.description}", markup=False), BarColumn()
        self._bars = Progress(
            *columns,
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def observers_for(self, name: str, num_steps: int) -> "list[StepBar]":
        """Return an observer that counts the steps of all workers; none without a terminal."""
        if self._bars.disable:
            return []
        self._finish()
        return [StepBar(self._bars, name, num_steps)]

    def show_busy(self, name: str) -> None:
        """Show a bar for work without a known length."""
        self._finish()
        self._bars.add_task(name, total=None)

    def _finish(self) -> None:
        """Complete all earlier bars."""
        for bar in self._bars.tasks:
            self._bars.update(bar.id, total=bar.total or 1, completed=bar.total or 1)


class StepBar:
    """A bar of one simulation, as an observer that only counts steps."""

    def __init__(self, bars: Progress, name: str, total: int) -> None:
        self._bars, self._every, self._count = bars, max(1, total // _MAX_UPDATES), 0
        self._bar = bars.add_task(name, total=total)

    def on_step(self, worker: Worker, now: Seconds) -> None:
        self._count += 1
        if self._count % self._every == 0:
            self._bars.update(self._bar, completed=self._count)

    def on_step_start(self, worker: Worker, now: Seconds) -> None: ...
    def on_average(self, gid: int, members: Sequence[Worker], now: Seconds) -> None: ...
    def on_applied(self, worker: Worker, gid: int, now: Seconds) -> None: ...
    def on_copied(self, worker: Worker, source: Worker, now: Seconds) -> None: ...
    def on_server_transfer(self, worker: Worker, is_push: bool, now: Seconds) -> None: ...

"""Show the live progress of a run from the event logs that its workers are writing.

A terminal shows a table that is redrawn in place; other outputs get a plain line now and then.
"""

import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from polyrhythm.events import Event, LogReader
from polyrhythm.types import Seconds

WINDOW = 20  # steps over which tokens per second are counted


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
        self.step = (event.step or 0) + 1
        self.loss = self.losses[self.step] = float(event.values["loss"])
        end = event.time + (event.duration or 0.0)
        self._recent.append((end, float(event.values["tokens"])))

    @property
    def tokens_per_second(self) -> float:
        if len(self._recent) < 2:
            return float("nan")
        (begin, _), (end, _) = self._recent[0], self._recent[-1]
        tokens = sum(tokens for _, tokens in list(self._recent)[1:])
        return tokens / (end - begin) if end > begin else float("nan")


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
        table = Table("pipeline", "step", "loss", "tokens/s", title="training", min_width=44)
        for pipeline, progress in self._pipelines.items():
            table.add_row(
                f"p{pipeline}",
                f"{progress.step}/{self._num_steps}",
                f"{progress.loss:.3f}",
                _rate(progress.tokens_per_second),
            )
        return table

    def _print_line(self) -> None:
        """Print a line per twentieth of the run, so that a log file stays readable."""
        step = min(progress.step for progress in self._pipelines.values())
        if step < min(self._next_line, self._num_steps):
            return
        self._next_line = step + max(1, self._num_steps // 20)
        losses = [progress.losses[step] for progress in self._pipelines.values()]
        for progress in self._pipelines.values():
            progress.losses = {s: loss for s, loss in progress.losses.items() if s > step}
        rates = [
            f"p{pipeline} {_rate(progress.tokens_per_second)}"
            for pipeline, progress in self._pipelines.items()
        ]
        self._console.print(
            f"step {step:>4}/{self._num_steps}  loss {sum(losses) / len(losses):.3f}"
            f"  tokens/s {'  '.join(rates)}",
            highlight=False,
        )


def _rate(tokens_per_second: float) -> str:
    return "-" if math.isnan(tokens_per_second) else f"{tokens_per_second:,.0f}"

"""Show the live progress of a fit, of a run from its event logs, and of simulations.

A terminal shows a line, a table or bars that are redrawn in place. Without a terminal, a training
prints a plain line now and then, a simulation nothing.
"""

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from polyrhythm.events import Event, LogReader
from polyrhythm.sinks.metrics import StepInfo
from polyrhythm.types import Seconds, Worker

WINDOW = 20  # steps over which the rate is counted
_RATE_WINDOW = 4  # lines: the time of a single step says little if data is read ahead
_MAX_UPDATES = 200  # per bar: drawing takes longer than simulating a worker's step
_DRAW_INTERVAL: Seconds = 0.5  # in a terminal; drawing takes a millisecond
_LINE_INTERVAL: Seconds = 5.0  # elsewhere
_MAX_SPEEDS = 4  # pipelines that are named; of more, the slowest and the fastest


class _Done(NamedTuple):
    """What was done until a line was drawn."""

    time: Seconds
    step: int
    num_samples: int
    num_tokens: int
    seconds: Seconds  # of computing


class FitProgress:
    """The progress of one `fit`: a line that a terminal redraws, or a plain line now and then.

    In a terminal, what the script prints and logs meanwhile appears above the line.
    """

    def __init__(
        self,
        first_step: int,
        num_steps: int,
        console: Console | None = None,
        *,
        epochs_at: Callable[[int], float] | None = None,
        note: str = "",
    ) -> None:
        """`num_steps` counts from the start of training, as `first_step` does.

        `epochs_at(step)`: the epochs done after that many steps, if they are known. `note` is shown
        once, before.
        """
        self._epochs_at = epochs_at
        self.eval_loss: float | None = None  # of the last evaluation
        console = console or Console(file=sys.stderr, soft_wrap=True)
        self._console, self._first_step, self._num_steps = console, first_step, num_steps
        self._start = time.monotonic()
        self._undrawn: StepInfo | None = None
        self._num_samples, self._num_tokens, self._seconds = 0, 0, 0.0
        start = _Done(self._start, first_step, 0, 0, 0.0)
        self._drawn: deque[_Done] = deque([start], maxlen=WINDOW)
        if note:
            console.print(Text(note))
        self._redirected: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._live: Live | None = None
        self._interval = _LINE_INTERVAL
        if console.is_terminal and not console.is_dumb_terminal:
            self._interval = _DRAW_INTERVAL
            is_shown = sys.stdout is not None and sys.stdout.isatty()  # it may go to a file
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=is_shown)
            streams = sys.stdout, sys.stderr
            self._live.start()
            self._redirect_log(*streams)
        self._next_draw = self._start + self._interval

    def update(self, info: StepInfo) -> None:
        self._undrawn = info
        self._num_samples += info.num_samples
        self._num_tokens += info.num_tokens or 0
        self._seconds += info.num_samples / max(info.samples_per_second, 1e-9)
        if time.monotonic() >= self._next_draw:
            self._draw(info)

    def close(self) -> None:
        """Show the last step and end the line."""
        if self._undrawn is not None:
            self._draw(self._undrawn, is_last=True)
        for handler, stream in self._redirected:
            handler.setStream(stream)
        if self._live is not None:
            self._live.stop()

    def _redirect_log(self, stdout: object, stderr: object) -> None:
        """Let handlers that were made before write above the line, too."""
        replaced = {id(stdout): sys.stdout, id(stderr): sys.stderr}
        known = logging.Logger.manager.loggerDict.values()
        loggers = [logging.getLogger(), *(x for x in known if isinstance(x, logging.Logger))]
        for handler in {handler for logger in loggers for handler in logger.handlers}:
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in replaced:
                self._redirected.append((handler, handler.stream))
                handler.setStream(replaced[id(handler.stream)])

    def _draw(self, info: StepInfo, *, is_last: bool = False) -> None:
        now, self._undrawn = time.monotonic(), None
        self._next_draw = now + self._interval
        done = _Done(now, info.step + 1, self._num_samples, self._num_tokens, self._seconds)
        self._drawn.append(done)
        text = Text(self._line(info, is_last=is_last), no_wrap=True, overflow="ellipsis")
        if self._live is not None:
            self._live.update(text, refresh=True)
        else:
            self._console.print(text)

    def _line(self, info: StepInfo, *, is_last: bool) -> str:
        """Return what most look for first: a narrow terminal cuts off the rest."""
        first, last = self._drawn[0], self._drawn[-1]
        now, step = last.time, last.step
        before = self._drawn[max(0, len(self._drawn) - 1 - _RATE_WINDOW)]
        seconds = max(last.seconds - before.seconds, 1e-9)
        parts = [f"step {step}/{self._num_steps}"]
        if self._epochs_at is not None:
            parts.append(f"epoch {self._epochs_at(step):.2f}")
        parts += [
            "loss -" if info.loss is None else f"loss {info.loss:.4g}",
            *([] if self.eval_loss is None else [f"eval loss {self.eval_loss:.4g}"]),
            f"{_rate((last.num_samples - before.num_samples) / seconds)} samples/s",
        ]
        if info.num_tokens is not None:
            parts.append(f"{_rate((last.num_tokens - before.num_tokens) / seconds)} tokens/s")
        if step < self._num_steps and step > first.step and not is_last:
            left = (self._num_steps - step) * (now - first.time) / (step - first.step)
            parts.append(f"ETA {_clock(left)}")
        else:
            parts.append(_clock(now - self._start))
        parts += [f"lr {info.learning_rate:.3g}", f"grad norm {info.grad_norm:.3g}"]
        if len(info.pipelines) > _MAX_SPEEDS:
            slow, *_, fast = sorted(info.pipelines, key=lambda each: each.speed)
            some = [slow, fast]
        else:
            some = list(info.pipelines) if len(info.pipelines) > 1 else []
        if some:
            parts.append(" ".join(f"p{each.pipeline} {_rate(each.speed)}/s" for each in some))
        parts.append(f"{info.peak_memory / 2**30:.1f} GiB")
        return "  ".join(parts)


def _clock(seconds: Seconds) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


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
    if math.isnan(rate):
        return "-"
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


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

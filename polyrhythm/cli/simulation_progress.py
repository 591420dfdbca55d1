"""Show simulations' progress as bars that vanish at the end; nothing without a terminal."""

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from polyrhythm.simulate.averaging import Observer
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.types import Seconds, Worker

_MAX_UPDATES = 200  # per bar: drawing takes longer than simulating a worker's step


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

    def observers_for(self, name: str, job: SimulatedJob, num_steps: int) -> list[Observer]:
        """Return an observer that counts the job's steps; none without a terminal."""
        if self._bars.disable:
            return []
        self._finish()
        return [_StepCounter(self._bars, name, num_steps * len(job.sync.workers))]

    def show_busy(self, name: str) -> None:
        """Show a bar for work without a known length."""
        self._finish()
        self._bars.add_task(name, total=None)

    def _finish(self) -> None:
        """Complete all earlier bars."""
        for bar in self._bars.tasks:
            self._bars.update(bar.id, total=bar.total or 1, completed=bar.total or 1)


class _StepCounter:
    """An observer that only counts steps."""

    def __init__(self, bars: Progress, name: str, total: int) -> None:
        self._bars, self._every, self._count = bars, max(1, total // _MAX_UPDATES), 0
        self._bar = bars.add_task(name, total=total)

    def on_step(self, worker: Worker, now: Seconds) -> None:
        self._count += 1
        if self._count % self._every == 0:
            self._bars.update(self._bar, completed=self._count)

    def on_step_start(self, worker: Worker, now: Seconds) -> None: ...
    def on_average(
        self, gid: int, members: Sequence[Worker], weights: Sequence[float], now: Seconds
    ) -> None: ...
    def on_applied(self, worker: Worker, gid: int, now: Seconds) -> None: ...
    def on_copied(self, worker: Worker, source: Worker, now: Seconds) -> None: ...
    def on_server_transfer(self, worker: Worker, is_push: bool, now: Seconds) -> None: ...

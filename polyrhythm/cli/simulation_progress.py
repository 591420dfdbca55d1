"""How far a simulation has got: a bar on a terminal that is gone when it is over, else nothing."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from polyrhythm.simulate.averaging import Observer
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.types import Seconds, Worker

_DRAWN = 200  # times at the most: to draw takes longer than a step of a worker


class SimulationProgress:
    """One bar per simulation, the last one below."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def observers_for(self, name: str, job: SimulatedJob, num_steps: int) -> list[Observer]:
        """What counts the steps of this one; nothing where nobody looks."""
        if self._bars.disable:
            return []
        self._finish()
        return [_StepCounter(self._bars, name, num_steps * len(job.sync.workers))]

    def show_busy(self, name: str) -> None:
        """At something that is not counted."""
        self._finish()
        self._bars.add_task(name, total=None)

    def _finish(self) -> None:
        """What came before is over."""
        for bar in self._bars.tasks:
            self._bars.update(bar.id, total=bar.total or 1, completed=bar.total or 1)


class _StepCounter:
    """Of all that an observer is told, the steps."""

    def __init__(self, bars: Progress, name: str, total: int) -> None:
        self._bars, self._every, self._made = bars, max(1, total // _DRAWN), 0
        self._bar = bars.add_task(name, total=total)

    def on_step(self, worker: Worker, now: Seconds) -> None:
        self._made += 1
        if self._made % self._every == 0:
            self._bars.update(self._bar, completed=self._made)

    def on_begin(self, worker: Worker, now: Seconds) -> None: ...
    def on_average(
        self, gid: int, members: Sequence[Worker], weights: Sequence[float], now: Seconds
    ) -> None: ...
    def on_applied(self, worker: Worker, gid: int, now: Seconds) -> None: ...
    def on_copied(self, worker: Worker, source: Worker, now: Seconds) -> None: ...
    def on_served(self, worker: Worker, is_push: bool, now: Seconds) -> None: ...

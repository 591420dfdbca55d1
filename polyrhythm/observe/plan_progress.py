"""Show the progress of a plan search: a status line on a terminal, otherwise a few lines."""

from typing import Self

from rich.console import Console
from rich.markup import escape

from polyrhythm.plan.search import SearchProgress
from polyrhythm.tables import print_line

MAX_LINES = 5  # without a terminal


class PlanProgress:
    """The progress display; pass `update` to the search as its callback."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("planning") if console.is_terminal else None
        self._next_line = 0.0  # as a fraction of the search

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def update(self, progress: SearchProgress) -> None:
        line = f"planning {progress.done}/{progress.total}: {progress.doing}"
        if progress.best:
            line += f"; best so far {progress.best}"
        if self._status:
            self._status.update(escape(line))
        elif progress.done >= self._next_line * progress.total:
            print_line(self._console, line)
            self._next_line = progress.done / max(1, progress.total) + 1 / MAX_LINES

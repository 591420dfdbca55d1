"""`polyrhythm report RUN`: where the time of a run went, as a table or as a trace to look at."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyrhythm.errors import EventError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCommand:
    """Say how a run went, over or not: steps, loss, where the time went, plan switches."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder, such as runs/demo-20261115-040004."""
    trace: Path | None = None
    """Write a Chrome trace to this file instead; open it at https://ui.perfetto.dev."""

    def run(self, console: "Console") -> int:
        events = _read(self.folder)
        if self.trace is not None:
            _write_trace(events, self.trace, console)
        else:
            from polyrhythm.observe.report import Report

            Report.of(events).show(console)
        return 0


def _read(folder: Path) -> "list[Event]":
    from polyrhythm.events import read_run

    try:
        return list(read_run(folder))
    except EventError as error:
        runs = [*folder.glob("*/events.jsonl"), *folder.glob("*/workers")]
        if (folder / "events.jsonl").exists() or (folder / "workers").exists() or not runs:
            raise
        newest = max(path.parent for path in runs)  # by name, which has the time in it
        raise EventError(
            error.wrong, expected="the folder of one run", fix=f"give a run in it: {newest}"
        ) from None


def _write_trace(events: "list[Event]", path: Path, console: "Console") -> None:
    from polyrhythm.observe.trace import chrome_trace, write_trace
    from polyrhythm.tables import print_line

    if path.suffix == ".jsonl":
        raise UserError(
            f"--trace {path}",
            expected="a file that is no event log; writing would destroy it",
            fix=f"--trace {path.with_suffix('.json').name}",
        )
    trace = chrome_trace(events)
    write_trace(trace, path)
    slices = sum(event.ph == "X" for event in trace)
    arrows = sum(event.ph == "s" for event in trace)
    print_line(console, f"{path}: {slices:,} slices, {arrows:,} arrows")
    print_line(console, "open it at https://ui.perfetto.dev (nothing is uploaded)")

"""`polyrhythm replay RUN`: a run's scheduler decides all of it again, and must decide alike."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyrhythm.errors import EventError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCommand:
    """Feed a run's decision log to the scheduler again, and say whether all comes out alike.

    Status 1, and the first difference, if it does not: the log was changed, or written by a version
    that decides otherwise.
    """

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder, that of `polyrhythm scheduler --log`, or the scheduler.jsonl in it."""

    def run(self, console: "Console") -> int:
        from polyrhythm.sync.decision_log import DecisionReader, replay
        from polyrhythm.tables import print_line

        path = _log(self.source)
        num_decisions = sum(1 for _ in DecisionReader(path).decisions())  # first: it may still grow
        difference = replay(path)
        if difference is None:
            print_line(console, f"{num_decisions:,} decisions, replayed alike")
            return 0
        print_line(console, f"{path}: replayed otherwise\n{difference}")
        return 1


def _log(source: Path) -> Path:
    """The log that is meant."""
    from polyrhythm.events import merged_log
    from polyrhythm.sync.decision_log import NAME

    path = source / NAME if source.is_dir() else source
    if path.is_file() and path != merged_log(path.parent):
        return path
    expected = f"the folder of a run with groups, or the {NAME} that its scheduler has written"
    if not source.exists():
        raise EventError(f"{source}: there is none", expected=expected, fix="check the path")
    if source.is_file():
        raise EventError(
            f"{source}: what workers did, not what was decided",
            expected=expected,
            fix=f"give its folder: {source.parent}",
        )
    # By name, which has the time in it.
    runs = sorted(log.parent for log in source.glob(f"*/{NAME}"))
    why = "train in groups, with --sync age for example: other runs have no scheduler"
    raise EventError(
        f"{source}: no {NAME}",
        expected=expected,
        fix=f"give a run in it: {runs[-1]}" if runs else why,
    )

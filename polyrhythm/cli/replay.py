"""`polyrhythm replay RUN`: a run's scheduler decides all of it again, and must decide alike."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyrhythm.errors import EventError

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN, _NAMED = 40, 4  # letters and keys of what is something else
_A_RUN = "give the folder of a run, such as one that `polyrhythm simulate --out` has written"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCommand:
    """Feed a run's decision log to the scheduler again, and say whether all comes out alike.

    Status 1, and the first difference, if it does not: the log was changed, or written by a version
    that decides otherwise.
    """

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder, that of `polyrhythm coordinator --log`, or the scheduler.jsonl in it."""

    def run(self, console: "Console") -> int:
        from polyrhythm.sync.decision_log import DecisionReader, replay
        from polyrhythm.tables import print_line

        num_decisions = 0
        for path in _logs(self.source):
            reader = DecisionReader(path)
            num_decisions += sum(1 for _ in reader.decisions())  # first: it may still grow
            difference = replay(path)
            if difference is not None:
                print_line(console, f"{path}: replayed otherwise\n{difference}")
                return 1
        print_line(console, f"{num_decisions:,} decisions, replayed alike")
        return 0


def _logs(source: Path) -> list[Path]:
    """Those that are meant."""
    from polyrhythm.sync.decision_log import LOG_NAME, decision_log_paths

    path = source / LOG_NAME if source.is_dir() else source
    expected = f"the folder of a run with groups, or the {LOG_NAME} that its scheduler has written"
    if path.is_file():
        if other := _other_than_decisions(path):
            what, fix = other
            raise EventError(f"{path} {what}", expected=expected, fix=fix)
        return decision_log_paths(source) if source.is_dir() else [path]
    if not source.exists():
        raise EventError(f"{source}: there is none", expected=expected, fix="check the path")
    # By name, which has the time in it.
    runs = sorted(log.parent for log in source.glob(f"*/{LOG_NAME}"))
    why = "train in groups, with --sync age for example: other runs have no scheduler"
    raise EventError(
        f"{source}: no {LOG_NAME}",
        expected=expected,
        fix=f"give a run in it: {runs[-1]}" if runs else why,
    )


def _other_than_decisions(path: Path) -> tuple[str, str] | None:
    """What the file is, and what to give instead; None if it begins as a log of decisions does."""
    from polyrhythm.events import WORKERS

    with path.open("rb") as file:
        first = file.readline()
    content = _json(first) or _json(path.read_bytes())
    if not isinstance(content, dict):
        begins = first[:_SHOWN].decode(errors="replace").strip()
        return f"is no log: it begins with {begins!r}" if first else "is empty", _A_RUN
    if content.get("kind") == "log":
        run = path.parent.parent if path.parent.name == WORKERS else path.parent
        return "is what workers did, not what was decided", f"give its run's folder: {run}"
    if "setup" in content:
        return None
    known = "a plan" if "layers_per_stage" in content else "JSON"
    return f"is {known} with {', '.join(list(content)[:_NAMED])}, ...", _A_RUN


def _json(text: bytes) -> object:
    try:
        found: object = json.loads(text)
    except ValueError:  # also of bytes that are no text
        return None
    return found

"""`polyrhythm replay RUN`: replay a scheduler's decision log and compare all decisions."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polyrhythm.errors import EventError

if TYPE_CHECKING:
    from rich.console import Console

_MAX_LETTERS, _MAX_KEYS = 40, 4  # shown of a file that is not a decision log
_A_RUN = "pass the folder of a run, such as one that `polyrhythm simulate --out` has written"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCommand:
    """Feed the events of a run's decision logs to the scheduler again and compare its decisions.

    Status 1, and the first difference, if they differ: the log was changed, or written by a version
    with other decisions.
    """

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder, the folder of `polyrhythm coordinator --log`, or a log: a scheduler.jsonl,
    a membership.jsonl, or an archive of it (.jsonl.gz)."""

    def run(self, console: "Console") -> int:
        from polyrhythm.sync.log_reader import replay_and_count
        from polyrhythm.tables import print_line

        num_decisions = 0
        for path in _logs(self.source):
            num_replayed, difference = replay_and_count(path)
            num_decisions += num_replayed
            if difference is not None:
                print_line(console, f"{difference.path}: replayed differently\n{difference}")
                return 1
        print_line(console, f"{num_decisions:,} decisions, replayed identically")
        return 0


def _logs(source: Path) -> list[Path]:
    """Return the decision logs of a run's folder, or the given file; raise EventError if none."""
    from polyrhythm.sync.decision_log import LOG_NAME, decision_log_paths

    path = source / LOG_NAME if source.is_dir() else source
    expected = f"the folder of a run with groups, or the {LOG_NAME} that its scheduler has written"
    if path.is_file():
        if mistake := _not_a_decision_log(path):
            wrong, fix = mistake
            raise EventError(f"{path} {wrong}", expected=expected, fix=fix)
        return decision_log_paths(source) if source.is_dir() else [path]
    if not source.exists():
        raise EventError(f"{source} does not exist", expected=expected, fix="check the path")
    runs = sorted(log.parent for log in source.glob(f"*/{LOG_NAME}"))  # names contain the time
    train = "train in groups, for example with --sync age: other runs have no scheduler"
    raise EventError(
        f"{source}: no {LOG_NAME}",
        expected=expected,
        fix=f"pass a run in it: {runs[-1]}" if runs else train,
    )


def _not_a_decision_log(path: Path) -> tuple[str, str] | None:
    """Return what the file is and a fix; None if it starts like a decision log."""
    from polyrhythm.events import WORKERS

    if path.suffix == ".gz":
        return None
    with path.open("rb") as file:
        first = file.readline()
    content = _json(first) or _json(path.read_bytes())
    if not isinstance(content, dict):
        start = first[:_MAX_LETTERS].decode(errors="replace").strip()
        return f"is no log: it starts with {start!r}" if first else "is empty", _A_RUN
    if content.get("kind") == "log":
        run = path.parent.parent if path.parent.name == WORKERS else path.parent
        return "is a worker's event log, not a decision log", f"pass its run's folder: {run}"
    if "setup" in content:
        return None
    kind = "a plan" if "layers_per_stage" in content else "JSON"
    keys = ", ".join([*list(content)[:_MAX_KEYS], "..."]) if content else "no keys"
    return f"is {kind} with {keys}", _A_RUN


def _json(text: bytes) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:  # also raised for bytes that are not text
        return None
    return value

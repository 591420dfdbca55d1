"""The event record: kind, time, worker, step, reason and values; and how logs of it are read.

Every worker writes its own log in `RUN/workers/`, as JSON lines (`sinks/jsonl.py`); they become
`RUN/events.jsonl` when the run is over. A log can be read while it is being written: a line counts
once its newline is written, so a torn last line (a killed worker, a full disk) is ignored and all
lines before it count. The first line of a log names its schema; a reader refuses a newer one than
it knows.
"""

import heapq
from collections.abc import Iterator
from pathlib import Path

import msgspec

from polyrhythm.errors import EventError
from polyrhythm.types import Seconds, Worker

SCHEMA = 2
WORKERS = "workers"  # folder of the workers' logs in the run's folder
Value = float | int | str
# Schema 1 had other names for these kinds; its logs are read under the present names.
_KINDS_OF_SCHEMA_1 = {"way": "sync_mode", "average_mended": "average_repaired"}


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event; `time` is wall-clock time, the start of an event that has a `duration`."""

    kind: str  # "log" (first line of a file), "run", "action", "step", ...
    time: Seconds
    worker: Worker | None = None
    step: int | None = None
    name: str | None = None  # such as F3 for an action
    duration: Seconds | None = None
    why: str | None = None
    values: dict[str, Value] = {}


_decoder = msgspec.json.Decoder(Event)


class LogReader:
    """Read one log incrementally: each call of `new` yields the events written since the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._line = 0
        self._schema = SCHEMA

    def new(self) -> Iterator[Event]:
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise EventError(
                f"{self.path}: {error.strerror}",
                expected="an event log",
                fix="pass the folder of a run, or check that the run wrote an event log",
            ) from None
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._line += 1
                event = self._decode(line)
                if self._line == 1:
                    self._schema = self._checked_schema(event)
                elif self._schema == 1 and event.kind in _KINDS_OF_SCHEMA_1:
                    yield msgspec.structs.replace(event, kind=_KINDS_OF_SCHEMA_1[event.kind])
                else:
                    yield event

    def _decode(self, line: bytes) -> Event:
        try:
            return _decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise EventError(
                f"{self.path}:{self._line}: {error}",
                expected="one event as JSON per line",
                fix="delete that line; the rest of the log is still good",
            ) from None

    def _checked_schema(self, first: Event) -> int:
        schema = first.values.get("schema")
        if first.kind != "log" or not isinstance(schema, int) or schema > SCHEMA:
            raise EventError(
                f"{self.path}: event schema {schema}",
                expected=f"a log of schema {SCHEMA} or older",
                fix=f"read it with polyrhythm {first.values.get('polyrhythm', 'that wrote it')}",
            )
        return schema


def worker_log(run: Path, worker: Worker) -> Path:
    return run / WORKERS / f"{worker}.jsonl"


def merged_log(run: Path) -> Path:
    return run / "events.jsonl"


def read_run(run: Path | str) -> Iterator[Event]:
    """Return all events of a finished, running or killed job, sorted by time."""
    run = Path(run)
    logs = sorted((run / WORKERS).glob("*.jsonl"))
    try:
        # The merged log is complete once it exists; the workers' logs may be removed after that.
        return by_time([merged_log(run)] if merged_log(run).exists() or not logs else logs)
    except EventError:
        if not merged_log(run).exists():
            raise
        return by_time([merged_log(run)])  # written while we read


def by_time(paths: list[Path]) -> Iterator[Event]:
    """Return the events of several logs, sorted by time."""
    # A log is in the order of ends, not of starts: sort each log before merging.
    logs = [sorted(LogReader(path).new(), key=lambda event: event.time) for path in paths]
    return heapq.merge(*logs, key=lambda event: event.time)

"""The event record: kind, time, worker, step, reason and values, as JSON lines.

Every worker writes its own log in `RUN/workers/`; `merge` joins them into `RUN/events.jsonl` when
the run is over. A log can be read while it is being written: a line counts once its newline is
written, so a torn last line (a killed worker, a full disk) is ignored and all lines before it
count. The first line of a log names its schema; a reader refuses a newer one than it knows.
"""

import heapq
import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

import msgspec

from polyrhythm import __version__
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


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


def _writable(value: Value) -> Value:
    """Convert nan and inf, which a loss can be and JSON lacks, to strings such as "nan"."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class EventLog:
    """Append events to one file, a whole line per system call; a full disk only warns."""

    def __init__(self, path: Path, worker: Worker | None = None) -> None:
        self.path, self.worker = path, worker
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666
        )
        # Read the wall clock once: order and durations must survive changes of the clock.
        self._epoch = time.time() - time.perf_counter()
        self.write("log", values={"schema": SCHEMA, "polyrhythm": __version__})

    def now(self) -> Seconds:
        return self.at(time.perf_counter())

    def at(self, moment: Seconds) -> Seconds:
        """Convert a time of time.perf_counter() to a time of this log."""
        return self._epoch + moment

    def write(
        self,
        kind: str,
        *,
        start: Seconds | None = None,
        end: Seconds | None = None,
        step: int | None = None,
        name: str | None = None,
        why: str | None = None,
        values: Mapping[str, Value] | None = None,
    ) -> None:
        """Record an event of now, or one that lasted from `start` until `end` (default: now)."""
        now = self.now() if end is None else end
        self._append(
            Event(
                kind=kind,
                time=now if start is None else start,
                worker=self.worker,
                step=step,
                name=name,
                duration=None if start is None else now - start,
                why=why,
                values={name: _writable(value) for name, value in (values or {}).items()},
            )
        )

    def _append(self, event: Event) -> None:
        if self._file is None:
            return
        line = _encoder.encode(event) + b"\n"
        try:
            written = os.write(self._file, line)
            problem = None if written == len(line) else "only part of a line was written"
        except OSError as error:
            problem = str(error)
        if problem:  # the torn line must stay the last one
            self.close()
            warnings.warn(f"event log {self.path} ends here: {problem}", stacklevel=3)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Write a whole log of simulated events, sorted by time."""
    first = Event(kind="log", time=0.0, values={"schema": SCHEMA, "polyrhythm": __version__})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(
        _encoder.encode_lines([first, *sorted(events, key=lambda event: event.time)])
    )
    partial.replace(path)


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
        return _by_time([merged_log(run)] if merged_log(run).exists() or not logs else logs)
    except EventError:
        if not merged_log(run).exists():
            raise
        return _by_time([merged_log(run)])  # written while we read


def merge(run: Path) -> Path:
    """Join the workers' logs into one, and remove them once it is complete."""
    logs = sorted((run / WORKERS).glob("*.jsonl"))
    if merged_log(run).exists() or not logs:
        _remove(logs)  # left by a merge that was interrupted before removing them
        return merged_log(run)
    partial = merged_log(run).with_suffix(".partial")
    with EventLog(partial) as log:
        for event in _by_time(logs):
            log._append(event)
        complete = log._file is not None
    if not complete:
        return partial
    partial.replace(merged_log(run))
    _remove(logs)
    return merged_log(run)


def _remove(logs: list[Path]) -> None:
    for path in logs:
        path.unlink()
    if logs and not any(logs[0].parent.iterdir()):
        logs[0].parent.rmdir()


def _by_time(paths: list[Path]) -> Iterator[Event]:
    # A log is in the order of ends, not of starts: sort each log before merging.
    logs = [sorted(LogReader(path).new(), key=lambda event: event.time) for path in paths]
    return heapq.merge(*logs, key=lambda event: event.time)

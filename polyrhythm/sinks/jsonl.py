"""Events as JSON lines: the log of a worker, of a simulation, and of a whole run."""

import atexit
import math
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import msgspec

from polyrhythm import __version__
from polyrhythm.events import SCHEMA, WORKERS, Event, Value, by_time, merged_log
from polyrhythm.types import Seconds, Worker

_encoder = msgspec.json.Encoder()
_MAX_LINE = 64 * 1024  # bytes
_FREQUENT_KINDS = frozenset({"action", "transfer", "step"})  # several per step of training
_FLUSH_INTERVAL: Seconds = 0.25


def writable(value: Value) -> Value:
    """Convert nan and inf, which a loss can be and JSON lacks, to strings such as "nan"."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class AppendedLines:
    """A file to which rows are appended as whole lines of JSON; a full disk only warns."""

    def __init__(self, path: Path, *, continues: bool) -> None:
        """`continues`: after the complete lines of an existing file; else replace it."""
        self.path = path
        self._rows: deque[object] = deque()  # that wait
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None  # writes them
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | (0 if continues else os.O_TRUNC)
        self._file: int | None = os.open(path, flags, 0o666)
        if continues:
            end = os.fstat(self._file).st_size
            tail = os.pread(self._file, _MAX_LINE, max(0, end - _MAX_LINE))
            os.ftruncate(self._file, end - len(tail) + tail.rfind(b"\n") + 1)

    def append(self, row: object, *, may_wait: bool = False) -> None:
        """Append a row as JSON; one that `may_wait` is written within a quarter of a second.

        For rows of each step: encoding and writing many at once takes a tenth of the time of doing
        it between two steps, whose caches are full of tensors. What waits is lost if the process is
        killed, but not if it hangs or exits.
        """
        self._rows.append(row)
        if not may_wait:
            self.flush()
        elif self._thread is None and self._file is not None:
            self._thread = threading.Thread(target=self._flush_often, name="log", daemon=True)
            self._thread.start()
            atexit.register(self.flush)

    def _flush_often(self) -> None:
        while not self._closing.wait(_FLUSH_INTERVAL):
            self.flush()

    def flush(self) -> None:
        """Write what waits; any thread may call it."""
        with self._lock:
            lines = _encoder.encode_lines([self._rows.popleft() for _ in range(len(self._rows))])
            if self._file is None or not lines:
                return
            try:
                written = os.write(self._file, lines)
                problem = None if written == len(lines) else "only part of a line was written"
            except OSError as error:
                problem = str(error)
            if problem:  # the torn line must stay the last one
                self._close_file()
        if problem:
            warnings.warn(f"event log {self.path} ends here: {problem}", stacklevel=4)

    def close(self) -> None:
        self.flush()
        self._closing.set()
        atexit.unregister(self.flush)
        with self._lock:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class EventLog(AppendedLines):
    """The events of one worker, or of a whole run."""

    def __init__(self, path: Path, worker: Worker | None = None) -> None:
        super().__init__(path, continues=False)
        self.worker = worker
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
        self.append(
            Event(
                kind=kind,
                time=now if start is None else start,
                worker=self.worker,
                step=step,
                name=name,
                duration=None if start is None else now - start,
                why=why,
                values={name: writable(value) for name, value in (values or {}).items()},
            ),
            may_wait=kind in _FREQUENT_KINDS,
        )

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


def merge(run: Path) -> Path:
    """Join the workers' logs into one, and remove them once it is complete."""
    logs = sorted((run / WORKERS).glob("*.jsonl"))
    if merged_log(run).exists() or not logs:
        _remove(logs)  # left by a merge that was interrupted before removing them
        return merged_log(run)
    partial = merged_log(run).with_suffix(".partial")
    with EventLog(partial) as log:
        for event in by_time(logs):
            log.append(event)
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

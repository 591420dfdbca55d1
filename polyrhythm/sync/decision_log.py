"""The decision log: all events and commands of a scheduler, so that it can be replayed.

The first line is the setup of the scheduler; each further line is an event with the commands that
it led to, as on the wire, but in JSON. A scheduler has no clock and no randomness of its own, so
the same events give the same commands on any machine: `replay` checks that they do.

The size is bounded. The file itself ends after `MAX_BYTES`: it starts with the scheduler, so it can
be replayed. Later decisions go to `scheduler.recent.jsonl`, whose older half is renamed to
`scheduler.older.jsonl` and replaced in time: they show how a long run ended, for `DecisionReader`.
"""

import contextlib
import math
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from polyrhythm import __version__
from polyrhythm.errors import EventError
from polyrhythm.sync.protocol import Command, Event
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Bytes, Seconds

SCHEMA = 4  # 1 had other names of messages and limits, 2 weights in Assign, 3 no is_late in Abort
LOG_NAME, _LATER = "scheduler.jsonl", "scheduler-{}.jsonl"
MAX_BYTES: Bytes = 64 << 20  # of the file, and of all later ones together
MAX_QUEUED = 50_000  # decisions that the disk may be behind
CLOSE_TIMEOUT: Seconds = 2.0  # for the last decisions to be written
# JSON cannot write infinities; no policy option is a string like "inf".
_TO_TEXT = {value: str(value) for value in (math.inf, -math.inf)}
_FROM_TEXT = {text: value for value, text in _TO_TEXT.items()}


class _LogHeader(msgspec.Struct, frozen=True):
    schema: int
    polyrhythm: str
    setup: Any = None
    num_before: int = 0  # decisions in earlier files


class LoggedDecision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event and the commands that the scheduler returned."""

    event: Event
    commands: Sequence[Command]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line where a replay decides differently."""

    line: int
    event: Event
    logged: list[Command]
    replayed: list[Command]

    def __str__(self) -> str:
        return f"line {self.line}: {self.event}\n  logged:   {self.logged}\n  " + (
            f"replayed: {self.replayed}"
        )


def decision_log_path(run: Path, number: int) -> Path:
    """Path of the log of a run's scheduler, from number 1; each switch starts another one."""
    return run / (LOG_NAME if number == 1 else _LATER.format(number))


def decision_log_paths(run: Path) -> list[Path]:
    """Paths of all decision logs of a run, in order."""
    found: list[Path] = []
    while (path := decision_log_path(run, len(found) + 1)).exists():
        found.append(path)
    return found


def later_paths(path: Path) -> list[Path]:
    """Paths of the newest decisions of a log that has reached its size, in order."""
    return [path.with_suffix(f".{name}{path.suffix}") for name in ("older", "recent")]


class DecisionLog:
    """Appends decisions to a file in batches; a write error ends the log, not the job."""

    def __init__(
        self,
        path: Path,
        setup: Setup,
        *,
        in_background: bool = False,
        max_bytes: Bytes = MAX_BYTES,
    ) -> None:
        """`in_background`: a thread writes, so that no decision waits for the disk.

        A disk that cannot keep up then ends the log.
        """
        self.path, self._setup, self._max_bytes = path, setup, max_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        for later in later_paths(path):
            later.unlink(missing_ok=True)
        self._encoder = msgspec.json.Encoder()
        self._new: list[LoggedDecision] = []
        self._num_decisions, self._num_bytes = 0, 0
        self._file: int | None = None
        self._written, self._is_over, self._is_closing = path, False, False
        self._open(path)
        self._changed = threading.Condition()
        self._queued: list[LoggedDecision] = []  # for the thread
        self._thread: threading.Thread | None = None
        if in_background:
            self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
            self._thread.start()

    def add(self, event: Event, commands: Sequence[Command]) -> None:
        if not self._is_over:
            self._new.append(LoggedDecision(event, commands))

    def flush(self) -> None:
        """Write the decisions added since the last flush, or hand them to the thread."""
        if not self._new:
            return
        new, self._new = self._new, []
        if self._thread is None:
            self._write(new)
            return
        with self._changed:
            is_behind = len(self._queued) > MAX_QUEUED
            if not is_behind:
                self._queued += new
                self._changed.notify_all()
        if is_behind and not self._is_over:  # what is queued is still written
            self._end("the disk is slower than the decisions")

    def close(self) -> None:
        self.flush()
        with self._changed:
            self._is_over = self._is_closing = True
            self._changed.notify_all()
        if self._thread is None:
            self._close_file()
        else:
            self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queued or self._is_closing)
                batch, self._queued = self._queued, []
            if not batch:
                break
            self._write(batch)
        self._close_file()

    def _write(self, decisions: list[LoggedDecision]) -> None:
        if self._file is None:  # it has ended
            return
        lines = self._encoder.encode_lines(decisions)
        older, recent = later_paths(self.path)
        max_bytes = self._max_bytes if self._written == self.path else self._max_bytes // 2
        if self._num_bytes + len(lines) > max_bytes:
            self._close_file()
            try:
                if self._written == recent:
                    recent.replace(older)
                self._open(recent)
            except OSError as error:
                self._end(str(error))
        self._write_lines(lines)
        self._num_decisions += len(decisions)

    def _open(self, path: Path) -> None:
        """Continue in a new file, which starts with the setup."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._file, self._written, self._num_bytes = os.open(path, flags, 0o666), path, 0
        setup = _replaced(msgspec.to_builtins(self._setup), _TO_TEXT)
        header = _LogHeader(SCHEMA, __version__, setup, self._num_decisions)
        self._write_lines(self._encoder.encode(header) + b"\n")

    def _write_lines(self, lines: bytes) -> None:
        if self._file is None:  # it has ended
            return
        try:
            written = os.write(self._file, lines)
            problem = None if written == len(lines) else "the last line was only partly written"
        except OSError as error:
            problem = str(error)
        self._num_bytes += len(lines)
        if problem:  # a partly written line must stay the last one
            self._close_file()
            self._end(problem)

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _end(self, problem: str) -> None:
        self._is_over = True
        with contextlib.suppress(UserWarning):  # the job goes on even if warnings are errors
            warnings.warn(f"decision log {self.path} ends here: {problem}", stacklevel=3)


class DecisionReader:
    """Reads one log; ignores a last line without newline."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_before = 0  # decisions in earlier files, some of which may be gone
        self.setup = self._setup()

    def decisions(self) -> Iterator[tuple[int, LoggedDecision]]:
        """Yield line numbers and decisions, in order."""
        decode = msgspec.json.Decoder(LoggedDecision).decode
        for number, line in self._lines():
            if number > 1:
                try:
                    yield number, decode(line)
                except msgspec.MsgspecError as error:
                    raise EventError(
                        f"{self.path}:{number}: {error}",
                        expected="an event and its commands as JSON",
                        fix="truncate the file there: the lines before it are valid",
                    ) from None

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):
                        yield number, line
        except OSError as error:
            raise EventError(
                f"{self.path}: {error.strerror}",
                expected="a decision log",
                fix=f"pass the file {LOG_NAME} that a coordinator has written",
            ) from None

    def _setup(self) -> Setup:
        _, line = next(self._lines(), (1, b""))
        try:
            first = msgspec.json.decode(line, type=_LogHeader)
            if first.schema == SCHEMA:
                self.num_before = first.num_before
                return msgspec.convert(_replaced(first.setup, _FROM_TEXT), Setup)
            problem = f"schema {first.schema}, by polyrhythm {first.polyrhythm}"
        except msgspec.MsgspecError as error:
            problem = str(error)
        raise EventError(
            f"{self.path}: {problem}",
            expected=f"a decision log of schema {SCHEMA}, which begins with the scheduler's setup",
            fix="read it with the version of polyrhythm that wrote it",
        )


def replay(path: Path) -> Difference | None:
    """Replay a log from its start; return the first difference, or None."""
    log = DecisionReader(path)
    if log.num_before:
        raise EventError(
            f"{path} starts after {log.num_before:,} decisions",
            expected="a log from the start of the scheduler, whose state depends on all decisions",
            fix=f"replay {LOG_NAME}: the first decisions of the run",
        )
    scheduler = log.setup.scheduler()
    for line, decision in log.decisions():
        logged, replayed = list(decision.commands), scheduler.step(decision.event)
        if logged != replayed:
            return Difference(line, decision.event, logged, replayed)
    return None


def _replaced(value: Any, replacements: Mapping[Any, Any]) -> Any:
    """Replace equal values inside dictionaries and lists."""
    if isinstance(value, dict):
        return {key: _replaced(inner, replacements) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner, replacements) for inner in value]
    return replacements.get(value, value)

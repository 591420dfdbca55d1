"""The decision log: all events and commands of a scheduler, so that it can be replayed.

The first line is the setup of the scheduler; each further line is an event with the commands that
it led to, as on the wire, but in JSON. A scheduler has no clock and no randomness of its own, so
the same events give the same commands on any machine: `replay` checks that they do.
"""

import contextlib
import math
import os
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

SCHEMA = 3  # 1 had other names of messages and limits, 2 had weights in Assign
LOG_NAME, _LATER = "scheduler.jsonl", "scheduler-{}.jsonl"
# JSON cannot write infinities; no policy option is a string like "inf".
_TO_TEXT = {value: str(value) for value in (math.inf, -math.inf)}
_FROM_TEXT = {text: value for value, text in _TO_TEXT.items()}


class _LogHeader(msgspec.Struct, frozen=True):
    schema: int
    polyrhythm: str
    setup: Any = None


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


class DecisionLog:
    """Appends decisions to a file in batches; a write error ends the log, not the job."""

    def __init__(self, path: Path, setup: Setup) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._encoder = msgspec.json.Encoder()
        self._new: list[LoggedDecision] = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._file: int | None = os.open(path, flags, 0o666)
        first = _LogHeader(SCHEMA, __version__, _replaced(msgspec.to_builtins(setup), _TO_TEXT))
        self._write(self._encoder.encode(first) + b"\n")

    def add(self, event: Event, commands: Sequence[Command]) -> None:
        if self._file is not None:
            self._new.append(LoggedDecision(event, commands))

    def flush(self) -> None:
        """Write the decisions added since the last flush."""
        if self._new:
            self._write(self._encoder.encode_lines(self._new))
            self._new.clear()

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, lines: bytes) -> None:
        if self._file is None:
            return
        try:
            written = os.write(self._file, lines)
            problem = None if written == len(lines) else "the last line was only partly written"
        except OSError as error:
            problem = str(error)
        if problem:  # a partly written line must stay the last one
            os.close(self._file)
            self._file = None
            with contextlib.suppress(UserWarning):  # the job goes on even if warnings are errors
                warnings.warn(f"decision log {self.path} ends here: {problem}", stacklevel=3)


class DecisionReader:
    """Reads one log; ignores a last line without newline."""

    def __init__(self, path: Path) -> None:
        self.path = path
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

"""Reading decision logs: replaying them, and rebuilding the state where one stops.

A log is read by its newest file, and then has the segments of its archives, too. Commands of an
archive are made again, from the snapshot at the start of each segment.
"""

import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polyrhythm.errors import EventError, UserError
from polyrhythm.sync import epochs
from polyrhythm.sync.decision_log import LOG_NAME, LogEnd
from polyrhythm.sync.epochs import EpochsSetup
from polyrhythm.sync.log_segments import (
    KINDS,
    MALFORMED,
    SCHEMA,
    Comparison,
    LogFiles,
    LoggedDecision,
    LogHeader,
    Machine,
    bad_archive,
    members,
    unpack,
)
from polyrhythm.sync.setup import Setup
from polyrhythm.sync.snapshot import restore, take_snapshot

# Commands; in an archive a checksum of them, or nothing.
_Logged = list[Any] | int | None


class LogSegment(NamedTuple):
    """A segment of a log that is read."""

    path: Path
    header: LogHeader
    lines: list[bytes]  # complete ones, without the header
    is_torn: bool = False  # a line is incomplete

    @property
    def is_archived(self) -> bool:
        return self.path.suffix == ".gz"

    def setup(self) -> Any:
        """Return the machine's setup; raise EventError if it is not valid."""
        try:
            return self.header.decoded_setup()
        except (msgspec.MsgspecError, UserError) as error:
            raise _no_log(self.path, str(error).partition("\n")[0]) from None

    def machine(self) -> Machine:
        """Make a machine in the state at the start of the segment."""
        machine = self.header.kind.make(self.setup())
        if self.header.state is None:
            return machine
        try:
            return restore(self.header.state, machine)
        except EventError as error:
            raise error.at(str(self.path)) from None

    def decisions(self) -> Iterator[tuple[str, Any, _Logged]]:
        """Yield where each decision is, its event, and its commands or their checksum."""
        kind, number = self.header.kind, 1
        place = f"segment {self.header.number}, line" if self.is_archived else "line"
        rows: Iterable[tuple[Any, _Logged]] = unpack(kind, self.lines)
        if not self.is_archived:
            rows = map(msgspec.json.Decoder(kind.decision).decode, self.lines)
        try:
            for number, (event, logged) in enumerate(rows, 2):
                yield f"{place} {number}", event, logged
        except MALFORMED as error:
            raise EventError(
                f"{self.path}: {place} {number + 1}: {error}",
                expected="an event and its commands as JSON",
                fix="restore the file from a copy; if it is not archived, truncate it there: "
                "the lines before it are valid",
            ) from None

    def replayed(
        self, machine: Machine
    ) -> Iterator[tuple[str, LoggedDecision, "Difference | None"]]:
        """Make all decisions again; yield where each is, and its difference to the log."""
        comparison = Comparison()
        for place, event, logged in self.decisions():
            commands, difference = machine.step(event), None
            if not comparison.agrees(logged, commands):
                difference = Difference(self.path, place, event, logged, commands)
            yield place, LoggedDecision(event, commands), difference


class DecisionReader:
    """Reads the segments of a log that are kept; ignores an incomplete last line."""

    def __init__(self, path: Path) -> None:
        """`path`: the newest file, for the whole log; or another one, for its segments alone."""
        self.path = path
        self.num_before = 0  # decisions that are not kept any more; known once they are read
        # The newest is read first: meanwhile its coordinator may rotate the log.
        self._newest = [] if path.suffix == ".gz" else _read_newest(path)
        self.last = self._newest[-1] if self._newest else deque(self.segments(), maxlen=1).pop()
        self.setup: Any = self.last.setup()

    def segments(self) -> Iterator[LogSegment]:
        """Yield the segments in order; raise EventError if one is missing or of another log."""
        last: LogSegment | None = None
        for segment in self._found():
            if last is None:
                self.num_before = segment.header.num_before
            else:
                _check_successor(segment, last)
            last = segment
            yield segment

    def decisions(self) -> Iterator[tuple[str, LoggedDecision]]:
        """Yield where each decision is, and the decision; archived ones are made again."""
        for segment in self.segments():
            if segment.is_archived:
                for place, decision, difference in segment.replayed(segment.machine()):
                    if difference is not None:
                        raise _other_decisions(difference)
                    yield place, decision
            else:
                for place, event, logged in segment.decisions():
                    assert isinstance(logged, list), "only archives have checksums"
                    yield place, LoggedDecision(event, logged)

    def _found(self) -> Iterator[LogSegment]:
        """Yield the segments of all files."""
        if self.path.suffix == ".gz":
            yield from _archived(self.path)
            return
        files = LogFiles.of(self.path)
        first = self._newest[0].header.number if self._newest else math.inf
        for archive in (files.older, files.recent):
            if archive.exists():
                # A segment that is archived in part is the rotated one, too.
                may_be_torn = archive == files.recent and files.rotated.exists()
                for segment in _archived(archive, may_be_torn=may_be_torn):
                    if segment.header.number < first:
                        yield segment
        yield from self._newest


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a replay decides differently."""

    path: Path
    place: str
    event: Any  # None: the next state differs from the logged one
    logged: _Logged = None
    replayed: Sequence[Any] = ()

    def __str__(self) -> str:
        if self.event is None:
            return f"{self.place}: its state is not that after the decisions before"
        logged: Any = self.logged
        if not isinstance(logged, list):
            logged = "other commands, here or after an event since the last checksum"
        return f"{self.place}: {self.event}\n  logged:   {logged}\n  replayed: {self.replayed}"


def replay(path: Path) -> Difference | None:
    """Replay the kept segments of a log, each from its snapshot; return the first difference."""
    return replay_and_count(path)[1]


def replay_and_count(path: Path) -> tuple[int, Difference | None]:
    """Replay as `replay` does; return also the number of decisions."""
    machine: Machine | None = None
    num_decisions = 0
    for segment in DecisionReader(path).segments():
        if machine is not None and take_snapshot(machine) != segment.header.state:
            place = f"segment {segment.header.number}"
            return num_decisions, Difference(segment.path, place, None)
        machine = segment.machine()
        if difference := _first_difference(segment, machine):
            return num_decisions, difference
        num_decisions += len(segment.lines)
    return num_decisions, None


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a successor of a coordinator needs from its log."""

    setup: Any
    machine: Any
    end: LogEnd


def rebuild(path: Path, *, job: str = "", setup: Setup | EpochsSetup | None = None) -> Rebuilt:
    """Rebuild the state after the last complete line of a log; warn of an incomplete one.

    Raises EventError if the log is not that of the job, or of the setup, or not valid.
    """
    segment = DecisionReader(path).last
    header, found = segment.header, segment.setup()
    if job and header.job != job:
        raise EventError(
            f"{path} is the log of another job: {header.job or 'a simulation'}",
            expected=f"that of the job {job}",
            fix="pass the folder of this job, or start without a log",
        )
    if setup is not None and setup != found:
        raise EventError(
            f"{path} has another setup: {found}",
            expected=f"{setup}",
            fix="continue a job with the setup that it had, or start without a log",
        )
    if segment.is_torn:
        warnings.warn(f"{path}: the last line is incomplete, and is dropped", stacklevel=2)
    machine = segment.machine()
    if difference := _first_difference(segment, machine):
        raise _other_decisions(difference)
    num_decisions = header.num_before + len(segment.lines)
    return Rebuilt(found, machine, LogEnd(header.job, header.number, num_decisions))


def membership_changes(path: Path) -> list[tuple[str, Any]]:
    """Read a membership log: the names of events and commands, and these, in order.

    Without votes, commits and waits.
    """
    changes, has_started = list[Any](), False
    for _, decision in DecisionReader(path).decisions():
        event, commands = decision.event, decision.commands
        # The exit of a process that has finished, or is lost already, is no news.
        is_news = bool(commands) or not has_started or not isinstance(event, epochs.Lost)
        changes += [event] if is_news and isinstance(event, _CHANGES) else []
        changes += [command for command in commands if isinstance(command, _CHANGES)]
        has_started = has_started or any(isinstance(each, epochs.Begin) for each in commands)
    return [(type(change).__name__, change) for change in changes]


_CHANGES = (
    *(epochs.Enroll, epochs.Depart, epochs.Unreachable, epochs.Finish, epochs.Lost),
    *(epochs.Begin, epochs.End, epochs.Fenced),
)


def _first_difference(segment: LogSegment, machine: Machine) -> Difference | None:
    found = (difference for _, _, difference in segment.replayed(machine))
    return next(filter(None, found), None)


def _check_successor(segment: LogSegment, last: LogSegment) -> None:
    header, before = segment.header, last.header
    if (header.log, header.job, header.setup) != (before.log, before.job, before.setup):
        problem = f"segment {header.number} is of another log than segment {before.number}"
    elif header.number != before.number + 1:
        problem = f"segment {header.number} follows segment {before.number}"
    elif header.num_before != before.num_before + len(last.lines):
        num = before.num_before + len(last.lines)
        problem = f"{num:,} decisions before segment {header.number}, not {header.num_before:,}"
    else:
        return
    raise EventError(
        f"{segment.path}: {problem}",
        expected="the files of one log, as its coordinator has left them",
        fix="restore them, or move older ones away: later segments do not need them",
    )


def _other_decisions(difference: Difference) -> EventError:
    return EventError(
        f"{difference.path}: decisions differ from the log\n{difference}",
        expected="the decisions that the log has: equal versions decide equally",
        fix="use the version of polyrhythm that wrote it; if it did, the log was changed",
    )


def _no_log(path: Path, problem: str) -> EventError:
    return EventError(
        f"{path}: {problem}",
        expected=f"a decision log of schema {SCHEMA}, which begins with the setup of its machine",
        fix="read it with the version of polyrhythm that wrote it",
    )


def _read_newest(path: Path) -> list[LogSegment]:
    """Read the segments that are not archived: the rotated one, if there is any, and the newest."""
    files, found = LogFiles.of(path), list[LogSegment]()
    has_others = any(file.exists() for file in files[:-1])
    for file in (path, files.rotated):  # so that a rotation in between is noticed
        try:
            data = file.read_bytes()
        except OSError as error:
            if has_others and isinstance(error, FileNotFoundError):
                continue  # its coordinator has ended between two files
            raise EventError(
                f"{file}: {error.strerror}",
                expected="a decision log",
                fix=f"pass the file {LOG_NAME} that a coordinator has written",
            ) from None
        end = data.rfind(b"\n") + 1
        if has_others and not end:
            continue  # ... or before it had written a header
        found.insert(0, _segment(file, data[:end], is_torn=end < len(data)))
        if not has_others:
            break
    if len(found) > 1 and found[0].header.number >= found[1].header.number:
        del found[0]  # rotated after the newest was read
    return found


def _segment(path: Path, data: bytes, *, is_torn: bool = False) -> LogSegment:
    first, *lines = data.splitlines() or [b""]
    try:
        header = msgspec.json.decode(first, type=LogHeader)
    except msgspec.MsgspecError as error:
        raise _no_log(path, str(error)) from None
    if header.schema != SCHEMA:
        raise _no_log(path, f"schema {header.schema}, by polyrhythm {header.polyrhythm}")
    if header.log not in KINDS:
        raise _no_log(path, f"a log of {header.log!r}")
    return LogSegment(path, header, lines, is_torn)


def _archived(path: Path, *, may_be_torn: bool = False) -> Iterator[LogSegment]:
    """Yield the segments of an archive."""
    try:
        for data, _ in members(path):
            yield _segment(path, data)
    except EOFError as error:
        if not may_be_torn:
            raise bad_archive(path, str(error)) from None

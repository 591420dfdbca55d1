"""The decision log: all events of a state machine, from which any of its states can be rebuilt.

The scheduler of groups and the epochs of a job have one each. They have no clock and no randomness
of their own, so the same events lead to the same commands and the same state on any machine.

A log is a sequence of segments. The first line of a segment is its header: the setup of the machine
and, but for the first segment, a snapshot of its state. Each further line is an event with the
commands that it led to, as on the wire, but in JSON. So each segment can be replayed alone, and a
successor of a coordinator only needs the newest one. That is the file itself; once it is long
enough, it is compressed, with a checksum instead of the commands, and appended to an archive.

Two archives limit the size of a long log: when `NAME.recent.jsonl.gz` has `MAX_BYTES`, it replaces
`NAME.older.jsonl.gz`. A crash loses what was not written yet, and may leave an incomplete line,
which `rebuild` drops; or `NAME.rotated.jsonl`, a segment that is not in the archive yet.
"""

import contextlib
import math
import os
import threading
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from polyrhythm import __version__
from polyrhythm.errors import EventError, UserError
from polyrhythm.sync import epochs, protocol
from polyrhythm.sync.epochs import EpochsSetup, JobEpochs
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.sync.setup import Setup
from polyrhythm.sync.snapshot import Snapshot, restore, take_snapshot
from polyrhythm.types import Bytes, Seconds

SCHEMA = 5  # 4 had no segments, 3 no is_late in Abort, 2 weights in Assign, 1 other names
LOG_NAME, _LATER = "scheduler.jsonl", "scheduler-{}.jsonl"
SEGMENT_BYTES: Bytes = 512 << 10  # before it is compressed; some hundred steps of 16 workers
# A segment is at least that many times as long as its header: a snapshot of 1000 workers has
# 700 KB, and is taken on the thread that decides.
_HEADERS_PER_SEGMENT = 16
MAX_BYTES: Bytes = 64 << 20  # of each archive
MAX_QUEUED = 50_000  # decisions that the disk may be behind
CLOSE_TIMEOUT: Seconds = 2.0  # for the last decisions to be written
_MAX_BATCH = 1000  # decisions that wait for a flush, if no thread writes
# JSON cannot write infinities; no policy option is a string like "inf".
_TO_TEXT = {value: str(value) for value in (math.inf, -math.inf)}
_FROM_TEXT = {text: value for value, text in _TO_TEXT.items()}
_NO_COMMANDS = b"[]"
_READ_BYTES: Bytes = 64 << 10
_Logged = list[Any] | int  # commands, or their checksum
_GZIP = 31  # zlib's wbits for a gzip member, which contains no time: equal logs are equal files


MachineT = TypeVar("MachineT", bound=Scheduler | JobEpochs)


class Machine(Protocol):
    """A state machine that can be logged."""

    def step(self, event: Any, /) -> list[Any]: ...


class LogKind(NamedTuple):
    """The types of a log, whose name is in each header."""

    name: str
    setup: type[Any]
    decision: Any  # of a line: an event, and its commands or their checksum
    make: Callable[[Any], Machine]


class LogHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of a segment."""

    schema: int
    polyrhythm: str
    log: str = ""  # its kind
    job: str = ""  # the public key of its coordinator; empty in simulations
    number: int = 1  # of the segment
    num_before: int = 0  # decisions in earlier segments
    # Seconds from the `now` of an event to the time of day, as at the start of the segment.
    clock_offset: Seconds = 0.0
    setup: Any = None
    state: Snapshot | None = None  # None for the state of a new machine

    @property
    def kind(self) -> LogKind:
        return _KINDS[self.log]

    def decoded_setup(self) -> Any:
        """Return the setup; raises msgspec.MsgspecError, or UserError if it is not valid."""
        return msgspec.convert(_replaced(self.setup, _FROM_TEXT), self.kind.setup)


class LoggedDecision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event and the commands that the machine returned."""

    event: Any
    commands: Sequence[Any]


_KINDS = {
    kind.name: kind
    for kind in (
        LogKind(
            "scheduler",
            Setup,
            tuple[protocol.Event, list[protocol.Command] | int],
            Setup.scheduler,
        ),
        LogKind(
            "membership",
            EpochsSetup,
            tuple[epochs.Event, list[epochs.Command] | int],
            EpochsSetup.epochs,
        ),
    )
}
_KIND_NAMES = {Scheduler: "scheduler", JobEpochs: "membership"}
_encode = msgspec.json.Encoder().encode


class LogFiles(NamedTuple):
    """The files of a log, from the oldest segments to the newest one."""

    older: Path
    recent: Path
    rotated: Path
    newest: Path

    @classmethod
    def of(cls, path: Path) -> "LogFiles":
        return cls(
            path.with_suffix(f".older{path.suffix}.gz"),
            path.with_suffix(f".recent{path.suffix}.gz"),
            path.with_suffix(f".rotated{path.suffix}"),
            path,
        )


@dataclass(frozen=True, slots=True)
class LogEnd:
    """Where the log of a coordinator that has ended stops, for its successor."""

    job: str
    number: int  # of the last segment
    num_decisions: int  # since the first one


def clock() -> Seconds:
    """Return the time of an event, in microseconds: more digits would fill a tenth of the log."""
    return round(time.monotonic(), 6)


def decision_log_path(run: Path, number: int) -> Path:
    """Path of the log of a run's scheduler, from number 1; each switch starts another one."""
    return run / (LOG_NAME if number == 1 else _LATER.format(number))


def decision_log_paths(run: Path) -> list[Path]:
    """Paths of all decision logs of a run, in order."""
    found: list[Path] = []
    while (path := decision_log_path(run, len(found) + 1)).exists():
        found.append(path)
    return found


class DecisionLog(Generic[MachineT]):
    """Appends decisions to a file in batches; a write error ends the log, not the job."""

    def __init__(
        self,
        path: Path,
        setup: Setup | EpochsSetup,
        machine: MachineT,
        *,
        job: str = "",
        after: LogEnd | None = None,
        in_background: bool = False,
        segment_bytes: Bytes = SEGMENT_BYTES,
        max_bytes: Bytes = MAX_BYTES,
    ) -> None:
        """Begin a log, in place of another one at this path, or continue `after` its end.

        `machine` is new, or in the state at that end. With `in_background` a thread writes, so that
        no decision waits for the disk; one that cannot keep up ends the log.
        """
        self.path = path
        self.machine = machine
        self._segment_bytes, self._max_bytes = segment_bytes, max_bytes
        encoded_setup = _replaced(msgspec.to_builtins(setup), _TO_TEXT)
        self._header = LogHeader(
            SCHEMA, __version__, _KIND_NAMES[type(machine)], job, setup=encoded_setup
        )
        self._new: list[LoggedDecision] = []
        self._number, self._num_decisions = 1, 0  # of the segment, and those written so far
        self._num_bytes: Bytes = 0  # of the segment
        self._limit: float = segment_bytes
        self._file: int | None = None
        self._is_over, self._is_closing = False, False
        self._is_rotating = False  # a snapshot is queued
        self._changed = threading.Condition()
        self._queued: list[LoggedDecision | Snapshot] = []  # for the thread
        self._thread: threading.Thread | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        if after is None:
            for file in LogFiles.of(path)[:-1]:
                file.unlink(missing_ok=True)
            self._open(None)
        else:
            self._continue(after)
        if in_background:
            self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
            self._thread.start()

    def add(self, event: Any, commands: Sequence[Any]) -> None:
        """Add the last step of the machine."""
        if self._is_over:
            return
        self._new.append(LoggedDecision(event, commands))
        if self._thread is None and len(self._new) >= _MAX_BATCH:
            self.flush()

    def flush(self) -> None:
        """Write the decisions added since the last flush, or hand them to the thread.

        The machine must be in the state after the last of them.
        """
        new: list[LoggedDecision | Snapshot] = [*self._take_new()]
        if self._num_bytes >= self._limit and not self._is_rotating and not self._is_over:
            self._is_rotating = True
            new.append(take_snapshot(self.machine))
        if new:
            self._hand_over(new)

    def close(self) -> None:
        """Write what was added; the machine may be in any state."""
        if new := self._take_new():
            self._hand_over(new)
        with self._changed:
            self._is_over = self._is_closing = True
            self._changed.notify_all()
        if self._thread is None:
            self._close_file()
        else:
            self._thread.join(CLOSE_TIMEOUT)

    def _take_new(self) -> list[LoggedDecision]:
        new, self._new = self._new, []
        return new

    def _hand_over(self, new: Sequence[LoggedDecision | Snapshot]) -> None:
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

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queued or self._is_closing)
                batch, self._queued = self._queued, []
            if not batch:
                break
            self._write(batch)
        self._close_file()

    def _write(self, batch: Sequence[LoggedDecision | Snapshot]) -> None:
        decisions = [each for each in batch if not isinstance(each, Snapshot)]
        snapshots = [each for each in batch if isinstance(each, Snapshot)]
        if snapshots:  # it belongs after the decisions of its flush, and there is one at a time
            number = batch.index(snapshots[0])
            self._write_lines(decisions[:number])
            self._rotate(snapshots[0])
            decisions = decisions[number:]
        self._write_lines(decisions)

    def _write_lines(self, rows: Sequence[LoggedDecision | LogHeader]) -> None:
        """Append rows to the file, unless the log has ended."""
        if self._file is None or not rows:
            return
        lines = msgspec.json.Encoder().encode_lines(rows)
        try:
            written = os.write(self._file, lines)
            problem = None if written == len(lines) else "the last line was only partly written"
        except OSError as error:
            problem = str(error)
        self._num_bytes += len(lines)
        self._num_decisions += len(rows)
        if problem:  # a partly written line must stay the last one
            self._close_file()
            self._end(problem)

    def _open(self, state: Snapshot | None) -> None:
        """Begin a segment in a new file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._file, self._num_bytes = os.open(self.path, flags, 0o666), 0
        num_before = self._num_decisions
        is_simulated = not self._header.job
        header = msgspec.structs.replace(
            self._header,
            number=self._number,
            num_before=num_before,
            clock_offset=0.0 if is_simulated else round(time.time() - time.monotonic(), 3),
            state=state,
        )
        self._write_lines([header])
        self._num_decisions = num_before
        self._limit = max(self._segment_bytes, _HEADERS_PER_SEGMENT * self._num_bytes)
        if not self.path.is_file():  # a pipe or device cannot be rotated
            self._limit = math.inf

    def _rotate(self, state: Snapshot) -> None:
        """Begin a new segment in that state, and move the last one to the archive."""
        if self._file is None:
            return
        self._close_file()
        try:
            self.path.replace(LogFiles.of(self.path).rotated)
            self._number += 1
            self._open(state)
            self._archive_rotated()
        except OSError as error:
            self._close_file()
            self._end(str(error))
        self._is_rotating = False

    def _continue(self, after: LogEnd) -> None:
        """Begin the segment after those of a coordinator that has ended."""
        files = LogFiles.of(self.path)
        self._header = msgspec.structs.replace(self._header, job=after.job)
        self._number, self._num_decisions = after.number + 1, after.num_decisions
        archived = [(0, 0), *_archived_numbers(files.recent)]
        num_archived, end = archived[-1]
        if files.recent.exists():
            os.truncate(files.recent, end)  # a segment that is there in part is in `rotated`, too
        for file in (files.rotated, self.path):
            header = next(iter(_complete_lines(file)), b"")
            if header and msgspec.json.decode(header, type=LogHeader).number > num_archived:
                file.replace(files.rotated)
                self._archive_rotated()
            else:
                file.unlink(missing_ok=True)
        self._open(take_snapshot(self.machine))

    def _archive_rotated(self) -> None:
        files = LogFiles.of(self.path)
        with files.recent.open("ab") as archive:
            archive.write(_packed(_complete_lines(files.rotated)))
            size = archive.tell()
        files.rotated.unlink()
        if size >= self._max_bytes:
            files.recent.replace(files.older)

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _end(self, problem: str) -> None:
        self._is_over = True
        with contextlib.suppress(UserWarning):  # the job goes on even if warnings are errors
            warnings.warn(f"decision log {self.path} ends here: {problem}", stacklevel=3)


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
        decode = msgspec.json.Decoder(self.header.kind.decision).decode
        place = f"segment {self.header.number}, line" if self.is_archived else "line"
        for number, line in enumerate(self.lines, 2):
            try:
                event, commands = decode(line)
            except msgspec.MsgspecError as error:
                raise EventError(
                    f"{self.path}: {place} {number}: {error}",
                    expected="an event and its commands as JSON",
                    fix="restore the file from a copy; if it is not archived, truncate it there: "
                    "the lines before it are valid",
                ) from None
            yield f"{place} {number}", event, commands


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
            machine = segment.machine() if segment.is_archived else None
            for place, event, logged in segment.decisions():
                if machine is None:
                    assert not isinstance(logged, int), "only archives have checksums"
                    yield place, LoggedDecision(event, logged)
                    continue
                commands = machine.step(event)
                if not _agree(logged, commands):
                    difference = Difference(segment.path, place, event, logged, commands)
                    raise _other_decisions(difference)
                yield place, LoggedDecision(event, commands)

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
    logged: _Logged = 0
    replayed: Sequence[Any] = ()

    def __str__(self) -> str:
        if self.event is None:
            return f"{self.place}: its state is not that after the decisions before"
        is_checksum = isinstance(self.logged, int)
        logged = f"others, of checksum {self.logged}" if is_checksum else self.logged
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
    for place, event, logged in segment.decisions():
        replayed = machine.step(event)
        if not _agree(logged, replayed):
            return Difference(segment.path, place, event, logged, replayed)
    return None


def _agree(logged: _Logged, commands: Sequence[Any]) -> bool:
    """Whether a machine has decided what the log has."""
    return (_checksum(_encode(commands)) if isinstance(logged, int) else commands) == logged


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
    if header.log not in _KINDS:
        raise _no_log(path, f"a log of {header.log!r}")
    return LogSegment(path, header, lines, is_torn)


def _archived(path: Path, *, may_be_torn: bool = False) -> Iterator[LogSegment]:
    """Yield the segments of an archive."""
    try:
        for data, _ in _members(path):
            yield _segment(path, data)
    except EOFError as error:
        if not may_be_torn:
            raise _bad_archive(path, str(error)) from None


def _bad_archive(path: Path, problem: str) -> EventError:
    return EventError(
        f"{path}: {problem}",
        expected="an archive of a decision log, as its coordinator has left it",
        fix="restore it from a copy, or move it away: later segments do not need it",
    )


def _archived_numbers(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the number of each complete segment of an archive, and where it ends."""
    if path.exists():
        with contextlib.suppress(EOFError):
            for data, end in _members(path):
                yield _segment(path, data).header.number, end


def _members(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the contents of each gzip member of a file, and where it ends.

    Raises EOFError if the last one is incomplete.
    """
    with path.open("rb") as file:
        rest = file.read(_READ_BYTES)
        while rest:
            decompressor, contents = zlib.decompressobj(_GZIP), []
            while not decompressor.eof:
                if not rest:
                    raise EOFError("its last segment is incomplete")
                try:
                    contents.append(decompressor.decompress(rest))
                except zlib.error as error:
                    raise _bad_archive(path, str(error)) from None
                rest = decompressor.unused_data or file.read(_READ_BYTES)
            yield b"".join(contents), file.tell() - len(rest)


def _complete_lines(path: Path) -> list[bytes]:
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1].splitlines()


def _packed(lines: Sequence[bytes]) -> bytes:
    """Compress a segment, with checksums instead of commands."""
    packed, decode = [lines[0]], msgspec.json.Decoder(tuple[msgspec.Raw, msgspec.Raw]).decode
    for line in lines[1:]:
        event, commands = decode(line)
        is_empty = len(commands) == len(_NO_COMMANDS)
        packed.append(line if is_empty else b"[%b,%d]" % (event, _checksum(commands)))
    compressor = zlib.compressobj(wbits=_GZIP)
    return compressor.compress(b"\n".join([*packed, b""])) + compressor.flush()


def _checksum(commands: bytes) -> int:
    """Return 16 bits: a longer checksum would take more space than the events."""
    return zlib.crc32(commands) & 0xFFFF


def _replaced(value: Any, replacements: Mapping[Any, Any]) -> Any:
    """Replace equal values inside dictionaries and lists."""
    if isinstance(value, dict):
        return {key: _replaced(inner, replacements) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner, replacements) for inner in value]
    return replacements.get(value, value)

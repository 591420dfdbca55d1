"""The decision log: all events of a state machine, from which any of its states can be rebuilt.

The scheduler of groups and the epochs of a job have one each. They have no clock and no randomness
of their own, so the same events lead to the same commands and the same state on any machine.

A log is a sequence of segments (`log_segments.py`), each of which begins with the state. So a
successor of a coordinator only needs the newest one: the file itself. Once it is long enough it is
compressed, and appended to an archive. Two archives limit the size of a long log: when
`NAME.recent.jsonl.gz` has `MAX_BYTES`, it replaces `NAME.older.jsonl.gz`.

A crash loses what was not written yet, and may leave an incomplete line, which `rebuild` drops
(`log_reader.py`); or `NAME.rotated.jsonl`, a segment that is not in the archive yet.
"""

import contextlib
import math
import os
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from polyrhythm import __version__
from polyrhythm.sync.epochs import EpochsSetup, JobEpochs
from polyrhythm.sync.log_segments import (
    MALFORMED,
    LogFiles,
    LoggedDecision,
    LogHeader,
    SegmentPacker,
    archived_numbers,
    bad_archive,
    complete_lines,
    first_header,
    pack,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.sync.setup import Setup
from polyrhythm.sync.snapshot import Snapshot, take_snapshot
from polyrhythm.types import Bytes, Seconds

LOG_NAME, _LATER = "scheduler.jsonl", "scheduler-{}.jsonl"
SEGMENT_BYTES: Bytes = 256 << 10  # before it is compressed; a hundred steps of 16 workers
# A segment is at least that many times as long as its header: a snapshot of 1000 workers has
# 700 KB, and is taken on the thread that decides.
_HEADERS_PER_SEGMENT = 16
MAX_BYTES: Bytes = 64 << 20  # of each archive
MAX_QUEUED = 50_000  # decisions that the disk may be behind
CLOSE_TIMEOUT: Seconds = 2.0  # for the last decisions to be written
_MAX_BATCH = 1000  # decisions that wait for a flush, if no thread writes

_encoder = msgspec.json.Encoder()
MachineT = TypeVar("MachineT", bound=Scheduler | JobEpochs)


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
        self._header = first_header(setup, __version__, job)
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
            self._write_decisions(decisions[:number])
            self._rotate(snapshots[0])
            decisions = decisions[number:]
        self._write_decisions(decisions)

    def _write_decisions(self, decisions: Sequence[LoggedDecision]) -> None:
        if self._file is None or not decisions:
            return
        self._num_decisions += len(decisions)
        self._write_bytes(_encoder.encode_lines(decisions))
        for decision in decisions:
            self._packer.add(decision.event, _encoder.encode(decision.commands))

    def _write_bytes(self, lines: bytes) -> None:
        """Append lines to the file, unless the log has ended."""
        if self._file is None:
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

    def _open(self, state: Snapshot | None) -> None:
        """Begin a segment in a new file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._file, self._num_bytes = os.open(self.path, flags, 0o666), 0
        is_simulated = not self._header.job
        header = msgspec.structs.replace(
            self._header,
            number=self._number,
            num_before=self._num_decisions,
            clock_offset=0.0 if is_simulated else round(time.time() - time.monotonic(), 3),
            state=state,
        )
        line = _encoder.encode(header) + b"\n"
        self._packer = SegmentPacker(line)
        self._write_bytes(line)
        self._limit = max(self._segment_bytes, _HEADERS_PER_SEGMENT * len(line))
        if not self.path.is_file():  # a pipe or device cannot be rotated
            self._limit = math.inf

    def _rotate(self, state: Snapshot) -> None:
        """Begin a new segment in that state, and move the last one to the archive."""
        if self._file is None:
            return
        self._close_file()
        packed = self._packer.finish()
        try:
            self.path.replace(LogFiles.of(self.path).rotated)
            self._number += 1
            self._open(state)
            self._archive(packed)
        except OSError as error:
            self._close_file()
            self._end(str(error))
        self._is_rotating = False

    def _continue(self, after: LogEnd) -> None:
        """Begin the segment after those of a coordinator that has ended."""
        files = LogFiles.of(self.path)
        self._header = msgspec.structs.replace(self._header, job=after.job)
        self._number, self._num_decisions = after.number + 1, after.num_decisions
        archived = [(0, 0), *archived_numbers(files.recent)]
        num_archived, end = archived[-1]
        if files.recent.exists():
            os.truncate(files.recent, end)  # a segment that is there in part is in `rotated`, too
        for file in (files.rotated, self.path):
            header = next(iter(complete_lines(file)), b"")
            if header and msgspec.json.decode(header, type=LogHeader).number > num_archived:
                file.replace(files.rotated)
                try:
                    packed = pack(complete_lines(files.rotated))
                except MALFORMED as error:  # it has been damaged since
                    raise bad_archive(files.rotated, str(error)) from None
                self._archive(packed)
            else:
                file.unlink(missing_ok=True)
        self._open(take_snapshot(self.machine))

    def _archive(self, packed: bytes) -> None:
        """Append the rotated segment to the archive."""
        files = LogFiles.of(self.path)
        with files.recent.open("ab") as archive:
            archive.write(packed)
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

"""The files of a decision log: segments of JSON lines, and archives of compressed ones.

The first line of a segment is its header: the setup of the state machine and, but for the first
segment, a snapshot of its state. Each further line is an event with the commands that it led to, as
on the wire, but in JSON. So each segment can be replayed alone.

An archive is a sequence of gzip members, a segment each. There an event has microseconds since the
one before instead of a time, if that loses nothing; and only one in `_CHECKSUM_EVERY` has a
checksum, of all commands since the last one. That is half as long as gzip alone would make it.
"""

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

import msgspec

from polyrhythm.errors import EventError
from polyrhythm.sync import epochs, protocol
from polyrhythm.sync.epochs import EpochsSetup
from polyrhythm.sync.setup import Setup
from polyrhythm.sync.snapshot import Snapshot
from polyrhythm.types import Bytes, Seconds

SCHEMA = 5  # 4 had no segments, 3 no is_late in Abort, 2 weights in Assign, 1 other names
MALFORMED = (msgspec.MsgspecError, LookupError, TypeError, ValueError)  # errors of `unpack`
_CHECKSUM_EVERY = 16  # decisions; and the last one of a segment
_MAX_ROWS = 500  # compressed at once
_READ_BYTES: Bytes = 64 << 10
_GZIP = 31  # zlib's wbits for a gzip member, which contains no time: equal logs are equal files
# JSON cannot write infinities; no policy option is a string like "inf".
_TO_TEXT = {value: str(value) for value in (math.inf, -math.inf)}
_FROM_TEXT = {text: value for value, text in _TO_TEXT.items()}
_encoder = msgspec.json.Encoder()


class Machine(Protocol):
    """A state machine that can be logged."""

    def step(self, event: Any, /) -> list[Any]: ...


class LogKind(NamedTuple):
    """The types of a log, whose name is in each header."""

    name: str
    setup: type[Any]
    event: Any
    decision: Any  # an event and its commands
    make: Callable[[Any], Machine]

    @property
    def places_of_now(self) -> dict[str, int]:
        """Index of the time in the array of each kind of event."""
        return {
            kind.__name__: 1 + kind.__struct_fields__.index("now") for kind in get_args(self.event)
        }


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
        return KINDS[self.log]

    def decoded_setup(self) -> Any:
        """Return the setup; raises msgspec.MsgspecError, or UserError if it is not valid."""
        return msgspec.convert(_replaced(self.setup, _FROM_TEXT), self.kind.setup)


class LoggedDecision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event and the commands that the machine returned."""

    event: Any
    commands: Sequence[Any]


KINDS = {
    "scheduler": LogKind(
        "scheduler",
        Setup,
        protocol.Event,
        tuple[protocol.Event, list[protocol.Command]],
        Setup.scheduler,
    ),
    "membership": LogKind(
        "membership",
        EpochsSetup,
        epochs.Event,
        tuple[epochs.Event, list[epochs.Command]],
        EpochsSetup.epochs,
    ),
}


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


def first_header(setup: Setup | EpochsSetup, version: str, job: str) -> LogHeader:
    """Return the header of the first segment."""
    (name,) = [kind.name for kind in KINDS.values() if isinstance(setup, kind.setup)]
    as_json = _replaced(msgspec.to_builtins(setup), _TO_TEXT)
    return LogHeader(SCHEMA, version, name, job, setup=as_json)


def complete_lines(path: Path) -> list[bytes]:
    """Read the complete lines of a file; none if it does not exist."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1].splitlines()


class SegmentPacker:
    """Compresses a segment while it is written: all at once would delay decisions."""

    def __init__(self, header: bytes) -> None:
        self._compressor = zlib.compressobj(wbits=_GZIP)
        self._packed = [self._compressor.compress(header)]
        self._rows: list[tuple[Any, ...]] = []  # not compressed yet
        self._event: Any = None  # the last one, whose checksum may follow
        self._checksum = self._num_events = self._now = 0

    def add(self, event: Any, commands: bytes) -> None:
        """Add an event, and its commands as JSON."""
        if self._event is not None:
            self._add_row(has_checksum=self._num_events % _CHECKSUM_EVERY == 0)
        now = round(1e6 * event.now)
        if now / 1e6 == event.now:
            event = msgspec.structs.replace(event, now=now - self._now)
            self._now = now
        self._event, self._checksum = event, zlib.crc32(commands, self._checksum)
        self._num_events += 1

    def finish(self) -> bytes:
        """Return the compressed segment."""
        if self._event is not None:
            self._add_row(has_checksum=True)
        self._compress()
        return b"".join([*self._packed, self._compressor.flush()])

    def _add_row(self, *, has_checksum: bool) -> None:
        if has_checksum:
            self._rows.append((self._event, self._checksum))
            self._checksum = 0
        else:
            self._rows.append((self._event,))
        if len(self._rows) == _MAX_ROWS:
            self._compress()

    def _compress(self) -> None:
        self._packed.append(self._compressor.compress(_encoder.encode_lines(self._rows)))
        self._rows.clear()


def pack(lines: Sequence[bytes]) -> bytes:
    """Compress the lines of a segment; raises one of MALFORMED."""
    header = msgspec.json.decode(lines[0], type=LogHeader)
    packer = SegmentPacker(lines[0] + b"\n")
    decode = msgspec.json.Decoder(tuple[msgspec.Raw, msgspec.Raw]).decode
    decode_event = msgspec.json.Decoder(header.kind.event).decode
    for line in lines[1:]:
        event, commands = decode(line)
        packer.add(decode_event(event), commands)
    return packer.finish()


def unpack(kind: LogKind, lines: Sequence[bytes]) -> Iterator[tuple[Any, int | None]]:
    """Yield the events of a compressed segment, and their checksums; without the header.

    Raises one of MALFORMED for what `pack` has not written.
    """
    decode, places, last = msgspec.json.Decoder(list[Any]).decode, kind.places_of_now, 0
    decode_event = msgspec.json.Decoder(kind.event).decode  # msgspec.convert takes 30 times as long
    for line in lines:
        event, *checksums = decode(line)
        place = places[event[0]]
        if isinstance(event[place], int):
            last += event[place]
            event[place] = last / 1e6
        yield decode_event(_encoder.encode(event)), checksums[0] if checksums else None


class Comparison:
    """Compares decisions with those of a log, in their order."""

    def __init__(self) -> None:
        self._checksum = 0

    def agrees(self, logged: list[Any] | int | None, commands: Sequence[Any]) -> bool:
        """Whether the commands are those of the log; or all since the last checksum, at one."""
        if isinstance(logged, list):
            return logged == commands
        checksum = zlib.crc32(_encoder.encode(commands), self._checksum)
        self._checksum = checksum if logged is None else 0
        return logged is None or logged == checksum


def archived_numbers(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the number of each complete segment of an archive, and where it ends."""
    if path.exists():
        with contextlib.suppress(EOFError):
            for data, end in members(path):
                yield msgspec.json.decode(data.partition(b"\n")[0], type=LogHeader).number, end


def members(path: Path) -> Iterator[tuple[bytes, int]]:
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
                    raise bad_archive(path, str(error)) from None
                rest = decompressor.unused_data or file.read(_READ_BYTES)
            yield b"".join(contents), file.tell() - len(rest)


def bad_archive(path: Path, problem: str) -> EventError:
    return EventError(
        f"{path}: {problem}",
        expected="an archive of a decision log, as its coordinator has left it",
        fix="restore it from a copy, or move it away: later segments do not need it",
    )


def _replaced(value: Any, replacements: Mapping[Any, Any]) -> Any:
    """Replace equal values inside dictionaries and lists."""
    if isinstance(value, dict):
        return {key: _replaced(inner, replacements) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner, replacements) for inner in value]
    return replacements.get(value, value)

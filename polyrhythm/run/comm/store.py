"""JobStore: the one way in which the processes of a job agree on small values.

Every call names its members, in one epoch of the job: a process that has left is not waited for,
and one that joins later starts in a later epoch. The caller gives each agreement a name that it
uses once per epoch. All waits are bounded, and an error of one member reaches the others.

Values are encoded with msgspec and never unpickled: plain data as it is (tuples stay tuples), and
records as the type that the caller names.
"""

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, Self, cast

import msgspec
import torch.distributed as dist
from msgspec.msgpack import Ext
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from polyrhythm.errors import LaunchError, PeerError, UserError, peer_errors
from polyrhythm.run.comm.epoch import current_epoch
from polyrhythm.types import Seconds

_logger = logging.getLogger(__name__)

PROCESS_NAME = "the process of rank {}".format  # names a rank in errors
_STORE = "the process that serves the job's store"
MAX_TIMEOUTS = 30  # then the heartbeats of a process stop, as it may wait for ever
WARN_AFTER: Seconds = 10.0  # a waiting process warns; the next time after ten times as long
_POLL: Seconds = 0.002  # initially; doubled up to _LONGEST_POLL
_LONGEST_POLL: Seconds = 0.05
_HEARTBEATS_PER_TIMEOUT = 10
_SCAN_INTERVAL: Seconds = 0.5  # at which each member is looked at, for an error that it published
_ACKS_TIMEOUT: Seconds = 10.0
_COMPRESS_ABOVE = 64 * 1024  # bytes
_MAX_BYTES = 8 * 1024 * 1024  # of a value: torch's store closes the connection above
_JOIN_TIMEOUT: Seconds = 2.0  # for the heartbeat thread, which a dead store may block
_TUPLE = 1  # msgpack's extension code
_COMPRESSED = b"\xc1"  # a byte that msgpack never uses


class StoreBackend(Protocol):
    """What a JobStore needs of a key-value store; c10d's Store has it."""

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: bytes, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...
    def clone(self) -> Self: ...


class Members(NamedTuple):
    """The processes of an agreement, in order, in one epoch of the job; the first is the leader."""

    ranks: tuple[int, ...]
    epoch: int = 0

    @property
    def leader(self) -> int:
        return self.ranks[0]


class _Answer(msgspec.Struct, frozen=True):
    """What a member publishes: an encoded value, or the class `error` and its texts."""

    value: bytes = b""
    error: str = ""  # of a UserError, or PeerError
    wrong: str = ""  # the peer of a PeerError
    expected: str = ""  # the action of a PeerError
    fix: str = ""  # the cause of a PeerError
    waited: Seconds = 0.0  # of a PeerError

    @classmethod
    def of_error(cls, error: Exception, name: str, me: str) -> "_Answer":
        waited = 0.0
        if isinstance(error, PeerError):
            texts, waited = (error.peer, error.action, error.cause), error.waited
        else:
            if not isinstance(error, UserError):
                wrong, fix = f"{name}: {type(error).__name__}: {error}", f"see the output of {me}"
                error = LaunchError(wrong, expected=f"a result from {me}", fix=fix)
            texts = error.wrong, error.expected, error.fix
        wrong, expected, fix = map(_printable, texts)
        return cls(b"", type(error).__name__, wrong, expected, fix, waited)

    def raise_error(self) -> None:
        if self.error == PeerError.__name__:
            raise PeerError(self.wrong, action=self.expected, waited=self.waited, cause=self.fix)
        if self.error:
            kinds = {kind.__name__: kind for kind in _subclasses(UserError)}
            kind = kinds.get(self.error, LaunchError)
            raise kind(self.wrong, expected=self.expected, fix=self.fix)


class JobStore:
    """One process's side of the agreements; for one thread."""

    def __init__(
        self,
        backend: StoreBackend,
        rank: int,
        *,
        timeout: Seconds,
        name_of: Callable[[int], str] = PROCESS_NAME,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`timeout` bounds every wait; `name_of` names a rank in errors.

        `check` is called repeatedly during a wait, and may raise an error to end it.
        """
        self.rank, self.timeout, self.name_of = rank, timeout, name_of
        self._backend, self.check = backend, check
        self.epoch = current_epoch()  # at whose end all waits end

    def broadcast_object(
        self, name: str, value: Any, members: Members, *, as_type: Any = None
    ) -> Any:
        """Return the leader's `value` on every member."""
        if self.rank == members.leader:
            self.publish(name, value, members, as_type=as_type)
            return value
        return self.receive(name, members.leader, members, as_type=as_type)

    def gather_object(self, name: str, value: Any, members: Members) -> list[Any]:
        """Return the values of all members, in their order, on the leader; on others nothing."""
        if self.rank != members.leader:
            self.publish(name, value, members)
            return []
        return [value, *self._receive_all(name, members.ranks[1:], members, None)]

    def all_gather_object(
        self, name: str, value: Any, members: Members, *, as_type: Any = None
    ) -> list[Any]:
        """Return the values of all members, in their order."""
        self.publish(name, value, members, as_type=as_type)
        others = [rank for rank in members.ranks if rank != self.rank]
        values = dict(zip(others, self._receive_all(name, others, members, as_type), strict=True))
        return [value if rank == self.rank else values[rank] for rank in members.ranks]

    def barrier(self, name: str, members: Members) -> None:
        """Wait until every member has called it."""
        self.all_gather_object(name, None, members)

    def set_once(self, name: str, value: Any, members: Members) -> Any:
        """Return the value of the first member that calls this; wait for no other member."""
        with peer_errors(_STORE, f"setting {name}"):
            data = encode(value, None, name)
            return decode(self._backend.compare_set(f"{members.epoch}/{name}", "", data), None)

    def peek(self, name: str, members: Members) -> Any:
        """Return the value of `set_once`, or None if no member has called that yet."""
        key = f"{members.epoch}/{name}"
        with peer_errors(_STORE, f"reading {name}"):
            return decode(self._backend.get(key), None) if self._backend.check([key]) else None

    def next_number(self, name: str, members: Members) -> int:
        """Return 0, then 1 and so on, each to one call of any member; `delete` it afterwards."""
        with peer_errors(_STORE, f"counting {name}"):
            return self._backend.add(self._key(name, members.leader, members), 1) - 1

    def check_consistent(
        self,
        name: str,
        settings: Mapping[str, Any],
        members: Members,
        *,
        fix: str = "use the same arguments, dataset and seed everywhere",
    ) -> None:
        """Reject settings that differ from the leader's; raises LaunchError on all members."""
        own = {key: str(value) for key, value in settings.items()}
        leaders, *others = self.all_gather_object(name, own, members)
        for rank, theirs in zip(members.ranks[1:], others, strict=True):
            for key in theirs | leaders:
                here, there = (texts.get(key, "nothing") for texts in (theirs, leaders))
                if here != there:
                    acks = f"{self._key(name, members.leader, members)}/acks"
                    with contextlib.suppress(RuntimeError):  # the store is lost: all have read it
                        self._backend.add(acks, 1)
                        self._wait_for_acks(acks, len(members.ranks))
                    raise LaunchError(
                        f"{self.name_of(rank)} has {key}={here}, and "
                        f"{self.name_of(members.leader)} has {key}={there}",
                        expected="the same in every process of the job",
                        fix=fix,
                    )

    def run_on_leader(
        self, name: str, function: Callable[[], Any], members: Members, *, as_type: Any = None
    ) -> Any:
        """Call `function` on the leader and return its result on every member.

        It may take minutes: the leader sends heartbeats meanwhile, for up to `MAX_TIMEOUTS`
        timeouts. Raises the UserError of `function` on all members, and PeerError if the leader
        sends no heartbeat for a timeout.
        """
        if self.rank != members.leader:
            return self.receive(name, members.leader, members, as_type=as_type)
        try:
            with self.heartbeats(name, members):
                value = function()
        except Exception as error:
            self.fail(name, error, members)
            raise
        self.publish(name, value, members, as_type=as_type)
        return value

    def publish(self, name: str, value: Any, members: Members, *, as_type: Any = None) -> None:
        """Publish this process's value; its error reaches the members that wait for the value."""
        try:
            self._set(name, _Answer(encode(value, as_type, name)), members)
        except LaunchError as error:
            self.fail(name, error, members)
            raise

    def receive(self, name: str, rank: int, members: Members, *, as_type: Any = None) -> Any:
        """Wait for a member's value; raises its error, or PeerError if it publishes nothing."""
        return self._receive_all(name, [rank], members, as_type)[0]

    def is_published(self, name: str, rank: int, members: Members) -> bool:
        """Whether `receive` would return at once."""
        with peer_errors(_STORE, f"looking for {name}"):
            return self._backend.check([self._key(name, rank, members)])

    def fail(self, name: str, error: Exception, members: Members) -> None:
        """Raise an error on the members that wait for this process's value."""
        num_readers = len(members.ranks) - 1 - isinstance(error, PeerError)  # without the lost one
        with contextlib.suppress(RuntimeError):  # the store is lost: the caller raises `error`
            self._set(name, _Answer.of_error(error, name, self.name_of(self.rank)), members)
            self._wait_for_acks(f"{self._key(name, self.rank, members)}/acks", num_readers)

    def delete(self, name: str, members: Members, *, rank: int | None = None) -> None:
        """Delete a value that nobody will read again, by default this process's."""
        key = self._key(name, self.rank if rank is None else rank, members)
        with peer_errors(_STORE, f"deleting {name}"):
            for suffix in ("", "/heartbeats"):
                self._backend.delete_key(key + suffix)

    def delete_once(self, name: str, members: Members) -> None:
        """Delete the value of `set_once`; a later `set_once` would start over."""
        with peer_errors(_STORE, f"deleting {name}"):
            self._backend.delete_key(f"{members.epoch}/{name}")

    def _key(self, name: str, rank: int, members: Members) -> str:
        return f"{members.epoch}/{name}/{rank}"

    def _set(self, name: str, answer: _Answer, members: Members) -> None:
        with peer_errors(_STORE, f"publishing {name}"):
            self._backend.set(self._key(name, self.rank, members), _pack(answer, name))

    def _receive_all(
        self, name: str, ranks: Sequence[int], members: Members, as_type: Any
    ) -> list[Any]:
        """Wait for values of members; raises the error of one, or PeerError for missing ones."""
        keys = {rank: self._key(name, rank, members) for rank in ranks}
        with peer_errors(_STORE, f"agreeing on {name}"):
            self._wait_for(keys, f"agreeing on {name}")
            answers = [self._read(key) for key in keys.values()]
        return [decode(answer.value, as_type) for answer in answers]

    def _read(self, key: str) -> _Answer:
        """Return the answer under a key; raises its error."""
        answer = _unpack(self._backend.get(key))
        if answer.error:
            self._backend.add(f"{key}/acks", 1)
        answer.raise_error()
        return answer

    def _wait_for_acks(self, acks: str, num_readers: int) -> None:
        """Wait until all have read it, or for 10 s: this process may serve the store, and exit."""
        deadline = time.monotonic() + _ACKS_TIMEOUT
        while time.monotonic() < deadline and self._backend.add(acks, 0) < num_readers:
            time.sleep(_LONGEST_POLL)

    def _wait_for(self, keys: dict[int, str], action: str) -> None:
        """Wait for keys until a timeout after the last heartbeat of an owner."""
        start, pause, warn_after, heartbeats = time.monotonic(), _POLL, WARN_AFTER, dict[int, int]()
        deadline, next_scan, missing = start + self.timeout, start + _SCAN_INTERVAL, dict(keys)
        while not self._backend.check(list(keys.values())):
            self.epoch.check()
            if self.check is not None:
                self.check()
            now = time.monotonic()
            if now > min(next_scan, deadline):
                next_scan = now + _SCAN_INTERVAL
                published = [rank for rank, key in missing.items() if self._backend.check([key])]
                for rank in published:
                    self._read(missing.pop(rank))  # an error ends the wait at once
            if missing and now > deadline - self.timeout / 2:  # few members send heartbeats
                received = {r: self._backend.add(f"{k}/heartbeats", 0) for r, k in missing.items()}
                if any(number > heartbeats.get(rank, 0) for rank, number in received.items()):
                    heartbeats, deadline = received, now + self.timeout
            peers = ", ".join(map(self.name_of, missing))
            if missing and now > deadline:
                cause = "no heartbeat" if any(heartbeats.values()) else "no answer"
                raise PeerError(peers, action=action, waited=now - start, cause=cause)
            if now - start > warn_after:
                me, waited = self.name_of(self.rank), now - start
                _logger.warning("%s has waited %.0f s for %s: %s", me, waited, peers, action)
                warn_after *= 10
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)

    @contextmanager
    def heartbeats(self, name: str, members: Members) -> Iterator[Callable[[], None]]:
        """Send heartbeats from a thread, while this one prepares the value to publish as `name`.

        They end after `MAX_TIMEOUTS` timeouts without a call of the yielded function, which
        reports progress.
        """
        key, is_done = self._key(name, self.rank, members), threading.Event()
        num_left = 0

        def report_progress() -> None:
            nonlocal num_left
            num_left = MAX_TIMEOUTS * _HEARTBEATS_PER_TIMEOUT

        report_progress()
        with peer_errors(_STORE, "sending a heartbeat"):
            self._backend.add(f"{key}/heartbeats", 1)  # now: others may have waited for long

        def send_heartbeats() -> None:
            nonlocal num_left
            store: StoreBackend | None = None
            while num_left > 0:
                num_left -= 1
                if is_done.wait(self.timeout / _HEARTBEATS_PER_TIMEOUT):
                    return
                try:
                    # Two threads must not share a connection. Most functions end before the first.
                    store = store or self._backend.clone()
                    store.add(f"{key}/heartbeats", 1)
                except RuntimeError as error:
                    _logger.warning("%s cannot send heartbeats: %s", self.name_of(self.rank), error)
                    return

        thread = threading.Thread(target=send_heartbeats, name="heartbeats", daemon=True)
        thread.start()
        try:
            yield report_progress
        finally:
            is_done.set()
            thread.join(_JOIN_TIMEOUT)


def job_store_backend(prefix: str, timeout: Seconds) -> StoreBackend:
    """Connect to the store of the job under a prefix; without a job, make one for this process.

    Each thread needs a connection of its own.
    """
    if not dist.is_initialized():
        return prefixed(prefix, dist.HashStore())  # type: ignore[attr-defined]  # no stub
    with peer_errors(_STORE, "connecting to it"):
        store = _get_default_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs
    store.set_timeout(timedelta(seconds=timeout))
    return prefixed(prefix, store)


def prefixed(prefix: str, store: Any) -> StoreBackend:
    """Return the part of a store whose keys start with `prefix`."""
    return cast(StoreBackend, PrefixStore(prefix, store))  # torch's stubs are incomplete


def encode(value: Any, as_type: Any, name: str) -> bytes:
    """Encode plain data, or a record if `as_type` names it; raises LaunchError."""
    try:
        return msgspec.msgpack.encode(_tag_tuples(value) if as_type is None else value)
    except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise LaunchError(
            f"{name}: a value that cannot be sent: {error}",
            expected="None, numbers, text, bytes, and lists, tuples and dicts of them",
            fix="convert it, for example with str() or .item()",
        ) from None


def decode(data: bytes, as_type: Any) -> Any:
    if as_type is None:
        return msgspec.msgpack.decode(data, ext_hook=_untag)
    return msgspec.msgpack.decode(data, type=as_type)


def _pack(answer: _Answer, name: str) -> bytes:
    data = msgspec.msgpack.encode(answer)
    if len(data) > _COMPRESS_ABOVE:
        data = _COMPRESSED + zlib.compress(data, 1)
    if len(data) > _MAX_BYTES:
        raise LaunchError(
            f"{name}: a value of {len(data)} bytes",
            expected=f"at most {_MAX_BYTES} bytes, compressed",
            fix="send large values over a process group",
        )
    return data


def _unpack(data: bytes) -> _Answer:
    if data.startswith(_COMPRESSED):
        data = zlib.decompress(data[len(_COMPRESSED) :])
    return msgspec.msgpack.decode(data, type=_Answer)


def _printable(text: str) -> str:
    """Escape what UTF-8 cannot encode, such as a file name in another encoding."""
    return text.encode(errors="backslashreplace").decode()


def _tag_tuples(value: Any) -> Any:
    """Mark tuples, which msgpack would turn into lists."""
    if type(value) is tuple:
        return Ext(_TUPLE, msgspec.msgpack.encode([_tag_tuples(item) for item in value]))
    if isinstance(value, list):
        return [_tag_tuples(item) for item in value]
    if isinstance(value, dict):
        return {key: _tag_tuples(item) for key, item in value.items()}
    if value is not None and type(value) not in (bool, int, float, str, bytes):
        raise TypeError(f"a {type(value).__name__}")  # it would come back as something else
    return value


def _untag(code: int, data: memoryview) -> Any:
    if code != _TUPLE:
        raise ValueError(f"extension {code}")
    return tuple(msgspec.msgpack.decode(data, ext_hook=_untag))


def _subclasses(base: type[UserError]) -> Iterator[type[UserError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)

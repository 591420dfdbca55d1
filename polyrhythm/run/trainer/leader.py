"""What one process decides for all: they hear its decision, or why there is none.

Rank 0 decides, which may take minutes: the others wait as long as it shows that it is alive, within
reason, and say so. A refusal is raised by all of them alike.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from torch.distributed.distributed_c10d import PrefixStore

from polyrhythm.errors import LaunchError, PeerError, UserError
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.trainer.rank_assignment import JobProcesses
from polyrhythm.types import Seconds

_logger = logging.getLogger(__name__)

_RESULT, _HEARTBEAT, _ACKS = "decision", "alive", "heard"
_POLL_INTERVAL: Seconds = 0.05
_HEARTBEATS_PER_TIMEOUT = 10  # within a deadline: so often rank 0 says that it is alive
_MAX_TIMEOUTS = 30  # after so many it is given up all the same: what it asked for may never come
_WARN_AFTER: Seconds = 10.0  # after that long, whoever waits; then after ten times as long
_JOIN_TIMEOUT: Seconds = 2.0  # until the thread has seen that it is over; a store may never answer
_ERROR_TIMEOUT: Seconds = 10.0  # of who has to refuse, until the others have heard why


class _Result(msgspec.Struct, frozen=True):
    """The decision, or a UserError of a kind."""

    decision: str = ""
    kind: str = ""
    wrong: str = ""
    expected: str = ""
    fix: str = ""


def run_on_leader(processes: JobProcesses, what: str, decide: Callable[[], str]) -> str:
    """What rank 0 decides, on every process; `decide` is called there alone.

    Raises what `decide` refuses with, and PeerError where rank 0 shows no life for a deadline.
    """
    place = processes.place
    assert place.store is not None, "met"
    store = PrefixStore(f"polyrhythm/deciding {what}", place.store)
    if place.rank > 0:
        return _wait_for_result(store, what, processes)
    try:
        with _heartbeats(store, processes.timeout / _HEARTBEATS_PER_TIMEOUT):
            told = _Result(decision=decide())
    except Exception as error:
        _publish_error(store, error, what, place.world_size - 1)
        raise
    store.set(_RESULT, msgspec.json.encode(told).decode())
    return told.decision


@contextmanager
def _heartbeats(store: PrefixStore, every: Seconds) -> Iterator[None]:
    """Say so from a thread: who decides compiles, measures and searches, and has no time for it."""
    heartbeat_store = store.clone()  # type: ignore[attr-defined]  # a connection is not for two threads
    over = threading.Event()

    def send_heartbeats() -> None:
        for _ in range(_MAX_TIMEOUTS * _HEARTBEATS_PER_TIMEOUT):
            if over.wait(every):
                return
            try:
                heartbeat_store.add(_HEARTBEAT, 1)
            except RuntimeError as error:
                _logger.warning("the others cannot hear that rank 0 is alive: %s", error)
                return

    thread = threading.Thread(target=send_heartbeats, name="leader heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_JOIN_TIMEOUT)


def _wait_for_result(store: PrefixStore, what: str, processes: JobProcesses) -> str:
    first, num_heartbeats, deadline = processes.device_names()[0], -1, 0.0
    began, warn_after = time.monotonic(), _WARN_AFTER
    with peer_errors(first, f"deciding {what}"):
        while not store.check([_RESULT]):
            if (num_seen := store.add(_HEARTBEAT, 0)) != num_heartbeats:
                num_heartbeats, deadline = num_seen, time.monotonic() + processes.timeout
            elif time.monotonic() > deadline:
                raise PeerError(
                    first,
                    action=f"deciding {what}",
                    waited=processes.timeout,
                    cause="it shows no sign of life",
                )
            if (waited := time.monotonic() - began) > warn_after:
                _logger.warning("%s has taken %.0f s so far for deciding %s", first, waited, what)
                warn_after *= 10
            time.sleep(_POLL_INTERVAL)
        told = msgspec.json.decode(store.get(_RESULT), type=_Result)
        store.add(_ACKS, 1)
    if told.kind:
        kinds = {kind.__name__: kind for kind in _subclasses(UserError)}
        kind = kinds.get(told.kind, LaunchError)
        raise kind(told.wrong, expected=told.expected, fix=told.fix)
    return told.decision


def _publish_error(store: PrefixStore, error: Exception, what: str, num_others: int) -> None:
    """Until all have heard of it: who fails at once takes the store along."""
    told = _Result(
        kind=LaunchError.__name__,
        wrong=f"{what}: {type(error).__name__}: {error}",
        expected="rank 0 to decide it for all",
        fix="see what rank 0 says",
    )
    if isinstance(error, UserError):
        kind = type(error).__name__
        told = _Result(kind=kind, wrong=error.wrong, expected=error.expected, fix=error.fix)
    store.set(_RESULT, msgspec.json.encode(told).decode())
    deadline = time.monotonic() + _ERROR_TIMEOUT
    while time.monotonic() < deadline and store.add(_ACKS, 0) < num_others:
        time.sleep(_POLL_INTERVAL)


def _subclasses(base: type[UserError]) -> Iterator[type[UserError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)

"""Run a function on rank 0 and return its result, or raise its error, on every process.

The function may take minutes: the other processes wait while rank 0 sends heartbeats, up to 30
timeouts, and log that they wait.
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

_RESULT, _HEARTBEAT, _ACKS = "result", "heartbeats", "acks"
_POLL_INTERVAL: Seconds = 0.05
_HEARTBEATS_PER_TIMEOUT = 10
_MAX_TIMEOUTS = 30  # then heartbeats stop: the function itself may wait for ever
_WARN_AFTER: Seconds = 10.0  # a waiting process warns; the next time after ten times as long
_JOIN_TIMEOUT: Seconds = 2.0  # for the heartbeat thread, which a dead store may block
_ERROR_TIMEOUT: Seconds = 10.0  # for the other processes to read rank 0's error


class _Result(msgspec.Struct, frozen=True):
    """The value that the function returned, or the UserError class `kind` and its texts."""

    value: str = ""
    kind: str = ""
    wrong: str = ""
    expected: str = ""
    fix: str = ""


def run_on_leader(processes: JobProcesses, what: str, function: Callable[[], str]) -> str:
    """Call `function` on rank 0 and return its result on every process.

    Raises the UserError of `function`, and PeerError if rank 0 sends no heartbeat for a timeout.
    """
    ctx = processes.ctx
    assert ctx.store is not None, "hosts() connects to the store"
    store = PrefixStore(f"polyrhythm/leader/{what}", ctx.store)
    if ctx.rank > 0:
        return _wait_for_result(store, what, processes)
    try:
        with _heartbeats(store, processes.timeout / _HEARTBEATS_PER_TIMEOUT):
            result = _Result(value=function())
    except Exception as error:
        _publish_error(store, error, what, ctx.world_size - 1)
        raise
    store.set(_RESULT, msgspec.json.encode(result).decode())
    return result.value


@contextmanager
def _heartbeats(store: PrefixStore, every: Seconds) -> Iterator[None]:
    """Send heartbeats from a thread while the main thread computes."""
    # Two threads must not share a connection.
    heartbeat_store = store.clone()  # type: ignore[attr-defined]
    is_done = threading.Event()

    def send_heartbeats() -> None:
        for _ in range(_MAX_TIMEOUTS * _HEARTBEATS_PER_TIMEOUT):
            if is_done.wait(every):
                return
            try:
                heartbeat_store.add(_HEARTBEAT, 1)
            except RuntimeError as error:
                _logger.warning("rank 0 cannot send heartbeats: %s", error)
                return

    thread = threading.Thread(target=send_heartbeats, name="leader heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join(_JOIN_TIMEOUT)


def _wait_for_result(store: PrefixStore, what: str, processes: JobProcesses) -> str:
    leader, num_heartbeats, deadline = processes.device_names()[0], -1, 0.0
    start, warn_after = time.monotonic(), _WARN_AFTER
    with peer_errors(leader, f"deciding {what}"):
        while not store.check([_RESULT]):
            if (count := store.add(_HEARTBEAT, 0)) != num_heartbeats:
                num_heartbeats, deadline = count, time.monotonic() + processes.timeout
            elif time.monotonic() > deadline:
                raise PeerError(
                    leader,
                    action=f"deciding {what}",
                    waited=processes.timeout,
                    cause="no heartbeat",
                )
            if (waited := time.monotonic() - start) > warn_after:
                _logger.warning("%s has spent %.0f s so far on deciding %s", leader, waited, what)
                warn_after *= 10
            time.sleep(_POLL_INTERVAL)
        result = msgspec.json.decode(store.get(_RESULT), type=_Result)
        store.add(_ACKS, 1)
    if result.kind:
        kinds = {kind.__name__: kind for kind in _subclasses(UserError)}
        kind = kinds.get(result.kind, LaunchError)
        raise kind(result.wrong, expected=result.expected, fix=result.fix)
    return result.value


def _publish_error(store: PrefixStore, error: Exception, what: str, num_others: int) -> None:
    """Publish the error and wait until every rank has read it: this rank may host the store."""
    result = _Result(
        kind=LaunchError.__name__,
        wrong=f"{what}: {type(error).__name__}: {error}",
        expected="a result from rank 0",
        fix="see the output of rank 0",
    )
    if isinstance(error, UserError):
        kind = type(error).__name__
        result = _Result(kind=kind, wrong=error.wrong, expected=error.expected, fix=error.fix)
    store.set(_RESULT, msgspec.json.encode(result).decode())
    deadline = time.monotonic() + _ERROR_TIMEOUT
    while time.monotonic() < deadline and store.add(_ACKS, 0) < num_others:
        time.sleep(_POLL_INTERVAL)


def _subclasses(base: type[UserError]) -> Iterator[type[UserError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)

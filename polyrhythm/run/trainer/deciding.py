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
from polyrhythm.run.peers import waiting_for
from polyrhythm.run.trainer.placing import Processes
from polyrhythm.types import Seconds

_logger = logging.getLogger(__name__)

_DECISION, _ALIVE, _HEARD = "decision", "alive", "heard"
_LOOK: Seconds = 0.05
_BEATS = 10  # within a deadline: so often rank 0 says that it is alive
_DEADLINES = 30  # after so many it is given up all the same: what it asked for may never come
_SAYS_SO: Seconds = 10.0  # after that long, whoever waits; then after ten times as long
_LEAVING: Seconds = 2.0  # until the thread has seen that it is over; a store may never answer
_PATIENCE: Seconds = 10.0  # of who has to refuse, until the others have heard why


class _Told(msgspec.Struct, frozen=True):
    """The decision, or a UserError of a kind."""

    decision: str = ""
    kind: str = ""
    wrong: str = ""
    expected: str = ""
    fix: str = ""


def decided(processes: Processes, what: str, decide: Callable[[], str]) -> str:
    """What rank 0 decides, on every process; `decide` is called there alone.

    Raises what `decide` refuses with, and PeerError where rank 0 shows no life for a deadline.
    """
    place = processes.place
    assert place.store is not None, "met"
    store = PrefixStore(f"polyrhythm/deciding {what}", place.store)
    if place.rank > 0:
        return _heard(store, what, processes)
    try:
        with _alive(store, processes.deadline / _BEATS):
            told = _Told(decision=decide())
    except Exception as error:
        _refuse(store, error, what, place.world_size - 1)
        raise
    store.set(_DECISION, msgspec.json.encode(told).decode())
    return told.decision


@contextmanager
def _alive(store: PrefixStore, every: Seconds) -> Iterator[None]:
    """Say so from a thread: who decides compiles, measures and searches, and has no time for it."""
    beating = store.clone()  # type: ignore[attr-defined]  # a connection is not for two threads
    over = threading.Event()

    def beat() -> None:
        for _ in range(_DEADLINES * _BEATS):
            if over.wait(every):
                return
            try:
                beating.add(_ALIVE, 1)
            except RuntimeError as error:
                _logger.warning("the others cannot hear that rank 0 is alive: %s", error)
                return

    thread = threading.Thread(target=beat, name="alive while deciding", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LEAVING)


def _heard(store: PrefixStore, what: str, processes: Processes) -> str:
    first, beats, ends = processes.names()[0], -1, 0.0
    began, says_so = time.monotonic(), _SAYS_SO
    with waiting_for(first, f"deciding {what}"):
        while not store.check([_DECISION]):
            if (now_at := store.add(_ALIVE, 0)) != beats:
                beats, ends = now_at, time.monotonic() + processes.deadline
            elif time.monotonic() > ends:
                raise PeerError(
                    first,
                    action=f"deciding {what}",
                    waited=processes.deadline,
                    cause="it shows no sign of life",
                )
            if (waited := time.monotonic() - began) > says_so:
                _logger.warning("%s has taken %.0f s so far for deciding %s", first, waited, what)
                says_so *= 10
            time.sleep(_LOOK)
        told = msgspec.json.decode(store.get(_DECISION), type=_Told)
        store.add(_HEARD, 1)
    if told.kind:
        kinds = {kind.__name__: kind for kind in _kinds(UserError)}
        kind = kinds.get(told.kind, LaunchError)
        raise kind(told.wrong, expected=told.expected, fix=told.fix)
    return told.decision


def _refuse(store: PrefixStore, error: Exception, what: str, num_others: int) -> None:
    """Until all have heard of it: who fails at once takes the store along."""
    told = _Told(
        kind=LaunchError.__name__,
        wrong=f"{what}: {type(error).__name__}: {error}",
        expected="rank 0 to decide it for all",
        fix="see what rank 0 says",
    )
    if isinstance(error, UserError):
        kind = type(error).__name__
        told = _Told(kind=kind, wrong=error.wrong, expected=error.expected, fix=error.fix)
    store.set(_DECISION, msgspec.json.encode(told).decode())
    ends = time.monotonic() + _PATIENCE
    while time.monotonic() < ends and store.add(_HEARD, 0) < num_others:
        time.sleep(_LOOK)


def _kinds(base: type[UserError]) -> Iterator[type[UserError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)

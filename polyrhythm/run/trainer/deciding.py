"""What one process decides for all: they hear its decision, or why there is none.

Rank 0 decides, which may take long, and the others are patient as long as it gets on. A refusal is
raised by all of them alike.
"""

import time
from collections.abc import Callable, Iterator

import msgspec
from torch.distributed.distributed_c10d import PrefixStore

from polyrhythm.errors import LaunchError, PeerError, UserError
from polyrhythm.run.peers import waiting_for
from polyrhythm.run.trainer.placing import Processes
from polyrhythm.types import Seconds

_DECISION, _GETS_ON, _HEARD = "decision", "gets on", "heard"
_LOOK: Seconds = 0.05
_PATIENCE: Seconds = 10.0  # of who has to refuse, until the others have heard why


class _Told(msgspec.Struct, frozen=True):
    """The decision, or a UserError of a kind."""

    decision: str = ""
    kind: str = ""
    wrong: str = ""
    expected: str = ""
    fix: str = ""


def decided(
    processes: Processes, what: str, decide: Callable[[Callable[[object], None]], str]
) -> str:
    """What rank 0 decides, on every process; `decide` is called there alone.

    It gets a function to call, with anything, whenever it gets on. Raises what `decide` refuses
    with, and PeerError where nothing is heard for as long as the deadline.
    """
    place = processes.place
    assert place.store is not None, "met"
    store = PrefixStore(f"polyrhythm/deciding {what}", place.store)
    if place.rank > 0:
        return _heard(store, what, processes)

    def gets_on(_: object) -> None:
        store.add(_GETS_ON, 1)

    try:
        told = _Told(decision=decide(gets_on))
    except Exception as error:
        _refuse(store, error, what, place.world_size - 1)
        raise
    store.set(_DECISION, msgspec.json.encode(told).decode())
    return told.decision


def _heard(store: PrefixStore, what: str, processes: Processes) -> str:
    first, gets_on, ends = processes.names()[0], -1, 0.0
    with waiting_for(first, f"deciding {what}"):
        while not store.check([_DECISION]):
            if (now_at := store.add(_GETS_ON, 0)) != gets_on:
                gets_on, ends = now_at, time.monotonic() + processes.deadline
            elif time.monotonic() > ends:
                raise PeerError(
                    first,
                    action=f"deciding {what}",
                    waited=processes.deadline,
                    cause="it does not get on",
                )
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

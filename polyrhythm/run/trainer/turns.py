"""How a fit goes on, decided by the first worker and told to all, through the job's store."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from polyrhythm.run.peers import waiting_for
from polyrhythm.run.trainer.telling import FIRST
from polyrhythm.sync.dispenser import Supply
from polyrhythm.types import Seconds, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """At the end of a piece of training: how replicas keep together from now on."""

    way: str | None  # None: the fit is over
    supply: Supply  # the samples that are left
    stops: bool = False  # before its time: the job was told to end


def store_of(name: str, deadline: Seconds) -> Store:
    """Shared by all processes of the job; for one thread, with a deadline of its own."""
    if not dist.is_initialized():
        return dist.HashStore()  # type: ignore[attr-defined]  # public, but not listed as such
    with waiting_for(FIRST, "reaching the job's store"):
        store = _get_default_store().clone()  # type: ignore[attr-defined]  # not listed either
    store.set_timeout(timedelta(seconds=deadline))
    return PrefixStore(name, store)


class Turns:
    """Of one fit; all workers ask for them in the same order."""

    def __init__(self, name: str, worker: Worker, deadline: Seconds) -> None:
        self._store = store_of(name, deadline)
        self._is_first, self._number = worker == FIRST, 0

    def next(self, decide: Callable[[], Turn]) -> Turn:
        """What the first worker decides."""
        self._number += 1
        key = f"turn {self._number}"
        if not self._is_first:
            with waiting_for(FIRST, "hearing how training goes on"):
                told: Turn = pickle.loads(self._store.get(key))
            return told
        turn = decide()
        self._store.set(key, pickle.dumps(turn))  # type: ignore[arg-type]  # or bytes
        if self._number > 2:  # all have heard the last but one, or would not be here
            self._store.delete_key(f"turn {self._number - 2}")
        return turn

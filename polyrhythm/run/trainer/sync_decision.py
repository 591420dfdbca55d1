"""How a fit goes on, decided by the first worker and told to all, through the job's store."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.trainer.store import LEADER
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.types import Seconds, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncDecision:
    """At the end of a piece of training: how replicas keep together from now on."""

    sync_mode: str | None  # None: the fit is over
    sampler_state: SamplerState  # the samples that are left
    is_preempted: bool = False  # before its time: the job was told to end


def prefix_store(name: str, timeout: Seconds) -> Store:
    """Shared by all processes of the job; for one thread, with a deadline of its own."""
    if not dist.is_initialized():
        return dist.HashStore()  # type: ignore[attr-defined]  # public, but not listed as such
    with peer_errors(LEADER, "reaching the job's store"):
        store = _get_default_store().clone()  # type: ignore[attr-defined]  # not listed either
    store.set_timeout(timedelta(seconds=timeout))
    return PrefixStore(name, store)


class SyncDecisions:
    """Of one fit; all workers ask for them in the same order."""

    def __init__(self, name: str, worker: Worker, timeout: Seconds) -> None:
        self._store = prefix_store(name, timeout)
        self._is_first, self._number = worker == LEADER, 0

    def next(self, decide: Callable[[], SyncDecision]) -> SyncDecision:
        """What the first worker decides."""
        self._number += 1
        key = f"turn {self._number}"
        if not self._is_first:
            with peer_errors(LEADER, "hearing how training goes on"):
                told: SyncDecision = pickle.loads(self._store.get(key))
            return told
        decision = decide()
        self._store.set(key, pickle.dumps(decision))  # type: ignore[arg-type]  # or bytes
        if self._number > 2:  # all have heard the last but one, or would not be here
            self._store.delete_key(f"turn {self._number - 2}")
        return decision

"""Rank 0's decisions on how a fit continues, broadcast through the job's store."""

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
    """The decision at the end of a window or of a phase."""

    sync_mode: str | None  # of the next phase; None: the fit is over
    sampler_state: SamplerState  # which samples are left
    is_preempted: bool = False  # the fit ends early, after a preemption notice


def prefix_store(name: str, timeout: Seconds) -> Store:
    """Connect to the job's store under a prefix, for one thread, with its own timeout."""
    if not dist.is_initialized():
        return dist.HashStore()  # type: ignore[attr-defined]  # not in torch's stubs
    with peer_errors(LEADER, "reaching the job's store"):
        store = _get_default_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs
    store.set_timeout(timedelta(seconds=timeout))
    return PrefixStore(name, store)


class SyncDecisions:
    """The decisions of one fit; all workers read them in the same order."""

    def __init__(self, name: str, worker: Worker, timeout: Seconds) -> None:
        self._store = prefix_store(name, timeout)
        self._is_first, self._number = worker == LEADER, 0

    def next(self, decide: Callable[[], SyncDecision]) -> SyncDecision:
        """Call `decide` on rank 0 and return its decision on every worker."""
        self._number += 1
        key = f"decision {self._number}"
        if not self._is_first:
            with peer_errors(LEADER, "receiving the next sync decision"):
                received: SyncDecision = pickle.loads(self._store.get(key))
            return received
        decision = decide()
        self._store.set(key, pickle.dumps(decision))  # type: ignore[arg-type]  # or bytes
        if self._number > 2:  # all workers have read the last but one, or would not be here
            self._store.delete_key(f"decision {self._number - 2}")
        return decision

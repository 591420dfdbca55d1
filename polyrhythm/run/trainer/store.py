"""Small values that rank 0 publishes in the job's store: objects, checks and decisions."""

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from polyrhythm.errors import LaunchError
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.types import Seconds, Worker

LEADER = Worker(0, 0)
_ERROR_TIMEOUT: Seconds = 10.0  # for the other ranks to read an error
_POLL_INTERVAL: Seconds = 0.05


def broadcast_object(name: str, value: Any, *, num_receivers: int = 0) -> None:
    """Publish `value`; wait until every rank has read an error: this rank may host the store."""
    if not dist.is_initialized():
        return
    store, deadline = _get_default_store(), time.monotonic() + _ERROR_TIMEOUT
    store.set(name, pickle.dumps(value))  # type: ignore[arg-type]  # or bytes
    if isinstance(value, Exception):
        while time.monotonic() < deadline and store.add(_ack_key(name), 0) < num_receivers:
            time.sleep(_POLL_INTERVAL)


def receive_object(name: str, action: str, *, timeout: Seconds | None = None) -> Any:
    """Return the published value; raise it if it is an error. `timeout` defaults to the job's."""
    store = _get_default_store()
    if timeout is not None:
        store = store.clone()  # type: ignore[attr-defined]  # not listed
        store.set_timeout(timedelta(seconds=timeout))
    with peer_errors(LEADER, action):
        value = pickle.loads(store.get(name))
        store.add(_ack_key(name), 1)
    if isinstance(value, Exception):
        raise value
    return value


def check_consistent(name: str, worker: Worker, value: str, *, timeout: Seconds) -> None:
    """Reject a comma-separated text that differs from rank 0's."""
    if worker == LEADER:
        broadcast_object(name, value)
        return
    expected = receive_object(name, "receiving its arguments", timeout=timeout)
    if expected != value:
        pairs = zip_longest(value.split(", "), expected.split(", "), fillvalue="nothing")
        here, there = next((a, b) for a, b in pairs if a != b)
        raise LaunchError(
            f"{worker} has {here}, and {LEADER} has {there}",
            expected="the same in every process of the job",
            fix="use the same arguments, dataset and seed everywhere",
        )


def prefix_store(name: str, timeout: Seconds) -> Store:
    """Connect to the job's store under a prefix, for one thread, with its own timeout."""
    if not dist.is_initialized():
        return dist.HashStore()  # type: ignore[attr-defined]  # not in torch's stubs
    with peer_errors(LEADER, "reaching the job's store"):
        store = _get_default_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs
    store.set_timeout(timedelta(seconds=timeout))
    return PrefixStore(name, store)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncDecision:
    """Rank 0's decision at the end of a window or of a phase: how the fit continues."""

    sync_mode: str | None  # of the next phase; None: the fit is over
    sampler_state: SamplerState  # which samples are left
    is_preempted: bool = False  # the fit ends early, after a preemption notice


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


def _ack_key(name: str) -> str:
    return f"{name}/acks"

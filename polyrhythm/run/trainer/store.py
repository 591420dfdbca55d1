"""What the first worker has found out, for others to hear: also when it is the end of the job."""

import pickle
import time
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from polyrhythm.errors import LaunchError
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.types import Seconds, Worker

LEADER = Worker(0, 0)
_ERROR_TIMEOUT: Seconds = 10.0  # until who has not heard of a problem finds out by itself
_POLL_INTERVAL: Seconds = 0.05


def broadcast_object(name: str, value: Any, *, num_receivers: int = 0) -> None:
    """An error is told until all have heard of it: who fails at once takes the store along."""
    if not dist.is_initialized():
        return
    store, deadline = _get_default_store(), time.monotonic() + _ERROR_TIMEOUT
    store.set(name, pickle.dumps(value))  # type: ignore[arg-type]  # or bytes
    is_last = isinstance(value, Exception)
    while is_last and time.monotonic() < deadline and store.add(_ack_key(name), 0) < num_receivers:
        time.sleep(_POLL_INTERVAL)


def receive_object(name: str, action: str, *, timeout: Seconds | None = None) -> Any:
    """What was told; raises it, if it is an error. The deadline is the job's, unless given."""
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


def check_consistent(name: str, worker: Worker, mine: str, *, timeout: Seconds) -> None:
    """Refuse what differs from the first worker's: parts of a text, with commas between them."""
    if worker == LEADER:
        broadcast_object(name, mine)
        return
    theirs = receive_object(name, "hearing what the first worker was given", timeout=timeout)
    if theirs != mine:
        pairs = zip_longest(mine.split(", "), theirs.split(", "), fillvalue="nothing")
        here, there = next((a, b) for a, b in pairs if a != b)
        raise LaunchError(
            f"{worker} was given {here}, and {LEADER} {there}",
            expected="the same in every process of the job",
            fix="use the same arguments, dataset and seed everywhere",
        )


def _ack_key(name: str) -> str:
    return f"{name} heard"

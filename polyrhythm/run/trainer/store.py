"""Small values that rank 0 publishes in the job's store: broadcast and consistency check."""

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
    """Reject a value that differs from rank 0's: text of parts separated by commas."""
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


def _ack_key(name: str) -> str:
    return f"{name}/acks"

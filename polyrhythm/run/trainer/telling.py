"""What the first worker has found out, for others to hear: also when it is the end of the job."""

import pickle
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds, Worker

_PATIENCE: Seconds = 10.0  # until who has not heard of a problem finds out by itself
_LOOK: Seconds = 0.05


def tell(name: str, word: Any, *, num_listeners: int = 0) -> None:
    """An error is told until all have heard of it: who fails at once takes the store along."""
    if not dist.is_initialized():
        return
    store, ends = _get_default_store(), time.monotonic() + _PATIENCE
    store.set(name, pickle.dumps(word))  # type: ignore[arg-type]  # or bytes
    is_last = isinstance(word, Exception)
    while is_last and time.monotonic() < ends and store.add(_heard(name), 0) < num_listeners:
        time.sleep(_LOOK)


def hear(name: str, action: str, *, deadline: Seconds | None = None) -> Any:
    """What was told; raises it, if it is an error. The deadline is the job's, unless given."""
    store = _get_default_store()
    if deadline is not None:
        store = store.clone()  # type: ignore[attr-defined]  # not listed
        store.set_timeout(timedelta(seconds=deadline))
    with waiting_for(Worker(0, 0), action):
        word = pickle.loads(store.get(name))
        store.add(_heard(name), 1)
    if isinstance(word, Exception):
        raise word
    return word


def _heard(name: str) -> str:
    return f"{name} heard"

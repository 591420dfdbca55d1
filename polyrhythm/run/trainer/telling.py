"""What the first worker has found out, for others to hear: also when it is the end of the job."""

import pickle
import time
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from polyrhythm.errors import LaunchError
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds, Worker

FIRST = Worker(0, 0)
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
    with waiting_for(FIRST, action):
        word = pickle.loads(store.get(name))
        store.add(_heard(name), 1)
    if isinstance(word, Exception):
        raise word
    return word


def agree(name: str, worker: Worker, mine: str, *, deadline: Seconds) -> None:
    """Refuse what differs from the first worker's: parts of a text, with commas between them."""
    if worker == FIRST:
        tell(name, mine)
        return
    theirs = hear(name, "hearing what the first worker was given", deadline=deadline)
    if theirs != mine:
        pairs = zip_longest(mine.split(", "), theirs.split(", "), fillvalue="nothing")
        here, there = next((a, b) for a, b in pairs if a != b)
        raise LaunchError(
            f"{worker} was given {here}, and {FIRST} {there}",
            expected="the same in every process of the job",
            fix="use the same arguments, dataset and seed everywhere",
        )


def _heard(name: str) -> str:
    return f"{name} heard"

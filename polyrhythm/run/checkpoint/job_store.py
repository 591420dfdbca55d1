"""Small values that the stages of a pipeline exchange while they save, in the job's store.

A process group of its own would do, but a group that times out once is broken for good, and with
it every later save; a missing value fails one save only. Values are few and small, over a separate
connection, so they do not interfere with training. Where all stages must agree, the first proposal
wins: the store compares and sets atomically, so that a stage that times out and one that finishes
at the same moment get the same decision.
"""

import pickle
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.types import Seconds

_ACTION = "a save or a restore"
_FIRST_PAUSE: Seconds = 0.002
_LONGEST_PAUSE: Seconds = 0.1
_num_made: dict[tuple[int, ...], int] = {}  # by members; equal on all of them


class JobStore:
    """Exchanges values between the stages, which all make it; `ranks` are theirs, in order."""

    def __init__(self, ranks: Sequence[int], stage: int, *, timeout: Seconds) -> None:
        self._stage, self._num_stages, self.timeout = stage, len(ranks), timeout
        members = tuple(ranks)
        number = _num_made[members] = _num_made.get(members, 0) + 1
        name = f"polyrhythm/checkpoints/{','.join(map(str, members))}/{number}"
        # One process may save without a job. (torch's stubs do not list these.)
        is_single = len(members) == 1
        store = dist.HashStore() if is_single else _get_default_store().clone()  # type: ignore[attr-defined]
        self._store = PrefixStore(name, store)
        self._store.set_timeout(timedelta(seconds=timeout))
        self._closed = threading.Event()

    def put(self, name: str, value: Any) -> None:
        """Publish this stage's value; pickled, like the save plans of torch's own checkpoints."""
        packed = zlib.compress(pickle.dumps(value), 1)
        with _waiting_for_store():
            self._store.set(f"{name}/{self._stage}", packed)  # type: ignore[arg-type]  # or bytes

    def get(self, name: str, stage: int, *, timeout: Seconds | None = None) -> Any:
        """Return the value of another stage; raises PeerError after `timeout`."""
        timeout = self.timeout if timeout is None else timeout
        key, start, pause = f"{name}/{stage}", time.monotonic(), _FIRST_PAUSE
        while True:
            with _waiting_for_store():
                if self._store.check([key]):
                    return pickle.loads(zlib.decompress(self._store.get(key)))
            waited = time.monotonic() - start
            is_closed = self._closed.wait(pause)
            if is_closed or waited > timeout:
                cause = "closed in this process" if is_closed else "no message from it"
                raise PeerError(f"stage {stage}", action=_ACTION, waited=waited, cause=cause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def get_all(self, name: str) -> list[Any]:
        """Return the values of all stages, in order, within one timeout."""
        deadline = time.monotonic() + self.timeout
        return [
            self.get(name, stage, timeout=deadline - time.monotonic())
            for stage in range(self._num_stages)
        ]

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Publish a value and return the values of all stages, in order; all call it."""
        self.put(name, value)
        return self.get_all(name)

    def decide(self, name: str, proposal: str) -> str:
        """Return the decision: the first proposal of any stage."""
        with _waiting_for_store():
            return self._store.compare_set(name, "", proposal).decode()

    def delete(self, name: str) -> None:
        """Delete all values and the decision of that name."""
        for key in (name, *(f"{name}/{stage}" for stage in range(self._num_stages))):
            with _waiting_for_store():
                self._store.delete_key(key)

    def close(self) -> None:
        """Wake the threads that wait here; they raise PeerError."""
        self._closed.set()


def _waiting_for_store() -> AbstractContextManager[None]:
    return peer_errors("the process that serves the job's store", _ACTION)

"""Notes that the stages of a pipeline leave for one another while they save, in the job's store.

A process group of its own would do for messages, but one that waits too long is broken for good,
and with it every later save; a note that does not come in time fails one save alone. Notes are few
and small, over a connection of their own, so they meet no message of the training. Where all must
agree, the first proposal stands: the store compares and sets in one go, so that a stage that
gives up waiting and one that is just done cannot both be right.
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
_num_made: dict[tuple[int, ...], int] = {}  # by members, who all count alike


class JobStore:
    """Made by all stages; `ranks` are theirs, in order."""

    def __init__(self, ranks: Sequence[int], stage: int, *, timeout: Seconds) -> None:
        self._stage, self._num_stages, self.timeout = stage, len(ranks), timeout
        members = tuple(ranks)
        number = _num_made[members] = _num_made.get(members, 0) + 1
        name = f"polyrhythm/checkpoints/{','.join(map(str, members))}/{number}"
        # One process may save without any job. (torch's types do not list these.)
        alone = len(members) == 1
        store = dist.HashStore() if alone else _get_default_store().clone()  # type: ignore[attr-defined]
        self._store = PrefixStore(name, store)
        self._store.set_timeout(timedelta(seconds=timeout))
        self._closed = threading.Event()

    def put(self, name: str, value: Any) -> None:
        """Read by whom it concerns; pickled, as torch's own checkpoints exchange their plans."""
        packed = zlib.compress(pickle.dumps(value), 1)
        with _waiting_for_store():
            self._store.set(f"{name}/{self._stage}", packed)  # type: ignore[arg-type]  # or bytes

    def get(self, name: str, stage: int, *, timeout: Seconds | None = None) -> Any:
        """The note of another stage; raises PeerError if it does not come in time."""
        timeout = self.timeout if timeout is None else timeout
        key, began, pause = f"{name}/{stage}", time.monotonic(), _FIRST_PAUSE
        while True:
            with _waiting_for_store():
                if self._store.check([key]):
                    return pickle.loads(zlib.decompress(self._store.get(key)))
            waited = time.monotonic() - began
            is_closed = self._closed.wait(pause)
            if is_closed or waited > timeout:
                cause = "given up here" if is_closed else "no word from it"
                raise PeerError(f"stage {stage}", action=_ACTION, waited=waited, cause=cause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def get_all(self, name: str) -> list[Any]:
        """One deadline for all of them."""
        deadline = time.monotonic() + self.timeout
        return [
            self.get(name, stage, timeout=deadline - time.monotonic())
            for stage in range(self._num_stages)
        ]

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """The notes of all stages, in order; called by all."""
        self.put(name, value)
        return self.get_all(name)

    def decide(self, name: str, proposal: str) -> str:
        """What is decided: this, if nobody has proposed anything before."""
        with _waiting_for_store():
            return self._store.compare_set(name, "", proposal).decode()

    def delete(self, name: str) -> None:
        """All notes and the decision of that name."""
        for key in (name, *(f"{name}/{stage}" for stage in range(self._num_stages))):
            with _waiting_for_store():
                self._store.delete_key(key)

    def close(self) -> None:
        """Wake whoever waits here."""
        self._closed.set()


def _waiting_for_store() -> AbstractContextManager[None]:
    return peer_errors("the process that serves the job's store", _ACTION)

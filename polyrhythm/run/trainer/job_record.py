"""What a job has begun with, in its store: for processes that join while it trains.

Each process writes the same, when the job begins and for each fit: any one may be lost. A process
that joins compares it with its own script before the others know of it: a mismatch costs them
nothing.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.distributed_c10d import Store

from polyrhythm.errors import LaunchError, PeerError, peer_errors
from polyrhythm.plan.plan import Plan
from polyrhythm.run.comm.store import prefixed
from polyrhythm.types import Seconds

VERSION = 1  # of what processes of one job say to each other
_POLL: Seconds = 0.1


class JobRecord(msgspec.Struct, frozen=True):
    """What all processes of a job have in common."""

    plan: Plan  # with which it has begun
    ranks: tuple[int, ...]  # in the plan, by the launcher's rank
    settings: dict[str, str]  # that must be equal everywhere


class FitRecord(msgspec.Struct, frozen=True):
    """What all processes of a fit have in common."""

    settings: dict[str, str]
    have_callbacks: bool  # some process has


def settings_of(arguments: Mapping[str, Any], model: nn.Module) -> dict[str, str]:
    """Return what a process that joins must have as the others: arguments, model and versions."""
    named = [*model.named_parameters(), *model.named_buffers()]
    form = repr([(name, tuple(each.shape), str(each.dtype)) for name, each in named])
    digest = hashlib.blake2b(form.encode(), digest_size=6).hexdigest()
    return {key: str(value) for key, value in arguments.items()} | {
        "protocol version": str(VERSION),
        "torch": torch.__version__.split(".")[0],
        "model": f"{type(model).__name__} {digest}",
    }


class JobRecords:
    """The records of one job."""

    def __init__(self, store: Store, timeout: Seconds) -> None:
        self._store, self._timeout = prefixed("polyrhythm/records", store), timeout
        self._kept: dict[str, msgspec.Struct] = {}

    def keep_job(self, record: JobRecord, *, writes: bool) -> None:
        """Keep a record that all processes know; those that have made it write it, too."""
        self._keep("job", record, writes=writes)

    def keep_fit(self, number: int, record: FitRecord, *, writes: bool) -> None:
        self._keep(f"fit {number}", record, writes=writes)

    def moved_to(self, store: Store) -> "JobRecords":
        """Return the same records in a new store; all processes may write them."""
        moved = JobRecords(store, self._timeout)
        for key, record in self._kept.items():
            moved._keep(key, record, writes=True)
        return moved

    def read_job(self) -> JobRecord:
        """Return what the job has begun with; waits until it has."""
        deadline = time.monotonic() + self._timeout
        while not self._has("job"):
            if time.monotonic() >= deadline:
                cause = "the job has not begun"
                raise PeerError("the job", action="joining", waited=self._timeout, cause=cause)
            time.sleep(_POLL)
        record = msgspec.msgpack.decode(self._store.get("job"), type=JobRecord)
        self.keep_job(record, writes=False)
        return record

    def find_fit(self, number: int, check: Callable[[], None]) -> FitRecord | None:
        """Return the record of a fit, when it has begun; None if the job is in a later one.

        `check` is called repeatedly, and may raise an error to end the wait.
        """
        while not self._has(f"fit {number + 1}"):
            check()
            if self._has(f"fit {number}"):
                record = msgspec.msgpack.decode(self._store.get(f"fit {number}"), type=FitRecord)
                self.keep_fit(number, record, writes=False)
                return record
            time.sleep(_POLL)
        return None

    def _keep(self, key: str, record: msgspec.Struct, *, writes: bool) -> None:
        self._kept[key] = record
        if not writes:
            return
        with peer_errors("the process that serves the job's store", "writing what joins need"):
            self._store.set(key, msgspec.msgpack.encode(record))

    def _has(self, key: str) -> bool:
        with peer_errors("the process that serves the job's store", "joining"):
            return bool(self._store.check([key]))


def check_settings(own: dict[str, str], job: dict[str, str]) -> None:
    """Raise LaunchError if a process that joins differs from the job."""
    for key in own | job:
        here, there = (settings.get(key, "nothing") for settings in (own, job))
        if here != there:
            raise LaunchError(
                f"this process has {key}={here}, and the job that it joins has {key}={there}",
                expected="the same script, model, arguments and versions as in the running job",
                fix="start it with the files and the arguments of the job",
            )

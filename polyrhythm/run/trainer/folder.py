"""The folder of a run belongs to one job at a time; logs of the jobs before are kept."""

import fcntl
import time
from itertools import count
from pathlib import Path
from typing import IO

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from polyrhythm.errors import LaunchError
from polyrhythm.events import WORKERS
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds, Worker

_LOCK, _KEY, _HEARD = "lock", "polyrhythm/run folder", "polyrhythm/run folder heard"
_PATIENCE: Seconds = 10.0  # until who has not heard of a problem finds out by itself
_LOOK: Seconds = 0.05


def claimed(run: Path, worker: Worker) -> IO[str] | None:
    """The first worker takes the folder, until what is returned is closed; the others hear of it.

    Raises LaunchError, in all of them, if another job has it, or it cannot be written.
    """
    if worker != Worker(0, 0):
        store = _get_default_store()
        with waiting_for(Worker(0, 0), "hearing of the run folder"):
            problem = store.get(_KEY).decode()
            store.add(_HEARD, 1)
        if problem:
            raise _refused(run, problem)
        return None
    lock, problem = _taken(run)
    if dist.is_initialized():
        _tell(problem)
    if lock is None:
        raise _refused(run, problem)
    return lock


def _tell(problem: str) -> None:
    """If there is one, until all have heard of it: who fails at once takes the store along."""
    store, ends = _get_default_store(), time.monotonic() + _PATIENCE
    store.set(_KEY, problem)
    while problem and time.monotonic() < ends and store.add(_HEARD, 0) < dist.get_world_size() - 1:
        time.sleep(_LOOK)


def _taken(run: Path) -> tuple[IO[str] | None, str]:
    """And what is wrong, if it cannot be."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = (run / _LOCK).open("w")
    except OSError as error:
        return None, str(error.strerror)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None, "another job is using it"
    logs = run / WORKERS
    if logs.exists():
        logs.rename(next(p for i in count(1) if not (p := run / f"{WORKERS}.{i}").exists()))
    return lock, ""


def _refused(run: Path, problem: str) -> LaunchError:
    return LaunchError(
        f"run folder {run}: {problem}",
        expected="a folder that can be written, and that no other job uses",
        fix="give this job a folder of its own, or end the other one",
    )

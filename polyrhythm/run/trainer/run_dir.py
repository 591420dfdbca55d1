"""The run folder: one job at a time locks it; logs of earlier jobs are kept."""

import fcntl
from itertools import count
from pathlib import Path
from typing import IO

import torch.distributed as dist

from polyrhythm.errors import LaunchError
from polyrhythm.events import WORKERS
from polyrhythm.run.trainer.store import LEADER, broadcast_object, receive_object
from polyrhythm.sync.decision_log import decision_log_paths
from polyrhythm.types import Worker

_LOCK, _NAME = "lock", "run folder"


def lock_run_dir(run: Path, worker: Worker, name: str) -> IO[str] | None:
    """Lock the folder on rank 0 until the returned file is closed; the others wait for it.

    `name` is the Trainer's name in the job's store. Raises LaunchError in all workers if another
    job holds the lock, or if the folder cannot be written.
    """
    if worker != LEADER:
        receive_object(f"{name}/{_NAME}", "locking the run folder")
        return None
    lock, problem = _lock(run)
    error = None if lock is not None else _lock_error(run, problem)
    num_receivers = dist.get_world_size() - 1 if dist.is_initialized() else 0
    broadcast_object(f"{name}/{_NAME}", error, num_receivers=num_receivers)
    if error is not None:
        raise error
    return lock


def _lock(run: Path) -> tuple[IO[str] | None, str]:
    """Return the lock file, or None and the reason."""
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
        previous = next(p for i in count(1) if not (p := run / f"{WORKERS}.{i}").exists())
        logs.rename(previous)
        for path in decision_log_paths(run):
            path.rename(previous / path.name)
    return lock, ""


def _lock_error(run: Path, problem: str) -> LaunchError:
    return LaunchError(
        f"run folder {run}: {problem}",
        expected="a folder that can be written, and that no other job uses",
        fix="pass another run folder, or end the other job",
    )

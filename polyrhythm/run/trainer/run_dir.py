"""The folder of a run belongs to one job at a time; logs of the jobs before are kept."""

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
    """The first worker takes the folder, until what is returned is closed; the others hear of it.

    `name` is the Trainer's, in the job's store. Raises LaunchError, in all of them, if another job
    has it, or it cannot be written.
    """
    if worker != LEADER:
        receive_object(f"{name}/{_NAME}", "hearing of the run folder")
        return None
    lock, problem = _lock(run)
    error = None if lock is not None else _lock_error(run, problem)
    others = dist.get_world_size() - 1 if dist.is_initialized() else 0
    broadcast_object(f"{name}/{_NAME}", error, num_receivers=others)
    if error is not None:
        raise error
    return lock


def _lock(run: Path) -> tuple[IO[str] | None, str]:
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
        before = next(p for i in count(1) if not (p := run / f"{WORKERS}.{i}").exists())
        logs.rename(before)
        for decided in decision_log_paths(run):
            decided.rename(before / decided.name)
    return lock, ""


def _lock_error(run: Path, problem: str) -> LaunchError:
    return LaunchError(
        f"run folder {run}: {problem}",
        expected="a folder that can be written, and that no other job uses",
        fix="give this job a folder of its own, or end the other one",
    )

"""The folder of a run belongs to one job at a time; logs of the jobs before are kept."""

import fcntl
from itertools import count
from pathlib import Path
from typing import IO

import torch.distributed as dist

from polyrhythm.errors import LaunchError
from polyrhythm.events import WORKERS
from polyrhythm.run.trainer.telling import FIRST, hear, tell
from polyrhythm.sync.decision_log import decision_logs
from polyrhythm.types import Worker

_LOCK, _NAME = "lock", "run folder"


def claimed(run: Path, worker: Worker, name: str) -> IO[str] | None:
    """The first worker takes the folder, until what is returned is closed; the others hear of it.

    `name` is the Trainer's, in the job's store. Raises LaunchError, in all of them, if another job
    has it, or it cannot be written.
    """
    if worker != FIRST:
        hear(f"{name}/{_NAME}", "hearing of the run folder")
        return None
    lock, problem = _taken(run)
    refused = None if lock is not None else _refused(run, problem)
    others = dist.get_world_size() - 1 if dist.is_initialized() else 0
    tell(f"{name}/{_NAME}", refused, num_listeners=others)
    if refused is not None:
        raise refused
    return lock


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
        before = next(p for i in count(1) if not (p := run / f"{WORKERS}.{i}").exists())
        logs.rename(before)
        for decided in decision_logs(run):
            decided.rename(before / decided.name)
    return lock, ""


def _refused(run: Path, problem: str) -> LaunchError:
    return LaunchError(
        f"run folder {run}: {problem}",
        expected="a folder that can be written, and that no other job uses",
        fix="give this job a folder of its own, or end the other one",
    )

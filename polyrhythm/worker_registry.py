"""The workers of this user on this machine: a file for each, from which a command finds them.

`polyrhythm leave` asks one of them to leave. A file of a process that was killed stays until the
next worker starts: it counts only while a process with its number and its start time runs.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec
import psutil  # type: ignore[import-untyped]

from polyrhythm.errors import LaunchError
from polyrhythm.types import Seconds

# Computed at import: in a user namespace, as the lab has, the user id becomes 0.
FOLDER = Path(tempfile.gettempdir()) / f"polyrhythm-workers-{os.getuid()}"
_CLOCK_STEP: Seconds = 2.0  # start times are known up to a change of the machine's clock


class RunningWorker(msgspec.Struct, frozen=True):
    """A process that trains."""

    pid: int
    started_at: Seconds  # time.time(), as psutil has it
    rank: int  # that its launcher gave it
    worker: str  # such as s0p1
    script: str

    @classmethod
    def here(cls, worker: str) -> Self:
        """Describe this process; its launcher has set its rank."""
        process, rank = psutil.Process(), os.environ.get("RANK", "0")
        script = str(Path(sys.argv[0]).absolute()) if sys.argv[0] else "python"
        started_at: Seconds = process.create_time()
        return cls(process.pid, started_at, int(rank) if rank.isdigit() else 0, worker, script)

    def __str__(self) -> str:
        return f"{self.worker} (rank {self.rank}, process {self.pid}, {self.script})"

    @property
    def is_running(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            started_at: Seconds = process.create_time()
            has_ended = process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        return not has_ended and abs(started_at - self.started_at) < _CLOCK_STEP

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Have a file in a `with` block. A folder that cannot be used only hides this process."""
        path, new = FOLDER / f"{self.pid}.json", FOLDER / f"{self.pid}.new"
        with contextlib.suppress(OSError, LaunchError):
            _check_folder()
            running_workers()  # removes the files of workers that were killed
            new.write_bytes(msgspec.json.encode(self))
            new.rename(path)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def running_workers() -> list[RunningWorker]:
    """Return the workers that run, by rank; remove the files of others. Raises LaunchError."""
    if not FOLDER.exists():
        return []
    _check_folder()
    found = []
    for path in FOLDER.iterdir():
        # Incomplete, removed meanwhile, or of another version: its name has the process.
        is_stale = path.stem.isdigit() and not psutil.pid_exists(int(path.stem))
        if path.suffix == ".json":
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                worker = msgspec.json.decode(path.read_bytes(), type=RunningWorker)
                if not (is_stale := not worker.is_running):
                    found.append(worker)
        if is_stale:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda worker: (worker.rank, worker.pid))


def _check_folder() -> None:
    """Make the folder; refuse one into which other users may write."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    found = FOLDER.lstat()
    if FOLDER.is_symlink() or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise LaunchError(
            f"{FOLDER} belongs to another user, or others have access to it",
            expected="a folder of this user alone",
            fix="remove it, or set TMPDIR to another folder in all processes",
        )

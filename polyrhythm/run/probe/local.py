"""A probe of processes on this machine, as their owner sees it: how far it is, and why it ended."""

import time
from collections.abc import Callable
from pathlib import Path

from polyrhythm.describe.measure import device_of
from polyrhythm.errors import PeerError, WorkerError
from polyrhythm.processes import BAD_INPUT, PEER_LOST, Child
from polyrhythm.run.comm.launch import LocalJob
from polyrhythm.types import Seconds

_GPU_CHECK_TIMEOUT: Seconds = 120.0  # for a GPU: the first use of a driver may take its time
_NUM_TAIL_LINES = 20  # lines


def check_device(name: str, folder: Path) -> None:
    """Raises DescriptionError. Asked in a fork: after it, no fork of ours could use a GPU."""
    if name != "cuda":
        return
    child = Child(lambda: device_of(name), output=folder / "device.log")
    try:
        is_there = child.wait(_GPU_CHECK_TIMEOUT) == 0
    finally:
        child.end()
    if not is_there:
        device_of(name)


def watch(
    job: LocalJob, progress: Path, say: Callable[[str], object], *, stall_timeout: Seconds
) -> None:
    """Wait for the end of a job whose rank 0 writes how far it is, and pass that on.

    Raises WorkerError, with the end of what the worker printed: its file may not stay. Raises
    PeerError if there is no progress for so long that some process should have complained.
    """
    shown, deadline = "", time.monotonic() + stall_timeout
    try:
        while not job.wait(0.2):
            text = progress.read_text() if progress.exists() else ""
            if text != shown:
                shown, deadline = text, time.monotonic() + stall_timeout
                say(text)
            elif time.monotonic() > deadline:
                raise PeerError(
                    "all processes",
                    action=f"measuring {shown}",
                    waited=stall_timeout,
                    cause="no progress, and no complaint",
                )
    except WorkerError as error:
        raise _with_output_tail(error) from None


def _with_output_tail(error: WorkerError) -> WorkerError:
    reason = error.reason
    # A refusal and a lost peer are told in full by the reason.
    if error.output is not None and error.status not in (BAD_INPUT, PEER_LOST):
        lines = Path(error.output).read_text(errors="replace").rstrip().splitlines()
        reason += "\n  its last words:" + "".join(
            f"\n    {each}" for each in lines[-_NUM_TAIL_LINES:]
        )
    return WorkerError(
        error.rank, f"worker of rank {error.rank}", reason, status=error.status, output=None
    )

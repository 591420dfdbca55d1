"""Watch a probe by processes of this machine: show its progress, and raise its errors."""

import time
from collections.abc import Callable
from pathlib import Path

from polyrhythm.describe.measure import device_of
from polyrhythm.errors import PeerError, WorkerError
from polyrhythm.processes import BAD_INPUT, PEER_LOST, Child
from polyrhythm.run.comm.launch import LocalJob
from polyrhythm.types import Seconds

_GPU_CHECK_TIMEOUT: Seconds = 120.0  # the first use of a GPU driver may be slow
_NUM_TAIL_LINES = 20


def check_device(name: str, folder: Path) -> None:
    """Raise DescriptionError if unusable; a fork checks: CUDA must not be initialised here."""
    if name != "cuda":
        return
    child = Child(lambda: device_of(name), output=folder / "device.log")
    try:
        is_usable = child.wait(_GPU_CHECK_TIMEOUT) == 0
    finally:
        child.end()
    if not is_usable:
        device_of(name)


def watch(
    job: LocalJob, progress: Path, on_progress: Callable[[str], object], *, stall_timeout: Seconds
) -> None:
    """Wait for the end of a job; pass the progress that its rank 0 writes on to `on_progress`.

    Raises WorkerError with the end of the worker's output, whose file may be temporary. Raises
    PeerError if there is no progress for `stall_timeout`.
    """
    shown, deadline = "", time.monotonic() + stall_timeout
    try:
        while not job.wait(0.2):
            text = progress.read_text() if progress.exists() else ""
            if text != shown:
                shown, deadline = text, time.monotonic() + stall_timeout
                on_progress(text)
            elif time.monotonic() > deadline:
                raise PeerError(
                    "all processes",
                    action=f"measuring {shown}",
                    waited=stall_timeout,
                    cause="no progress, and no error",
                )
    except WorkerError as error:
        raise _with_output_tail(error) from None


def _with_output_tail(error: WorkerError) -> WorkerError:
    reason = error.reason
    # The reason of a UserError or of a lost peer is complete.
    if error.output is not None and error.status not in (BAD_INPUT, PEER_LOST):
        lines = Path(error.output).read_text(errors="replace").rstrip().splitlines()
        reason += "\n  end of its output:" + "".join(
            f"\n    {line}" for line in lines[-_NUM_TAIL_LINES:]
        )
    return WorkerError(
        error.rank, f"worker of rank {error.rank}", reason, status=error.status, output=None
    )

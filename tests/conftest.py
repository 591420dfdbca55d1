"""Settings that hold for every test."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

# No time limit per example: a busy machine is no failure. pytest-timeout bounds the whole test.
settings.register_profile("polyrhythm", deadline=None, print_blob=True)
# For CI, the same examples every time, and fewer: an unlucky draw is for whoever runs the tests by
# hand, not to be met for the first time by somebody else's change.
settings.register_profile(
    "settled", deadline=None, print_blob=True, derandomize=True, max_examples=10
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "polyrhythm"))

# Whoever started this in the background may have had SIGINT ignored, and it is inherited: a test
# that sends it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Orphans of a killed process become children of this one, and so are seen below.
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER

NEEDS_PROCESSES = {"gloo", "gpu", "lab", "browser", "test_processes.py", "test_run_concurrently.py"}


@pytest.fixture(autouse=True)
def check_no_leaked_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test must see the end of what it starts; what it forgot is ended here, and it fails."""
    if not NEEDS_PROCESSES & set(request.path.parts):
        yield
        return
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    left = [process for process in left if not _has_ended(process)]
    names = [_name(process) for process in left]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)
    assert not names, f"left behind: {names}"


def _has_ended(process: psutil.Process) -> bool:
    """Also an orphan that was killed a moment ago, and that we inherited: it is to be reaped."""
    with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
        for _ in range(20):
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
                return True
            time.sleep(0.01)
        return False
    return True


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)

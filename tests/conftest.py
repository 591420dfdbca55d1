"""Settings that hold for every test."""

import contextlib
import ctypes
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

# No time limit per example: a busy machine is no failure. pytest-timeout bounds the whole test.
settings.register_profile("polyrhythm", deadline=None, print_blob=True)
settings.load_profile("polyrhythm")

# Orphans of a killed process become children of this one, and so are seen below.
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER

NEEDS_PROCESSES = {"gloo", "gpu", "lab", "browser", "test_processes.py"}


@pytest.fixture(autouse=True)
def no_process_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test must see the end of what it starts; what it forgot is ended here, and it fails."""
    if not NEEDS_PROCESSES & set(request.path.parts):
        yield
        return
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    names = [_name(process) for process in left]
    psutil.wait_procs(left, timeout=10)
    assert not names, f"left behind: {names}"


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline()) or process.status()}"
    except psutil.Error:  # it has ended meanwhile
        return str(process.pid)

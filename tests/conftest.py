"""Settings that hold for every test."""

from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

# No time limit per example: a busy machine is no failure. pytest-timeout bounds the whole test.
settings.register_profile("polyrhythm", deadline=None, print_blob=True)
settings.load_profile("polyrhythm")

NEEDS_PROCESSES = {"gloo", "gpu", "lab", "browser"}


@pytest.fixture(autouse=True)
def no_process_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test must see the end of what it starts; what it forgot is ended here, and it fails."""
    if not NEEDS_PROCESSES & set(request.path.parts):
        yield
        return
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    names = [f"{p.pid}: {' '.join(p.cmdline()) or p.status()}" for p in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
    assert not names, f"left behind: {names}"

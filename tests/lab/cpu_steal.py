"""Measure CPU steal (time that the hypervisor gave to other machines), and wait for its end."""

import time
from pathlib import Path

LOW_STEAL, HIGH_STEAL = 0.03, 0.2
SAMPLE_TIME, TIMEOUT = 2.0, 60.0


class CpuSteal:
    """The fraction of stolen CPU time, over all cores, since this object was created."""

    def __init__(self) -> None:
        self._before = _ticks()

    def share(self) -> float:
        stolen, total = (now - then for now, then in zip(_ticks(), self._before, strict=True))
        return stolen / total if total else 0.0


def wait_for_low_steal() -> None:
    """Wait until a sample of some seconds has little steal, or until the timeout."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        sample = CpuSteal()
        time.sleep(SAMPLE_TIME)
        if sample.share() < LOW_STEAL:
            return


def _ticks() -> tuple[int, int]:
    """Return (stolen, total) ticks since boot."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0]
    ticks = [int(field) for field in first.split()[1:9]]
    return ticks[7], sum(ticks)

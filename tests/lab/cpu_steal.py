"""How much of this machine's time its host gave to others, and a time without that."""

import time
from pathlib import Path

LOW_STEAL, HIGH_STEAL = 0.03, 0.2
SAMPLE_TIME, TIMEOUT = 2.0, 60.0


class CpuSteal:
    """The share of the time, over all cores, since this was made."""

    def __init__(self) -> None:
        self._before = _ticks()

    def share(self) -> float:
        stolen, total = (now - then for now, then in zip(_ticks(), self._before, strict=True))
        return stolen / total if total else 0.0


def wait_for_low_steal() -> None:
    """Until a look of some seconds finds (almost) nothing stolen, or patience ends."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        sample = CpuSteal()
        time.sleep(SAMPLE_TIME)
        if sample.share() < LOW_STEAL:
            return


def _ticks() -> tuple[int, int]:
    """(stolen, all), from the kernel's count since boot."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0]
    ticks = [int(field) for field in first.split()[1:9]]
    return ticks[7], sum(ticks)

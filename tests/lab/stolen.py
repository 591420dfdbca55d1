"""How much of this machine's time its host gave to others, and a time without that."""

import time
from pathlib import Path

CALM, HOPELESS = 0.03, 0.2
LOOK, PATIENCE = 2.0, 60.0


class Stolen:
    """The share of the time, over all cores, since this was made."""

    def __init__(self) -> None:
        self._before = _ticks()

    def share(self) -> float:
        stolen, total = (now - then for now, then in zip(_ticks(), self._before, strict=True))
        return stolen / total if total else 0.0


def wait_for_calm() -> None:
    """Until a look of some seconds finds (almost) nothing stolen, or patience ends."""
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        look = Stolen()
        time.sleep(LOOK)
        if look.share() < CALM:
            return


def _ticks() -> tuple[int, int]:
    """(stolen, all), from the kernel's count since boot."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0]
    ticks = [int(field) for field in first.split()[1:9]]
    return ticks[7], sum(ticks)

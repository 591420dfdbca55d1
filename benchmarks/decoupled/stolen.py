"""How much of this machine's time its host gave to others: figures of such a time mislead."""

from pathlib import Path

_COUNTS = Path("/proc/stat")


class CpuSteal:
    """The share of the time, over all cores, since this was made."""

    def __init__(self) -> None:
        self._before = _ticks()

    def share(self) -> float:
        stolen, total = (now - then for now, then in zip(_ticks(), self._before, strict=True))
        return stolen / total if total else 0.0


def _ticks() -> tuple[int, int]:
    """(stolen, all), from the kernel's count since boot."""
    first = _COUNTS.read_text().split("\n", 1)[0]
    ticks = [int(field) for field in first.split()[1:9]]
    return ticks[7], sum(ticks)

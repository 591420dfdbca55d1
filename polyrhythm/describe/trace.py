"""A trace: the recorded speeds of each worker of a real job, to be played back in another job.

Speeds are fractions of full speed. A worker's bins divide the recording evenly, and a bin has a
lowest and a highest speed: a plot, or a counter that is polled, shows no more than that.
"""

from dataclasses import dataclass
from pathlib import Path

from polyrhythm.describe.bundled_files import bundled, locate
from polyrhythm.describe.read import read
from polyrhythm.describe.units import check_amount
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Seconds

# Slower is refused, not clipped: no division by 0, and no endless wait due to a data error.
_SLOWEST = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    name: str
    source: str = ""  # who recorded this, and what was changed since
    licence: str = ""
    duration: Seconds | None = None  # of the recording; None: unknown
    workers: tuple[tuple[tuple[float, float], ...], ...]  # [worker][bin] = lowest, highest speed

    def __post_init__(self) -> None:
        check_amount("duration", self.duration, Seconds, zero=False)
        if not self.workers or not all(self.workers):
            raise DescriptionError(
                f"trace {self.name!r} has a worker without speeds"
                if self.workers
                else f"trace {self.name!r} has no workers",
                expected="at least one worker, and at least one bin for each",
                fix="add what was recorded, or remove the empty list",
            )
        for worker, bins in enumerate(self.workers):
            for i, (lowest, highest) in enumerate(bins):
                if not _SLOWEST <= lowest <= highest <= 1:
                    raise DescriptionError(
                        f"workers[{worker}][{i}]: speed from {lowest:g} to {highest:g}",
                        expected=f"lowest, then highest, between {_SLOWEST:g} and 1 (full speed)",
                        fix="divide by the highest of all; use a [[pause]] for speed 0",
                    )

    def slowdown(self, worker: int, part: float, luck: float) -> float:
        """Return the factor of slowness when `part` (0 to 1) of the recording has passed.

        `luck` (0 to 1) chooses uniformly between the two speeds of a bin. Past its end, the
        recording stays at its last bin.
        """
        bins = self.workers[worker]
        lowest, highest = bins[min(int(min(part, 1.0) * len(bins)), len(bins) - 1)]
        return 1 / (lowest + luck * (highest - lowest))

    @classmethod
    def load(cls, source: str | Path) -> "Trace":
        """Read a .toml or .json file, or one of `bundled_traces()` by its name."""
        with locate("trace", source, "traces") as path:
            return read(path, cls)


def bundled_traces() -> tuple[str, ...]:
    """Return the names of the bundled traces."""
    return bundled("traces")

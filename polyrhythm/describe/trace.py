"""A trace: how fast each worker of a real job once was, to be played back to another job.

Speeds are fractions of full speed. Each worker's bins share the recording evenly, and a bin has a
lowest and a highest speed: a plot, or a counter that is read now and then, shows no more than that.
"""

from dataclasses import dataclass
from pathlib import Path

from polyrhythm.describe.bundled import bundled, locate
from polyrhythm.describe.read import read
from polyrhythm.describe.units import check_amount
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Seconds

# Slower is refused, not clipped: nothing divides by 0, and nobody waits for ever by a slip of data.
_SLOWEST = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    name: str
    source: str = ""  # who recorded this, and what was changed since
    licence: str = ""
    duration: Seconds | None = None  # of the recording; None: nobody knows
    workers: tuple[tuple[tuple[float, float], ...], ...]  # [worker][bin] = lowest, highest speed

    def __post_init__(self) -> None:
        if self.duration is not None:
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
                        fix="divide by the highest of all; standing still is a [[pause]], no speed",
                    )

    def slowdown(self, worker: int, part: float, luck: float) -> float:
        """How many times as long work takes when `part` of the recording, 0 to 1, has passed.

        Between the two speeds of a bin, `luck` (0 to 1) decides evenly. Past its end, the
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
    """The names of the traces that come with Polyrhythm."""
    return bundled("traces")

"""What a job in the lab that computes by sleeping has shown."""

from dataclasses import dataclass

from polyrhythm.lab.commands import SwitchTiming
from polyrhythm.types import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    ends: tuple[tuple[Seconds, ...], ...]  # of each pipeline's steps, since all began
    switch_timing: SwitchTiming  # of the emulated network meanwhile

    @property
    def trouble(self) -> str | None:
        """Why the emulated network was no good, if it was not."""
        return self.switch_timing.trouble

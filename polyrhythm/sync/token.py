"""The enforcement token: one stage at a time may wait for more than its window.

A stage whose candidate is not valid has to wait for more workers. If two stages did so at once,
each could wait for a worker that the other one holds up, through the pipeline between them, and
nobody would move again. So a stage waits only while it holds the one token of the job; the others
form their groups without enforcement meanwhile. The worker that the holder waits for can be delayed
only by other stages of its pipeline; those wait for no longer than a window; so it comes.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023, section 3.4 (deadlock prevention, Figure 3).
Departures: in the paper a stage holds it until its group is formed, so one lost worker ends all
enforcement for good. Here it is a lease: it ends by itself; the stage gives it back when the worker
it waited for has left and nobody else is lacking; and a stage that had it last lets others go first
if they have asked.
"""

import math
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.types import Seconds

NOBODY = -1
LEASE: Seconds = 300.0  # longer than the slowest worker's step, or waiting for it is in vain


@dataclass(slots=True)
class EnforcementToken:
    """Shared by the policies of all stages of a job."""

    lease: Seconds = LEASE
    holder: int = field(default=NOBODY, init=False)  # a stage
    expires: Seconds = field(default=-math.inf, init=False)
    _last: int = field(default=NOBODY, init=False)  # the stage that had it before
    _refused: dict[int, Seconds] = field(default_factory=dict, init=False)  # when, by stage

    def __post_init__(self) -> None:
        if not self.lease > 0:
            raise PolicyError(
                f"lease={self.lease:g}",
                expected="more than 0 seconds",
                fix="make it several steps of the slowest worker",
            )

    def acquire(self, stage: int, now: Seconds) -> bool:
        """Whether `stage` may wait, until `expires` at most; it may not ask while it holds it."""
        assert self.holder != stage or now >= self.expires, f"stage {stage} takes the token twice"
        if self._is_held(now) or self._goes_after_others(stage, now):
            self._refused[stage] = now
            return False
        self.holder, self._last = stage, stage
        self.expires = now + self.lease
        self._refused.pop(stage, None)
        return True

    def release(self, stage: int) -> None:
        """`stage` waits no more; nothing happens if its lease has ended and another one has it."""
        if self.holder == stage:
            self.holder, self.expires = NOBODY, -math.inf

    def withdraw(self, stage: int) -> None:
        """`stage` needs no token after all: its last candidate was valid."""
        self._refused.pop(stage, None)

    def why_not(self, stage: int, now: Seconds) -> str:
        """Why `stage` was refused just now."""
        if self._is_held(now):
            return f"stage {self.holder} has the token"
        first = min(other for other in self._refused if other != stage)
        return f"stage {first} has the token next"

    def _is_held(self, now: Seconds) -> bool:
        return self.holder != NOBODY and now < self.expires

    def _goes_after_others(self, stage: int, now: Seconds) -> bool:
        """Whether it had the token last, and another stage has asked in vain within a lease.

        Without this a stage with a worker that is always slow could take it every time.
        """
        if stage != self._last:
            return False
        self._refused = {other: at for other, at in self._refused.items() if now - at < self.lease}
        return any(other != stage for other in self._refused)

"""The enforcement token: one stage at a time may wait for more than its window.

A stage whose candidate is not valid must wait for more workers. If two stages did so at once, each
could wait for a worker that the other one blocks, through the pipeline between them: a deadlock. So
a stage waits only while it holds the one token of the job; meanwhile the others form their groups
without enforcement. The worker that the holder waits for can be delayed only by other stages of its
pipeline; those wait no longer than a window; so it becomes ready.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023, section 3.4 (deadlock prevention, Figure 3).
Departures: in the paper a stage holds the token until its group is formed, so one lost worker ends
all enforcement for good. Here the token is a lease: it expires; the stage releases it when the
worker it waited for has left and no other is missing; and the last holder lets other stages go
first if they have asked for it.
"""

import math
from dataclasses import dataclass, field

from polyrhythm.errors import PolicyError
from polyrhythm.types import Seconds

NO_STAGE = -1
LEASE: Seconds = 300.0  # must exceed the slowest worker's step, or waiting for it is useless


@dataclass(slots=True)
class EnforcementToken:
    """The token that the policies of all stages of a job share."""

    lease: Seconds = LEASE
    holder: int = field(default=NO_STAGE, init=False)  # a stage
    expires: Seconds = field(default=-math.inf, init=False)
    _last: int = field(default=NO_STAGE, init=False)  # the last stage that acquired it
    _refused: dict[int, Seconds] = field(default_factory=dict, init=False)  # time, by stage

    def __post_init__(self) -> None:
        if not self.lease > 0:
            raise PolicyError(
                f"lease={self.lease:g}",
                expected="more than 0 seconds",
                fix="use several times the slowest worker's step",
            )

    def acquire(self, stage: int, now: Seconds) -> bool:
        """Try to acquire the token for `stage`, which must not hold it, until `expires`."""
        assert self.holder != stage or now >= self.expires, f"stage {stage} already has the token"
        if self._is_held(now) or self._goes_after_others(stage, now):
            self._refused[stage] = now
            return False
        self.holder, self._last = stage, stage
        self.expires = now + self.lease
        self._refused.pop(stage, None)
        return True

    def release(self, stage: int) -> None:
        """Release the token; no effect if the lease of `stage` ended and another stage has it."""
        if self.holder == stage:
            self.holder, self.expires = NO_STAGE, -math.inf

    def cancel_request(self, stage: int) -> None:
        """Forget that `stage` asked for the token: its last candidate was valid."""
        self._refused.pop(stage, None)

    def why_not(self, stage: int, now: Seconds) -> str:
        """Reason why `stage` was refused at `now`."""
        if self._is_held(now):
            return f"stage {self.holder} has the token"
        first = min(other for other in self._refused if other != stage)
        return f"stage {first} has the token next"

    def _is_held(self, now: Seconds) -> bool:
        return self.holder != NO_STAGE and now < self.expires

    def _goes_after_others(self, stage: int, now: Seconds) -> bool:
        """Whether `stage` had the token last, and another one was refused within a lease.

        Without this a stage with a permanent straggler could acquire it every time.
        """
        if stage != self._last:
            return False
        self._refused = {other: t for other, t in self._refused.items() if now - t < self.lease}
        return any(other != stage for other in self._refused)

"""Timeouts of groups, learned from the durations of past groups.

A fixed timeout is too short for a slow network, and on a fast one a lost peer blocks for minutes.
Here it is ten times the median of past durations, within bounds: a few outliers do not move the
median, and ten times is enough for a group of all workers after many pairs, and for a temporary
straggler. (The median plus k deviations would be the median itself when durations are steady, and
at most 1 + k times the median: for positive values the median absolute deviation is not above the
median.) A missed timeout doubles the next one, since an aborted group does not show how long it
would have taken; each group that completes halves it again.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from polyrhythm.errors import PolicyError
from polyrhythm.types import Seconds

NUM_SAMPLES = 64  # past durations kept
REFRESH = 8  # compute the median anew after this many new durations


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a scheduler's waits."""

    floor: Seconds = 1.0  # of a learned timeout
    ceiling: Seconds = 240.0  # of an average's timeout; below the lease of the enforcement token
    ready_timeout: Seconds = 300.0  # longest wait of an assigned group for members that compute
    timeout_factor: float = 10.0  # an average, or a step, may take this many medians
    # A ready worker waits for a group for `group_timeout`, or for this many steps if that is
    # longer, but not longer than `ready_timeout`.
    group_timeout: Seconds = math.inf
    group_timeout_steps: float = 3.0
    average_all_timeout: Seconds = 540.0  # below the timeout of a worker's own waits
    max_retries: float = 2  # a worker skips the average after more failed groups in one step

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.ceiling:
            raise PolicyError(
                f"floor={self.floor:g} ceiling={self.ceiling:g}",
                expected="0 < floor <= ceiling, in seconds",
                fix="omit them: timeouts are learned between the defaults",
            )
        above_0 = (
            self.ready_timeout,
            self.timeout_factor,
            self.group_timeout,
            self.group_timeout_steps,
            self.average_all_timeout,
        )
        if not (all(limit > 0 for limit in above_0) and self.max_retries >= 0):
            raise PolicyError(
                f"ready_timeout={self.ready_timeout:g} timeout_factor={self.timeout_factor:g} "
                f"group_timeout={self.group_timeout:g} "
                f"group_timeout_steps={self.group_timeout_steps:g} "
                f"average_all_timeout={self.average_all_timeout:g} max_retries={self.max_retries}",
                expected="max_retries of 0 or more, all others above 0",
                fix="omit them for the defaults",
            )


@dataclass(slots=True)
class LearnedTimeout:
    """A timeout learned from the groups of one stage, or from its steps."""

    timeout_factor: float  # multiple of the typical duration
    floor: Seconds
    ceiling: Seconds
    current: Seconds  # the timeout now; the initial value holds until one is learned
    usual: Callable[[Iterable[Seconds]], Seconds] = median  # the typical duration
    _past: deque[Seconds] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES), init=False)
    _num_new: int = field(default=0, init=False)
    _learned: Seconds = field(init=False)
    _slack: int = field(default=1, init=False)  # doubled by each missed timeout

    def __post_init__(self) -> None:
        self._learned = self.current

    def record(self, duration: Seconds) -> None:
        """Learn from the duration of a completed group."""
        self._past.append(duration)
        self._num_new += 1
        if self._num_new == REFRESH:  # never from fewer: they show too little of the spread
            self._num_new = 0
            self._learned = self.timeout_factor * self.usual(self._past)
        elif self._slack == 1:
            return
        self._slack = max(self._slack // 2, 1)
        self._update()

    def record_timeout(self) -> None:
        """Double the timeout after a group that missed it."""
        self._slack = min(self._slack * 2, 2**20)
        self._update()

    def _update(self) -> None:
        timeout = max(self._learned, self.floor) * self._slack
        self.current = min(timeout, self.ceiling)

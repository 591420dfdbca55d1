"""Limits of a group's time: how long it may take, learned from how long groups have taken.

A fixed deadline is too short on a slow network and lets a fast one hang for minutes. Here it is ten
times the median of past times, within bounds: a few outliers do not move the median, and ten times
is enough for the group of everybody after many pairs, and for a worker that is slow just now. (The
median plus k deviations would be the median itself when times are steady, and never more than that
much: of times above 0, the median absolute deviation is not above the median.) A deadline that was
missed doubles the next one, since a group that was cut off says nothing about how long it would
have taken; each group that makes it halves that again.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from polyrhythm.errors import PolicyError
from polyrhythm.types import Seconds

NUM_SAMPLES = 64  # groups that count
REFRESH = 8  # a median is worth computing after so many new ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How patient a scheduler is."""

    floor: Seconds = 1.0  # of a deadline
    ceiling: Seconds = 240.0  # of a deadline; less than the lease of the enforcement token
    ready_timeout: Seconds = 300.0  # how long at most an assigned group waits for who computes
    timeout_factor: float = (
        10.0  # an average, or a step, may take so many times as long as is usual
    )
    group_timeout: Seconds = (
        math.inf
    )  # how long a ready worker waits for a policy to put it in a group,
    group_timeout_steps: float = (
        3.0  # or so many steps, if that is longer, and not longer than `ready_timeout`
    )
    average_all_timeout: Seconds = (
        540.0  # how long all wait for the last; less than workers wait for anybody
    )
    max_retries: float = 2  # after so many more failed groups, a worker goes on alone

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.ceiling:
            raise PolicyError(
                f"floor={self.floor:g} ceiling={self.ceiling:g}",
                expected="0 < floor <= ceiling, in seconds",
                fix="leave them out: deadlines are learned between them",
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
                f"readiness={self.ready_timeout:g} slower={self.timeout_factor:g} waiting={self.group_timeout:g} "
                f"steps={self.group_timeout_steps:g} gathering={self.average_all_timeout:g} retries={self.max_retries}",
                expected="retries not below 0, all others above",
                fix="leave them out for the defaults",
            )


@dataclass(slots=True)
class LearnedTimeout:
    """Of the groups of one stage, or of its steps."""

    timeout_factor: float  # how many times the usual
    floor: Seconds
    ceiling: Seconds
    current: Seconds  # of what starts now; at first, of what starts before anything is known
    usual: Callable[[Iterable[Seconds]], Seconds] = median
    _past: deque[Seconds] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES), init=False)
    _num_new: int = field(default=0, init=False)
    _learned: Seconds = field(init=False)
    _slack: int = field(default=1, init=False)  # doubled by each deadline missed

    def __post_init__(self) -> None:
        self._learned = self.current

    def record(self, duration: Seconds) -> None:
        """A group took this long."""
        self._past.append(duration)
        self._num_new += 1
        if self._num_new == REFRESH:  # never of fewer: they would say little about the spread
            self._num_new = 0
            self._learned = self.timeout_factor * self.usual(self._past)
        elif self._slack == 1:
            return
        self._slack = max(self._slack // 2, 1)
        self._update()

    def record_timeout(self) -> None:
        """A group was cut off at its deadline."""
        self._slack = min(self._slack * 2, 2**20)
        self._update()

    def _update(self) -> None:
        deadline = max(self._learned, self.floor) * self._slack
        self.current = min(deadline, self.ceiling)

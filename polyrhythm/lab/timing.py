"""Repeat measurements in a lab whose switch delivered packets late."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from polyrhythm.lab.commands import SwitchTiming
from polyrhythm.lab.lab import Lab
from polyrhythm.types import Seconds

MAX_ATTEMPTS = 3

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRounds(Generic[Value]):
    """The values of all rounds on time; if every round was late, the last one and `trouble`."""

    values: list[Value]
    switch_timing: SwitchTiming  # of the last round
    num_rejected: int  # rounds not in `values`, because the switch was late
    trouble: str | None  # why the value is unreliable, if every round was late


def rounds_on_time(
    lab: Lab,
    work: Callable[[], Value],
    *,
    num_rounds: int = 1,
    max_attempts: int = MAX_ATTEMPTS,
    deadline: Seconds = math.inf,
) -> TimedRounds[Value]:
    """Repeat `work` until `num_rounds` rounds were on time, or for `max_attempts` rounds in all.

    After `deadline` (time.monotonic()) no further round starts.
    """
    values: list[Value] = []
    late: list[Value] = []
    while True:
        lab.report(reset=True)
        value = work()
        switch_timing = lab.report().switch_timing
        (values if switch_timing.trouble is None else late).append(value)
        enough = len(values) == num_rounds or len(values) + len(late) == max_attempts
        if enough or time.monotonic() >= deadline:
            break
    return TimedRounds(
        values=values or late[-1:],
        switch_timing=switch_timing,
        num_rejected=len(late) if values else len(late) - 1,
        trouble=None if values else switch_timing.trouble,
    )

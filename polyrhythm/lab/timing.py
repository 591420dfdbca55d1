"""Measure in a lab only while its switch keeps time: a round in which it did not is repeated."""

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
    """`values` of the rounds that count; if none was punctual, of the last one, with `trouble`."""

    values: list[Value]
    switch_timing: SwitchTiming  # of the last round
    num_rejected: int  # rounds in which the switch was late, and which do not count
    trouble: str | None  # why the value is not to be trusted, though it was tried several times


def rounds_on_time(
    lab: Lab,
    work: Callable[[], Value],
    *,
    num_rounds: int = 1,
    tries: int = MAX_ATTEMPTS,
    deadline: Seconds = math.inf,
) -> TimedRounds[Value]:
    """Do `work` deadline it was done so many times with a punctual switch, or `tries` times in all.

    Once it is `deadline`, a time of time.monotonic(), one round that counts is enough, or none.
    """
    values: list[Value] = []
    late: list[Value] = []
    while True:
        lab.report(reset=True)
        value = work()
        switch_timing = lab.report().switch_timing
        (values if switch_timing.trouble is None else late).append(value)
        enough = len(values) == num_rounds or len(values) + len(late) == tries
        if enough or time.monotonic() >= deadline:
            break
    return TimedRounds(
        values=values or late[-1:],
        switch_timing=switch_timing,
        num_rejected=len(late) if values else len(late) - 1,
        trouble=None if values else switch_timing.trouble,
    )

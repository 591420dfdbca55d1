"""Measure in a lab only while its switch keeps time: a round in which it did not is repeated."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from polyrhythm.lab.lab import Lab
from polyrhythm.lab.orders import Punctuality
from polyrhythm.types import Seconds

TRIES = 3

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds(Generic[Value]):
    """`values` of the rounds that count; if none was punctual, of the last one, with `trouble`."""

    values: list[Value]
    punctuality: Punctuality  # of the last round
    num_rejected: int  # rounds in which the switch was late, and which do not count
    trouble: str | None  # why the value is not to be trusted, though it was tried several times


def punctual_rounds(
    lab: Lab,
    work: Callable[[], Value],
    *,
    num_rounds: int = 1,
    tries: int = TRIES,
    until: Seconds = math.inf,
) -> Rounds[Value]:
    """Do `work` until it was done so many times with a punctual switch, or `tries` times in all.

    Once it is `until`, a time of time.monotonic(), one round that counts is enough, or none.
    """
    values: list[Value] = []
    late: list[Value] = []
    while True:
        lab.report(reset=True)
        value = work()
        punctuality = lab.report().punctuality
        (values if punctuality.trouble is None else late).append(value)
        enough = len(values) == num_rounds or len(values) + len(late) == tries
        if enough or time.monotonic() >= until:
            break
    return Rounds(
        values=values or late[-1:],
        punctuality=punctuality,
        num_rejected=len(late) if values else len(late) - 1,
        trouble=None if values else punctuality.trouble,
    )

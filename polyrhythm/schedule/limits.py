"""Compute in-flight limits from measured times: only a slow link needs slack.

A micro-batch that leaves stage s returns after a transfer each way and the work of the later
stages. To stay busy meanwhile, stage s must hold one micro-batch more than stage s+1 for its own
work, and one more for every period that the two transfers take:

    L_last = 1,   L_s = L_{s+1} + ceil((period + 2 * transfer_s) / period)

where period is forward + backward of the slowest stage: no schedule runs faster than one
micro-batch per period. Transfers that take no time give 1F1B. The rule uses means and one link at a
time; `schedule.candidates` refines it by simulation.
"""

import math
from collections.abc import Sequence

from polyrhythm.errors import ScheduleError
from polyrhythm.types import Seconds

# A quotient that is an integer except for rounding must not cost a further micro-batch.
_ROUNDING = 1e-9


def one_f_one_b_limits(num_stages: int) -> tuple[int, ...]:
    """Return the limits with which `bounded` equals 1F1B."""
    if num_stages < 1:
        raise ScheduleError(
            f"num_stages={num_stages}", expected="at least 1", fix="count the stages"
        )
    return tuple(range(num_stages, 0, -1))


def limits_for(*, period: Seconds, transfers: Sequence[Seconds]) -> tuple[int, ...]:
    """Return the limits that hide `transfers`, the mean of both directions of each link."""
    if not 0 < period < math.inf:
        raise ScheduleError(
            f"period={period:g} s",
            expected="the forward and backward time of the slowest stage, above 0",
            fix="measure at least one step",
        )
    for link, transfer in enumerate(transfers):
        if not 0 <= transfer < math.inf:
            raise ScheduleError(
                f"a transfer on link {link} takes {transfer:g} s",
                expected="a finite time, 0 or more",
                fix="measure it again",
            )
    limits = [1]
    for transfer in reversed(transfers):
        limits.append(limits[-1] + 1 + math.ceil(2 * transfer / period - _ROUNDING))
    return tuple(reversed(limits))

"""In-flight limits from measured times: only a slow link needs slack.

A micro-batch that leaves stage s comes back after a transfer each way and the work of the stages
behind it. To keep stage s busy meanwhile, it must hold one micro-batch more than stage s+1 for its
own work, and one more for every period that the two transfers take:

    L_last = 1,   L_s = L_{s+1} + ceil((period + 2 * transfer_s) / period)

where period is forward + backward of the slowest stage: no schedule runs faster than one
micro-batch per period. Transfers that take no time give 1F1B. The rule looks at one link at a time
and at means; `schedule.candidates` refines it by simulation.
"""

import math
from collections.abc import Sequence

from polyrhythm.errors import ScheduleError
from polyrhythm.types import Seconds

# A quotient of measured times that is whole but for rounding must not cost a micro-batch more.
_ROUNDING = 1e-9


def one_f_one_b_limits(num_stages: int) -> tuple[int, ...]:
    """The limits that make `bounded` 1F1B."""
    if num_stages < 1:
        raise ScheduleError(
            f"num_stages={num_stages}", expected="at least 1", fix="count the stages"
        )
    return tuple(range(num_stages, 0, -1))


def limits_for(*, period: Seconds, transfers: Sequence[Seconds]) -> tuple[int, ...]:
    """The limits that hide `transfers`, one mean of both directions per link between stages."""
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

"""Choose a good schedule for the planner, before a pipeline runs.

The planner needs schedules for many pipelines, so this tries few specs, within memory: 1F1B, the
rule of `schedule.limits`, and limits by Little's law, which hold as many micro-batches as leave
during one micro-batch's round trip from a stage to the last one, or a few more. If one stage lacks
the memory for that, all hold fewer: later stages would only queue micro-batches in front of those
that the first stages wait for. Among the specs within a tolerance of the shortest, the one with the
fewest micro-batches in flight wins. While the job runs, the tuner searches further. Results are
cached by times.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

from polyrhythm.cost.pipeline import PipelineTimes
from polyrhythm.schedule.candidates import Limits, LimitSearch, spec_for_limits
from polyrhythm.schedule.limits import limits_for, one_f_one_b_limits
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Seconds

_TOLERANCE = 0.01  # a step this much longer than the shortest is as good
_ENOUGH_MICROBATCHES = 256  # simulated at most: more do not change the choice
_MORE = (0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 3.0)  # multiples of Little's law
_ROUNDING = 1e-9  # a quotient that is an integer except for rounding must not be rounded up


@lru_cache(maxsize=4096)  # the planner asks again and again for pipelines of equal times
def choose_schedule(
    times: PipelineTimes, num_microbatches: int, max_in_flight: tuple[int, ...]
) -> ScheduleSpec:
    """Return a good spec; `max_in_flight` micro-batches fit on each stage."""
    few = min(num_microbatches, _ENOUGH_MICROBATCHES)
    search = LimitSearch(times, few, max_in_flight)
    limits = dict.fromkeys(map(search.within, _limits(times, few, search.room)))
    enough = min(map(search.length, limits)) * (1 + _TOLERANCE)
    good = [each for each in limits if search.length(each) <= enough]
    return spec_for_limits(min(good, key=lambda each: (sum(each), each)), num_microbatches)


def _limits(times: PipelineTimes, num_microbatches: int, room: Limits) -> Iterator[Limits]:
    yield one_f_one_b_limits(times.num_stages)
    period = times.pace
    if period > 0:
        yield limits_for(period=period, transfers=times.transfers)
        away = list(accumulate(reversed(_round_trips(times))))[::-1]
        # Nor is the period shorter than a round trip divided by the micro-batches that fit.
        tight = max(trip / max_in_flight for trip, max_in_flight in zip(away, room, strict=True))
        for pace in dict.fromkeys((period, max(period, tight))):
            for more in _MORE:
                held = (math.ceil(trip * more / pace - _ROUNDING) for trip in away[:-1])
                yield (*(max(1, count) for count in held), 1)
    yield (num_microbatches,) * times.num_stages


def _round_trips(times: PipelineTimes) -> list[Seconds]:
    """Return per stage its own work plus the transfers to the next stage and back."""
    links = zip(times.activations, times.gradients, strict=True)
    transfers = [there.transfer + back.transfer for there, back in links]
    works = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
    return [work + transfer for work, transfer in zip(works, [*transfers, 0.0], strict=True)]

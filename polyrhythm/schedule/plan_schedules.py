"""Schedules for a planner: recipes by name, and a good one for pipelines that do not run yet.

A planner asks for many pipelines, so this looks at few recipes, as far as memory allows: 1F1B, the
rule of `schedule.limits`, and limits by Little's law. Those hold as many micro-batches as leave in
the time that one takes from a stage to the last and back, or a few more. Where one stage has not
the room for that, all hold fewer: what later stages took in too early would wait there, in front of
what the first ones wait for. Of all within a tolerance of the shortest, the one that holds the
fewest is taken. While the job runs, the tuner looks more closely. Pipelines that take the same
times get the same answer, from memory.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from polyrhythm.cost.pipeline import PipelineTimes, length
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.candidates import Limits, spec_for_limits
from polyrhythm.schedule.limits import limits_for, one_f_one_b_limits
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Seconds

_TOLERANCE = 0.01  # a step this much longer than the shortest is as good
_ENOUGH_MICROBATCHES = 256  # to tell which one is best; more only repeat what these show
_MORE = (0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 3.0)  # times as many as Little's law says
_ROUNDING = 1e-9  # a quotient that is whole but for rounding must not cost a micro-batch more


class PlannedSchedules:
    def __init__(self) -> None:
        self._chosen: dict[tuple[PipelineTimes, int, tuple[int, ...]], str] = {}

    def build(self, spec: str, *, num_stages: int, num_microbatches: int) -> Schedule:
        return ScheduleSpec.parse(spec).build(
            num_stages=num_stages, num_microbatches=num_microbatches
        )

    def choose(
        self, times: PipelineTimes, *, num_microbatches: int, max_in_flight: Sequence[int]
    ) -> str:
        """`max_in_flight` micro-batches fit on each stage."""
        key = times, num_microbatches, tuple(max_in_flight)
        if key not in self._chosen:
            self._chosen[key] = str(_best(times, num_microbatches, max_in_flight))
        return self._chosen[key]


def _best(
    times: PipelineTimes, num_microbatches: int, max_in_flight: Sequence[int]
) -> ScheduleSpec:
    few = min(num_microbatches, _ENOUGH_MICROBATCHES)
    # A stage may not hold more than the one before, so the room of one is that of all after.
    room = tuple(accumulate((min(m, few) for m in max_in_flight), min))
    lengths = {}
    for limits in dict.fromkeys(
        tuple(map(min, limits, room)) for limits in _limits(times, few, room)
    ):
        schedule = ScheduleSpec("bounded", limits=limits).build(
            num_stages=times.num_stages, num_microbatches=few
        )
        lengths[limits] = length(schedule, times)
    enough = min(lengths.values()) * (1 + _TOLERANCE)
    good = [limits for limits, takes in lengths.items() if takes <= enough]
    return spec_for_limits(min(good, key=lambda limits: (sum(limits), limits)), num_microbatches)


def _limits(times: PipelineTimes, num_microbatches: int, room: Limits) -> Iterator[Limits]:
    yield one_f_one_b_limits(times.num_stages)
    period = times.pace
    if period > 0:
        yield limits_for(period=period, transfers=times.transfers)
        away = list(accumulate(reversed(_round_trips(times))))[::-1]
        # Nor is one done sooner than its way to the last stage and back, shared by all with room.
        tight = max(trip / max_in_flight for trip, max_in_flight in zip(away, room, strict=True))
        for pace in dict.fromkeys((period, max(period, tight))):
            for more in _MORE:
                held = (math.ceil(trip * more / pace - _ROUNDING) for trip in away[:-1])
                yield (*(max(1, count) for count in held), 1)
    yield (num_microbatches,) * times.num_stages


def _round_trips(times: PipelineTimes) -> list[Seconds]:
    """Per stage, its own work and the transfers to the next one and back."""
    links = zip(times.activations, times.gradients, strict=True)
    transfers = [there.transfer + back.transfer for there, back in links]
    works = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
    return [work + transfer for work, transfer in zip(works, [*transfers, 0.0], strict=True)]

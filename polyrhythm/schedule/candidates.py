"""Find good schedules for one micro-batch size by simulating many candidates.

Candidates are 1F1B, kFkB while a larger k helps, GPipe, and in-flight limits: those of the rule
(`schedule.limits`), and better ones found from there. The search has two steps. It gives one link
more slack, by raising the limits of all stages before it, while that shortens the step; then it
lowers limits again while the step stays within a tolerance of the shortest.

Source: Yang et al., "Ada-Grouper", arXiv:2303.01675, sections 4.2 and 4.3, for choosing among kFkB
by predicted length within a memory limit. Departures: limits per stage, which hold less for the
same length; the length is simulated with link contention and recorded transfers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.cost.pipeline import PipelineTimes, length
from polyrhythm.schedule.builders import Schedule, build
from polyrhythm.schedule.limits import limits_for, one_f_one_b_limits
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Seconds

Limits = tuple[int, ...]

# A search step must shorten the pipeline by this fraction; less is not worth the memory.
_WORTHWHILE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCandidate:
    """A schedule with a micro-batch size and number."""

    microbatch_size: int
    num_microbatches: int
    spec: ScheduleSpec
    in_flight: tuple[int, ...]  # per stage, at most

    @classmethod
    def of(
        cls, spec: ScheduleSpec, *, num_stages: int, microbatch_size: int, num_microbatches: int
    ) -> "ScheduleCandidate":
        schedule = spec.build(num_stages=num_stages, num_microbatches=num_microbatches)
        return cls(
            microbatch_size=microbatch_size,
            num_microbatches=num_microbatches,
            spec=spec,
            in_flight=tuple(map(peak_in_flight, schedule)),
        )

    def build(self) -> Schedule:
        """Return the actions of every stage."""
        return self.spec.build(
            num_stages=len(self.in_flight), num_microbatches=self.num_microbatches
        )

    def __str__(self) -> str:
        return f"{self.spec} of {self.num_microbatches} x {self.microbatch_size}"


def spec_for_limits(limits: Limits, num_microbatches: int) -> ScheduleSpec:
    """Return the simplest spec for these limits: 1f1b or gpipe, if equal, otherwise bounded."""
    limits = tuple(min(limit, num_microbatches) for limit in limits)
    plain = one_f_one_b_limits(len(limits))
    if limits == tuple(min(limit, num_microbatches) for limit in plain):
        return ScheduleSpec("1f1b")
    if min(limits) == num_microbatches:
        return ScheduleSpec("gpipe")
    return ScheduleSpec("bounded", limits=limits)


def shortlist(
    times: PipelineTimes, *, num_microbatches: int, max_in_flight: Sequence[int], tolerance: float
) -> dict[ScheduleSpec, Seconds]:
    """Return good specs with their predicted lengths, within `max_in_flight` on each stage."""
    search = LimitSearch(times, num_microbatches, max_in_flight)
    found = dict(_kfkb(times, num_microbatches, max_in_flight))
    starts = [search.within(one_f_one_b_limits(times.num_stages))]
    if times.period > 0:
        starts.append(search.within(limits_for(period=times.period, transfers=times.transfers)))
    tops = [*starts, *map(search.grown, starts)]
    everything = search.within((num_microbatches,) * times.num_stages)
    enough = min([*found.values(), *map(search.length, [*tops, everything])]) * (1 + tolerance)
    light = [search.trimmed(top, enough) for top in tops if search.length(top) <= enough]
    for limits in (*tops, *light, everything):
        found[spec_for_limits(limits, num_microbatches)] = search.length(limits)
    return found


def _kfkb(
    times: PipelineTimes, num_microbatches: int, max_in_flight: Sequence[int]
) -> Iterator[tuple[ScheduleSpec, Seconds]]:
    """Yield kFkB from k=2 on, while it fits and one of the last two was an improvement."""
    shortest, idle = float("inf"), 0
    for k in range(2, num_microbatches):
        schedule = build(
            "kfkb", num_stages=times.num_stages, num_microbatches=num_microbatches, k=k
        )
        held = zip(map(peak_in_flight, schedule), max_in_flight, strict=True)
        if idle == 2 or any(peak > room for peak, room in held):
            return
        time = length(schedule, times)
        yield ScheduleSpec("kfkb", k=k), time
        idle = 0 if time < shortest * (1 - _WORTHWHILE) else idle + 1
        shortest = min(shortest, time)


class LimitSearch:
    """Limits that fit, with their simulated lengths; each is simulated once."""

    def __init__(
        self, times: PipelineTimes, num_microbatches: int, max_in_flight: Sequence[int]
    ) -> None:
        self._times, self._num_microbatches = times, num_microbatches
        # Limits never increase along the stages, so a stage's capacity bounds all later stages.
        self.room = tuple(accumulate((min(m, num_microbatches) for m in max_in_flight), min))
        self._lengths: dict[Limits, Seconds] = {}

    def within(self, limits: Limits) -> Limits:
        return tuple(map(min, limits, self.room))

    def length(self, limits: Limits) -> Seconds:
        if limits not in self._lengths:
            schedule = build(
                "bounded",
                num_stages=len(limits),
                num_microbatches=self._num_microbatches,
                limits=limits,
            )
            self._lengths[limits] = length(schedule, self._times)
        return self._lengths[limits]

    def grown(self, limits: Limits) -> Limits:
        """Repeatedly give slack to the link where it helps most."""
        while True:
            deeper = [
                raised
                for link in range(len(limits) - 1)
                if (raised := self.within(_moved(limits, link, +1))) != limits
            ]
            best = min(deeper, key=self.length, default=limits)
            if self.length(best) > self.length(limits) * (1 - _WORTHWHILE) or best == limits:
                return limits
            limits = best

    def trimmed(self, limits: Limits, enough: Seconds) -> Limits:
        """Repeatedly lower limits by the most that keeps the step within `enough`."""
        while True:
            for _, equal in groupby(sorted(_lowered(limits), key=sum), key=sum):
                fast = [lower for lower in equal if self.length(lower) <= enough]
                if fast:
                    limits = min(fast, key=self.length)
                    break
            else:
                return limits


def _moved(limits: Limits, link: int, by: int) -> Limits:
    """Change the slack of one link: the limits of all stages before it."""
    return (*(limit + by for limit in limits[: link + 1]), *limits[link + 1 :])


def _lowered(limits: Limits) -> Iterator[Limits]:
    """Yield limits lowered by one for all stages up to some stage, or for that stage alone."""
    for stage, (limit, floor) in enumerate(zip(limits, (*limits[1:], 1), strict=True)):
        if limit > floor:
            yield _moved(limits, stage, -1)
            if stage > 0:
                yield (*limits[:stage], limit - 1, *limits[stage + 1 :])

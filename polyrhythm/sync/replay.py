"""What-if replay: the step time under each sync mode, from recently measured steps.

Nothing is modelled: measured steps are replayed in virtual time. In `decoupled`, all pipelines wait
for the slowest. In `balanced`, that policy's MicrobatchBalancer assigns micro-batches from step to
step. In group modes the policy itself forms the groups, while each pipeline takes its measured
times.

Source: none. Departures from reality: a pipeline reports as one worker, though each of its stages
has its own groups; a transfer takes its measured time, whichever workers it connects.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, quantiles
from typing import NamedTuple, Self

from polyrhythm.errors import PolicyError
from polyrhythm.sync.modes import AUTO_MODES, make_policies
from polyrhythm.sync.policies.balanced import MicrobatchBalancer
from polyrhythm.types import Group, Seconds, Worker


class StepTiming(NamedTuple):
    """Times of one step of one pipeline, measured at its first stage, which starts and ends it."""

    compute: Seconds  # forwards and backwards, with waits for other stages, without averages
    waited: Seconds  # for averages: for other members, and for the exposed part of the exchange
    averaging: Seconds  # the exchange alone, hidden or not; of the whole buffer, both directions
    num_microbatches: int
    num_members: int  # of the group; 1 if it continued alone


StepTimings = Sequence[Sequence[StepTiming]]  # steps by pipeline; in lockstep equally many
SlotTimes = list[list[Seconds]]  # seconds per slot, by pipeline and step


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """Properties of a job that do not change during training."""

    shares: tuple[int, ...]  # micro-batches of each pipeline in a step, unless balanced
    num_stages: int = 1
    sync_modes: tuple[str, ...] = AUTO_MODES  # that the job can use
    max_microbatches: tuple[int, ...] | None = None  # by pipeline, limited by memory
    overlap: bool = False  # in groups: continue at once, and apply averages a step later
    is_one_machine: bool = False  # pipelines share cores, memory or power: no mode avoids that
    coordinator_round_trip: Seconds = 0.0  # two round trips, of an average in a group

    def __post_init__(self) -> None:
        first = AUTO_MODES[0]
        if not set(AUTO_MODES) >= set(self.sync_modes) >= {first}:
            raise PolicyError(
                f"sync_modes={', '.join(self.sync_modes)}",
                expected=f"some of {', '.join(AUTO_MODES)}, including {first}",
                fix="omit it for all of them",
            )
        if not self.shares or min(self.shares) < 1:
            raise PolicyError(
                f"shares={self.shares}",
                expected="one or more micro-batches for each pipeline",
                fix="use a larger batch, or fewer pipelines",
            )

    @property
    def num_pipelines(self) -> int:
        return len(self.shares)

    def among(self, pipelines: Sequence[int]) -> "JobShape":
        """Return the shape without the other pipelines: these compute the whole batch, equally."""
        share, num_larger = divmod(sum(self.shares), len(pipelines))
        limits = self.max_microbatches
        return replace(
            self,
            shares=tuple(share + (index < num_larger) for index in range(len(pipelines))),
            max_microbatches=None if limits is None else tuple(limits[p] for p in pipelines),
        )

    def slots(self, num_microbatches: int) -> int:
        """Length of a pipeline's step in micro-batches, with fill and drain."""
        return num_microbatches + self.num_stages - 1

    def units(self, times: StepTimings) -> SlotTimes:
        return [[t.compute / self.slots(t.num_microbatches) for t in steps] for steps in times]


class Estimate(NamedTuple):
    """Estimated time of a step in which all pipelines together compute one batch."""

    seconds: Seconds
    waiting: Seconds = math.inf  # mean wait for other pipelines: no other mode gains more

    @classmethod
    def from_durations(cls, durations: Sequence[Seconds], waiting: Seconds = math.inf) -> Self:
        return cls(fmean(durations), waiting)

    def plus(self, seconds: Seconds) -> Self:
        return self._replace(seconds=self.seconds + seconds)

    def scaled(self, factor: float) -> Self:
        return self._replace(seconds=self.seconds * factor)


def combine(estimates: Sequence[Estimate]) -> Estimate:
    """Combine the estimates of several windows of steps."""
    seconds, waiting = (fmean(values) for values in zip(*estimates, strict=True))
    return Estimate(seconds, waiting)


class LinkCost(NamedTuple):
    """Cost of an average on the links."""

    base: Seconds = 0.0  # to send the whole buffer in both directions
    excess: Seconds = 0.0  # mean time that slow links add to an average of all

    def cost(self, num_members: int) -> Seconds:
        """Cost of a group without slow links: members send all but their own shard."""
        return self.base * (num_members - 1) / num_members

    def global_cost(self, num_pipelines: int) -> Seconds:
        """Cost of an average of all pipelines, including slow links."""
        return self.cost(num_pipelines) + self.excess

    def excess_per_member(self, timing: StepTiming) -> Seconds:
        """Time that slow links added to an average, divided by its members."""
        return max(0.0, timing.averaging - self.cost(timing.num_members)) / timing.num_members


def decoupled(shape: JobShape, units: SlotTimes, exposed: Seconds) -> Estimate:
    """All wait for the slowest of each step, and for the exposed part of the average."""
    slots = [shape.slots(share) for share in shape.shares]
    steps = [[unit * n for unit, n in zip(row, slots, strict=True)] for row in align_steps(units)]
    return _in_lockstep(steps, exposed)


def balanced(shape: JobShape, units: SlotTimes, link_cost: LinkCost) -> Estimate:
    """All wait for the slowest, and for the average, which is not hidden.

    The balancer learns from each step before it assigns the next; a first pass over the steps, in
    which it learns, does not count.
    """
    workers = [Worker(0, p) for p in range(shape.num_pipelines)]
    balancer = MicrobatchBalancer(sum(shape.shares))
    once, steps = align_steps(units), list[list[Seconds]]()
    for row in (*once, *once):
        counts = balancer.assign(workers)
        steps.append([row[w.pipeline] * shape.slots(counts[w]) for w in workers])
        for worker, seconds in zip(workers, steps[-1], strict=True):
            balancer.record(worker, counts[worker], seconds)
        if shape.max_microbatches and any(
            counts[w] > shape.max_microbatches[w.pipeline] for w in workers
        ):
            return Estimate(math.inf)  # not enough memory
    average = link_cost.global_cost(shape.num_pipelines) + shape.coordinator_round_trip
    return _in_lockstep(steps[len(once) :], average)


def in_groups(shape: JobShape, sync_mode: str, units: SlotTimes, link_cost: LinkCost) -> Estimate:
    """Each pipeline repeats its measured steps and waits for its group only.

    A first pass over the steps, in which the policy learns, does not count.
    """
    length = max(len(steps) for steps in units)
    ends = _replay_groups(shape, sync_mode, units, link_cost, 2 * length)[length - 1 :]
    return Estimate.from_durations([end - start for start, end in pairwise(ends)])


def with_slow_links(
    shape: JobShape, times: StepTimings, link_cost: LinkCost, *, lockstep: bool
) -> SlotTimes:
    """Add the delay of slow links to the compute times of pipelines.

    In lockstep all wait for a slow link, and its pipeline is unknown: charge them in turn.
    """
    units = shape.units(times)
    if not lockstep:
        for unit_times, timings in zip(units, times, strict=True):
            for step, timing in enumerate(timings):
                excess = link_cost.excess_per_member(timing)
                unit_times[step] += excess / shape.slots(timing.num_microbatches)
        return units
    for step, timings in enumerate(zip(*times, strict=True)):
        pipeline = step % shape.num_pipelines
        delay = max(0.0, average_time(timings) - link_cost.cost(shape.num_pipelines))
        units[pipeline][step] += delay / shape.slots(timings[pipeline].num_microbatches)
    return units


def average_time(timings: Sequence[StepTiming]) -> Seconds:
    """Time of a global average in lockstep: the last pipeline waits for the links alone."""
    return max(min(t.averaging for t in timings), min(t.waited for t in timings))


def align_steps(units: SlotTimes) -> SlotTimes:
    """Rows of steps that ran at about the same time, for pipelines with unequal step counts."""
    length = max(len(steps) for steps in units)
    return [[steps[row * len(steps) // length] for steps in units] for row in range(length)]


def lower_quartile(seconds: Sequence[Seconds]) -> Seconds:
    """Undisturbed duration: the lower quartile, since noise only adds time."""
    return quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


def _in_lockstep(steps: Sequence[Sequence[Seconds]], average: Seconds) -> Estimate:
    durations = [max(step) for step in steps]
    waiting = fmean(max(step) - fmean(step) for step in steps)
    return Estimate.from_durations(durations, waiting).plus(average)


def _replay_groups(
    shape: JobShape, sync_mode: str, units: SlotTimes, link_cost: LinkCost, num_batches: int
) -> list[Seconds]:
    """Times at which all pipelines together had computed 1, 2, ... batches of micro-batches."""
    policy = make_policies(sync_mode, num_stages=1, num_pipelines=len(units))[0]
    slots, batch = [shape.slots(share) for share in shape.shares], sum(shape.shares)
    num_started, pending, waits = [0] * len(units), [False] * len(units), [False] * len(units)
    # A heap: group ends come before step ends, then by pipeline.
    events: list[tuple[Seconds, int, int, Group | None]] = []
    num_computed, batch_ends = 0, list[Seconds]()

    def start_step(pipeline: int, now: Seconds) -> None:
        steps = units[pipeline]
        duration = steps[num_started[pipeline] % len(steps)] * slots[pipeline]
        num_started[pipeline] += 1
        heapq.heappush(events, (now + duration, 1, pipeline, None))

    def report_ready(pipeline: int, now: Seconds) -> list[Group]:
        pending[pipeline] = True
        if shape.overlap:
            start_step(pipeline, now)
        return policy.on_ready(Worker(0, pipeline), now)

    def end_average(pipeline: int, now: Seconds) -> list[Group]:
        pending[pipeline] = False
        if waits[pipeline]:
            waits[pipeline] = False
            return report_ready(pipeline, now)
        if not shape.overlap:
            start_step(pipeline, now)
        return []

    for pipeline in range(len(units)):
        policy.on_join(Worker(0, pipeline), "", 0.0)
        start_step(pipeline, 0.0)
    while len(batch_ends) < num_batches:
        if not events or policy.next_timer() <= events[0][0]:
            now = policy.next_timer()
            groups = policy.on_timer(now)
        else:
            now, _, pipeline, done = heapq.heappop(events)
            if done is None:
                num_computed += shape.shares[pipeline]
                batch_ends += [now] * (num_computed // batch - len(batch_ends))
                waits[pipeline] = pending[pipeline]  # for the previous average, if it overlaps
                groups = [] if waits[pipeline] else report_ready(pipeline, now)
            else:
                groups = policy.on_done(done, True, now)
                for member in done.members:
                    groups += end_average(member.pipeline, now)
        for group in groups:
            duration = 0.0
            if len(group.members) > 1:
                duration = link_cost.cost(len(group.members)) + shape.coordinator_round_trip
            heapq.heappush(events, (now + duration, 0, group.members[0].pipeline, group))
    return batch_ends

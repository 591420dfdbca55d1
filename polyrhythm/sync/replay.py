"""What a step would take under each way of keeping together, from what pipelines took just now.

Nothing is modelled: recorded steps are replayed in virtual time. Decoupled, all wait for the
slowest. Under `balanced` the dealer of that policy deals micro-batches from step to step. In groups
the policy itself decides who averages with whom, while each pipeline takes what it took.

Source: none. Departures from what happens: a pipeline reports as one worker, though each of its
stages has groups of its own; a transfer takes what it took, whoever it is between.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, quantiles, stdev
from typing import NamedTuple, Self

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.balanced import MicrobatchBalancer
from polyrhythm.sync.registry import make_policies
from polyrhythm.types import Group, Seconds, Worker

DECOUPLED, BALANCED, ADAPTIVE, AGE = "decoupled", "balanced", "adaptive", "age"
SYNC_MODES = (DECOUPLED, BALANCED, ADAPTIVE, AGE)  # the simplest first: it needs no reason
GROUPS = (ADAPTIVE, AGE)
NUM_PARTS = 6  # of a window: as long as bursts, or longer, and enough to see how they differ


class StepTiming(NamedTuple):
    """What one step of one pipeline took, as its first stage sees it, which begins and ends it."""

    compute: Seconds  # forwards and backwards; waits for other stages in it, for averages not
    waited: Seconds  # for averages: until all were there, and what was not hidden of the exchange
    averaging: Seconds  # the exchange alone, hidden or not; of the whole buffer, there and back
    num_microbatches: int
    num_members: int  # who averaged together; 1 if it went on alone


StepTimings = Sequence[
    Sequence[StepTiming]
]  # of each pipeline, its steps; in lockstep, equally many of all
SlotTimes = list[list[Seconds]]  # of each pipeline, its steps: seconds for a slot


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """What does not change while a job trains."""

    shares: tuple[int, ...]  # micro-batches of each pipeline in a step, if nobody deals by speed
    num_stages: int = 1
    sync_modes: tuple[str, ...] = SYNC_MODES  # that the job can use
    max_microbatches: tuple[int, ...] | None = (
        None  # micro-batches that each pipeline has memory for
    )
    overlap: bool = False  # in groups: go on at once, and take in averages a step later
    coordinator_round_trip: Seconds = (
        0.0  # of an average in a group: to the coordinator and back, twice
    )

    def __post_init__(self) -> None:
        if not set(SYNC_MODES) >= set(self.sync_modes) >= {DECOUPLED}:
            raise PolicyError(
                f"ways={', '.join(self.sync_modes)}",
                expected=f"some of {', '.join(SYNC_MODES)}; {DECOUPLED} is one of them",
                fix="leave it out for all of them",
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

    def slots(self, num_microbatches: int) -> int:
        """Micro-batches that a pipeline's step is as long as: it fills and drains."""
        return num_microbatches + self.num_stages - 1

    def units(self, times: StepTimings) -> SlotTimes:
        return [[took.compute / self.slots(took.num_microbatches) for took in one] for one in times]


class Estimate(NamedTuple):
    """Of a step in which all pipelines together compute one batch."""

    parts: tuple[Seconds, ...]  # means over equal parts of the steps that were looked at
    waiting: Seconds = math.inf  # for others, of the average pipeline: no other way gains more

    @classmethod
    def of(cls, lasted: Sequence[Seconds], waiting: Seconds = math.inf) -> Self:
        number = min(NUM_PARTS, len(lasted))
        ends = [len(lasted) * part // number for part in range(number + 1)]
        return cls(tuple(fmean(lasted[start:end]) for start, end in pairwise(ends)), waiting)

    @property
    def seconds(self) -> Seconds:
        return fmean(self.parts)

    def plus(self, seconds: Seconds) -> Self:
        return self._replace(parts=tuple(part + seconds for part in self.parts))

    def scaled(self, factor: float) -> Self:
        return self._replace(parts=tuple(part * factor for part in self.parts))


def combine(some: Sequence[Estimate]) -> Estimate:
    """Of several windows of steps."""
    parts = tuple(part for one in some for part in one.parts)
    return Estimate(parts, fmean(one.waiting for one in some))


def standard_error(one: Estimate, other: Estimate) -> Seconds:
    """The standard error of how much they differ: what befell both alike does not count."""
    apart = [a - b for a, b in zip(one.parts, other.parts, strict=True)]
    return stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf


class LinkCost(NamedTuple):
    """What links make of an average."""

    base: Seconds = 0.0  # to send the whole buffer there and back
    excess: Seconds = 0.0  # what slow links add to an average of all, a mean over steps

    def cost(self, num_members: int) -> Seconds:
        """Of a group, while no link is slow: members send all but their own part."""
        return self.base * (num_members - 1) / num_members

    def of_all(self, num_pipelines: int) -> Seconds:
        return self.cost(num_pipelines) + self.excess

    def excess_per_member(self, took: StepTiming) -> Seconds:
        """What slow links have added, for each of those who averaged."""
        return max(0.0, took.averaging - self.cost(took.num_members)) / took.num_members


def decoupled(shape: JobShape, units: SlotTimes, exposed: Seconds) -> Estimate:
    """All wait for the slowest of each step, and for what is not hidden of the average."""
    slots = [shape.slots(share) for share in shape.shares]
    steps = [[unit * n for unit, n in zip(row, slots, strict=True)] for row in align_steps(units)]
    return _in_lockstep(steps, exposed)


def balanced(shape: JobShape, units: SlotTimes, link_cost: LinkCost) -> Estimate:
    """All wait for the slowest, and for the average, which is not hidden.

    The dealer knows each step when it deals the next; a first round, in which it learns, is left
    out.
    """
    workers, balancer = (
        [Worker(0, p) for p in range(shape.num_pipelines)],
        MicrobatchBalancer(sum(shape.shares)),
    )
    once, steps = align_steps(units), list[list[Seconds]]()
    for row in (*once, *once):
        counts = balancer.assign(workers)
        steps.append([row[w.pipeline] * shape.slots(counts[w]) for w in workers])
        for worker, took in zip(workers, steps[-1], strict=True):
            balancer.record(worker, counts[worker], took)
        if shape.max_microbatches and any(
            counts[w] > shape.max_microbatches[w.pipeline] for w in workers
        ):
            return Estimate((math.inf,) * min(NUM_PARTS, len(once)))  # it has no memory for it
    average = link_cost.of_all(shape.num_pipelines) + shape.coordinator_round_trip
    return _in_lockstep(steps[len(once) :], average)


def in_groups(shape: JobShape, sync_mode: str, units: SlotTimes, link_cost: LinkCost) -> Estimate:
    """Each pipeline goes on with its group, and takes what it took, over and over.

    A first round, in which the policy learns, is left out.
    """
    length = max(len(one) for one in units)
    made = _replay_groups(
        shape,
        sync_mode,
        units,
        lambda n: link_cost.cost(n) + shape.coordinator_round_trip,
        2 * length,
    )
    lasted = [end - start for start, end in zip(made[length - 1 :], made[length:], strict=False)]
    return Estimate.of(lasted)


def with_slow_links(
    shape: JobShape, times: StepTimings, link_cost: LinkCost, *, lockstep: bool
) -> SlotTimes:
    """As if pipelines had computed for as long as their links were slow.

    In lockstep all wait for a slow link, and nobody knows whose it is: one after the other, then.
    """
    units = shape.units(times)
    if not lockstep:
        for one, of_one in zip(units, times, strict=True):
            for step, took in enumerate(of_one):
                one[step] += link_cost.excess_per_member(took) / shape.slots(took.num_microbatches)
        return units
    for step, all_took in enumerate(zip(*times, strict=True)):
        place = step % shape.num_pipelines
        late = max(0.0, average_time(all_took) - link_cost.cost(shape.num_pipelines))
        units[place][step] += late / shape.slots(all_took[place].num_microbatches)
    return units


def average_time(all_took: Sequence[StepTiming]) -> Seconds:
    """Of all, in a step in lockstep: whoever comes last waits for nothing but links."""
    return max(min(took.averaging for took in all_took), min(took.waited for took in all_took))


def align_steps(units: SlotTimes) -> SlotTimes:
    """Steps side by side that were made at about the same time, if some made more than others."""
    length = max(len(one) for one in units)
    return [[one[row * len(one) // length] for one in units] for row in range(length)]


def lower_quartile(seconds: Sequence[Seconds]) -> Seconds:
    """What it takes when nothing is in the way: the lower quartile, as noise only adds."""
    return quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


def _in_lockstep(steps: Sequence[Sequence[Seconds]], average: Seconds) -> Estimate:
    lasted = [max(step) for step in steps]
    waiting = fmean(max(step) - fmean(step) for step in steps)
    return Estimate.of(lasted, waiting).plus(average)


def _replay_groups(
    shape: JobShape,
    sync_mode: str,
    units: SlotTimes,
    cost: Callable[[int], Seconds],
    num_batches: int,
) -> list[Seconds]:
    """When each batch's worth of micro-batches had been computed, by all together."""
    policy = make_policies(sync_mode, num_stages=1, num_pipelines=len(units))[0]
    slots, batch = [shape.slots(share) for share in shape.shares], sum(shape.shares)
    num_begun, pending, waits = [0] * len(units), [False] * len(units), [False] * len(units)
    events: list[tuple[Seconds, int, int, Group | None]] = []  # ends of groups first, then by place
    made, ends = 0, list[Seconds]()

    def begin(place: int, now: Seconds) -> None:
        took = units[place][num_begun[place] % len(units[place])] * slots[place]
        num_begun[place] += 1
        heapq.heappush(events, (now + took, 1, place, None))

    def report(place: int, now: Seconds) -> list[Group]:
        pending[place] = True
        if shape.overlap:
            begin(place, now)
        return policy.on_ready(Worker(0, place), now)

    def go_on(place: int, now: Seconds) -> list[Group]:
        pending[place] = False
        if waits[place]:
            waits[place] = False
            return report(place, now)
        if not shape.overlap:
            begin(place, now)
        return []

    for place in range(len(units)):
        policy.on_join(Worker(0, place), "", 0.0)
        begin(place, 0.0)
    while len(ends) < num_batches:
        if not events or policy.next_timer() <= events[0][0]:
            now = policy.next_timer()
            groups = policy.on_timer(now)
        else:
            now, _, place, done = heapq.heappop(events)
            if done is None:
                made += shape.shares[place]
                ends += [now] * (made // batch - len(ends))
                waits[place] = pending[place]  # for the average before, if it overlaps
                groups = [] if waits[place] else report(place, now)
            else:
                groups = policy.on_done(done, True, now)
                for member in done.members:
                    groups += go_on(member.pipeline, now)
        for group in groups:
            lasts = cost(len(group.members)) if len(group.members) > 1 else 0.0
            heapq.heappush(events, (now + lasts, 0, group.members[0].pipeline, group))
    return ends

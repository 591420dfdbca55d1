"""Steps of a pipeline, and of replicas, on links that others use too.

A message takes as long as others let it, which depends on when it leaves; when it leaves depends on
the messages before. So a step is simulated with the transfers as they would be on links of one's
own, each message is sent again at the time that came out, and so on, until nothing changes. What
comes first in time is right first, and the rest follows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, simulate
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Action, Op, Seconds
from reproduction.ada_grouper.cut import Model, alone
from reproduction.ada_grouper.load import OtherFlows
from reproduction.ada_grouper.platforms import Platform

NUM_STEPS = 4  # of each test
_SETTLED: Seconds = 1e-9  # rounds that change a transfer by less do not go on


@dataclass(frozen=True, slots=True)
class Traffic:
    """The others on each link of a pipeline, from stage s to s+1 and back."""

    down: tuple[OtherFlows, ...]
    up: tuple[OtherFlows, ...]

    @classmethod
    def of(cls, mean: float, *, num_stages: int, seed: str) -> "Traffic":
        links = range(num_stages - 1)
        return cls(
            tuple(OtherFlows(mean, seed=f"{seed}, link {link} down") for link in links),
            tuple(OtherFlows(mean, seed=f"{seed}, link {link} up") for link in links),
        )


def kfkb(k: int) -> ScheduleSpec:
    return ScheduleSpec("1f1b") if k == 1 else ScheduleSpec("kfkb", k=k)


def run_step(
    schedule: Schedule, times: PipelineTimes, traffic: Traffic, start: Seconds
) -> tuple[Seconds, PipelineTimes]:
    """How long a step takes that starts then, and its transfers as receivers record them."""
    seen, last = times, times.num_stages - 1
    for _ in range(2 * sum(map(len, schedule))):
        timeline = simulate(schedule, seen)
        stages = list(zip(schedule, timeline.ends, strict=True))
        sent = replace(
            times,
            activations=tuple(
                _sent(Op.F, *stages[link], times.activations[link], traffic.down[link], start)
                for link in range(last)
            ),
            gradients=tuple(
                _sent(Op.B, *stages[link + 1], times.gradients[link], traffic.up[link], start)
                for link in range(last)
            ),
        )
        if _alike(sent, seen):
            return timeline.length, sent
        seen = sent
    raise AssertionError("each round settles at least one more message")


def _alike(one: PipelineTimes, other: PipelineTimes) -> bool:
    """Every message takes as long in both, with as many messages."""
    ones, others = one.activations + one.gradients, other.activations + other.gradients
    return all(
        len(a.busy) == len(b.busy)
        and all(abs(x - y) <= _SETTLED for x, y in zip(a.busy, b.busy, strict=True))
        for a, b in zip(ones, others, strict=True)
    )


def _sent(
    op: Op,
    actions: Sequence[Action],
    ends: Sequence[Seconds],
    link: LinkTimes,
    others: OtherFlows,
    start: Seconds,
) -> LinkTimes:
    """One message after the other, each as soon as it is there."""
    free, busy = 0.0, []
    for action, end in zip(actions, ends, strict=True):
        if action.op is op:
            begin = max(free, end)
            free = others.arrival(start + begin, link.busy[0]) - start
            busy.append(free - begin)
    return replace(link, busy=tuple(busy))


def run_steps(
    spec: ScheduleSpec,
    times: PipelineTimes,
    traffic: Traffic,
    *,
    num_microbatches: int,
    num_steps: int = NUM_STEPS,
) -> Iterator[tuple[Seconds, PipelineTimes]]:
    """One step after the other."""
    schedule = spec.build(num_stages=times.num_stages, num_microbatches=num_microbatches)
    now = 0.0
    for _ in range(num_steps):
        takes, recorded = run_step(schedule, times, traffic, now)
        now += takes
        yield takes, recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model on so many workers of a platform, a batch, and how many others are on its links."""

    model: Model
    platform: Platform
    num_workers: int
    batch: int
    other_flows: float
    seed: str

    def pipelined(self, k: int, size: int) -> Seconds:
        """A step of kFkB with micro-batches of that size, on average."""
        times = alone(self.model, self.platform, self.num_workers, size)
        traffic = Traffic.of(self.other_flows, num_stages=self.num_workers, seed=self.seed)
        steps = run_steps(kfkb(k), times, traffic, num_microbatches=self.batch // size)
        return fmean(takes for takes, _ in steps)

    @property
    def reduced_bytes(self) -> float:
        """That each worker sends for one all-reduce: two halves, each all but its own part."""
        parameters = self.model.width * self.model.num_parameters
        return 2 * parameters * (self.num_workers - 1) / self.num_workers

    def replicated(self, size: int) -> Seconds:
        """A step of replicas: an all-reduce behind each micro-batch, which nothing hides."""
        compute = alone(self.model, self.platform, 1, size)
        links = [
            OtherFlows(self.other_flows, seed=f"{self.seed}, ring {worker}")
            for worker in range(self.num_workers)
        ]
        num_microbatches = NUM_STEPS * self.batch // size // self.num_workers
        now = 0.0
        for _ in range(num_microbatches):
            now = self._all_reduced(now + compute.period, links)
        return now / NUM_STEPS

    def _all_reduced(self, now: Seconds, links: Sequence[OtherFlows]) -> Seconds:
        """A ring: in each round all send a part to the next, and the slowest link decides."""
        num_rounds = 2 * (self.num_workers - 1)
        for _ in range(num_rounds):
            part = self.reduced_bytes / num_rounds / self.platform.bandwidth
            now = max(link.arrival(now, part) for link in links) + self.platform.latency
        return now

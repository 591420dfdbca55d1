"""Steps of a pipeline, and of data-parallel replicas, on links that other flows share.

The duration of a message depends on when it leaves, and that depends on the messages before it. So
a step is simulated with unshared transfers first; then every message is sent again at the resulting
time, and so on, until nothing changes. Each round settles at least the next message in time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, simulate
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Action, Op, Seconds
from reproduction.ada_grouper.models import AdaGrouperModel, unshared_times
from reproduction.ada_grouper.testbed import OtherFlows, Platform

VISIBLE = 1.001  # ratio of throughputs from which a difference counts
NUM_STEPS = 4  # of each test
_SETTLED: Seconds = 1e-9  # a smaller change of a transfer counts as none


def is_faster(gain: float) -> bool:
    """Whether a plan with `gain` times the throughput of another counts as faster."""
    return gain >= VISIBLE


@dataclass(frozen=True, slots=True)
class PipelineLoad:
    """The other flows on each link of a pipeline, from stage s to s+1 and back."""

    down: tuple[OtherFlows, ...]
    up: tuple[OtherFlows, ...]

    @classmethod
    def draw(cls, mean: float, *, num_stages: int, seed: str) -> "PipelineLoad":
        links = range(num_stages - 1)
        return cls(
            tuple(OtherFlows(mean, seed=f"{seed}, link {link} down") for link in links),
            tuple(OtherFlows(mean, seed=f"{seed}, link {link} up") for link in links),
        )


def kfkb(k: int) -> ScheduleSpec:
    return ScheduleSpec("1f1b") if k == 1 else ScheduleSpec("kfkb", k=k)


def run_step(
    schedule: Schedule, times: PipelineTimes, load: PipelineLoad, start: Seconds
) -> tuple[Seconds, PipelineTimes]:
    """Return the duration of a step, and its transfer times as receivers measure them."""
    assumed, last = times, times.num_stages - 1
    for _ in range(2 * sum(map(len, schedule))):
        timeline = simulate(schedule, assumed)
        stages = list(zip(schedule, timeline.ends, strict=True))
        sent = replace(
            times,
            activations=tuple(
                _send(Op.F, *stages[link], times.activations[link], load.down[link], start)
                for link in range(last)
            ),
            gradients=tuple(
                _send(Op.B, *stages[link + 1], times.gradients[link], load.up[link], start)
                for link in range(last)
            ),
        )
        if _are_equal(sent, assumed):
            return timeline.length, sent
        assumed = sent
    raise AssertionError("each round settles at least one more message")


def _are_equal(one: PipelineTimes, other: PipelineTimes) -> bool:
    """Whether both have the same number of messages, and each takes equally long."""
    ones, others = one.activations + one.gradients, other.activations + other.gradients
    return all(
        len(a.busy) == len(b.busy)
        and all(abs(x - y) <= _SETTLED for x, y in zip(a.busy, b.busy, strict=True))
        for a, b in zip(ones, others, strict=True)
    )


def _send(
    op: Op,
    actions: Sequence[Action],
    ends: Sequence[Seconds],
    link: LinkTimes,
    others: OtherFlows,
    start: Seconds,
) -> LinkTimes:
    """Send one message after another, each as soon as its action has ended."""
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
    load: PipelineLoad,
    *,
    num_microbatches: int,
    num_steps: int = NUM_STEPS,
) -> Iterator[tuple[Seconds, PipelineTimes]]:
    """Run consecutive steps; yield the duration and the transfer times of each."""
    schedule = spec.build(num_stages=times.num_stages, num_microbatches=num_microbatches)
    now = 0.0
    for _ in range(num_steps):
        duration, measured = run_step(schedule, times, load, now)
        now += duration
        yield duration, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaGrouperJob:
    model: AdaGrouperModel
    platform: Platform
    num_workers: int
    batch: int
    other_flows: float  # on each link, on average
    seed: str

    def pipeline_step(self, k: int, size: int) -> Seconds:
        """Mean step of a kFkB pipeline with micro-batches of `size` samples."""
        times = unshared_times(self.model, self.platform, self.num_workers, size)
        load = PipelineLoad.draw(self.other_flows, num_stages=self.num_workers, seed=self.seed)
        steps = run_steps(kfkb(k), times, load, num_microbatches=self.batch // size)
        return fmean(duration for duration, _ in steps)

    @property
    def all_reduce_bytes(self) -> float:
        """Bytes that each worker sends for one all-reduce: reduce-scatter and all-gather."""
        parameters = self.model.element_bytes * self.model.num_parameters
        return 2 * parameters * (self.num_workers - 1) / self.num_workers

    def replica_step(self, size: int) -> Seconds:
        """Mean data-parallel step: an all-reduce after each micro-batch, without overlap."""
        compute = unshared_times(self.model, self.platform, 1, size)
        links = [
            OtherFlows(self.other_flows, seed=f"{self.seed}, ring {worker}")
            for worker in range(self.num_workers)
        ]
        num_microbatches = NUM_STEPS * self.batch // size // self.num_workers
        now = 0.0
        for _ in range(num_microbatches):
            now = self._all_reduce_end(now + compute.period, links)
        return now / NUM_STEPS

    def _all_reduce_end(self, now: Seconds, links: Sequence[OtherFlows]) -> Seconds:
        """When a ring all-reduce ends: in each round every link is waited for."""
        num_rounds = 2 * (self.num_workers - 1)
        for _ in range(num_rounds):
            part = self.all_reduce_bytes / num_rounds / self.platform.bandwidth
            now = max(link.arrival(now, part) for link in links) + self.platform.latency
        return now

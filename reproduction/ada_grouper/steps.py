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


def draw_load(mean: float, *, num_stages: int, seed: str) -> list[tuple[OtherFlows, OtherFlows]]:
    """Other flows on each link of a pipeline: from stage s to s+1, and back."""
    down, up = (
        [
            OtherFlows(mean, seed=f"{seed}, link {link} {direction}")
            for link in range(num_stages - 1)
        ]
        for direction in ("down", "up")
    )
    return list(zip(down, up, strict=True))


def kfkb(k: int) -> ScheduleSpec:
    return ScheduleSpec("1f1b") if k == 1 else ScheduleSpec("kfkb", k=k)


def run_step(
    schedule: Schedule,
    times: PipelineTimes,
    load: Sequence[tuple[OtherFlows, OtherFlows]],
    start: Seconds,
) -> tuple[Seconds, PipelineTimes]:
    """Return the duration of a step, and its transfer times as receivers measure them."""
    assumed = times
    for _ in range(2 * sum(map(len, schedule))):
        timeline = simulate(schedule, assumed)
        stages = list(zip(schedule, timeline.ends, strict=True))
        sent = replace(
            times,
            activations=tuple(
                _send(Op.F, *stages[link], times.activations[link], down, start)
                for link, (down, _) in enumerate(load)
            ),
            gradients=tuple(
                _send(Op.B, *stages[link + 1], times.gradients[link], up, start)
                for link, (_, up) in enumerate(load)
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


@dataclass(frozen=True, slots=True)
class AdaGrouperJob:
    model: AdaGrouperModel
    platform: Platform
    num_workers: int
    batch: int
    seed: str

    def steps(
        self, k: int, size: int, num_steps: int = NUM_STEPS
    ) -> Iterator[tuple[Seconds, PipelineTimes]]:
        """Run consecutive steps of a kFkB pipeline with micro-batches of `size` samples.

        Yield the duration and the transfer times of each.
        """
        num_stages, now = self.num_workers, 0.0
        times = unshared_times(self.model, self.platform, num_stages, size)
        load = draw_load(self.platform.other_flows, num_stages=num_stages, seed=self.seed)
        schedule = kfkb(k).build(num_stages=num_stages, num_microbatches=self.batch // size)
        for _ in range(num_steps):
            duration, measured = run_step(schedule, times, load, now)
            now += duration
            yield duration, measured

    def pipeline_step(self, k: int, size: int) -> Seconds:
        return fmean(duration for duration, _ in self.steps(k, size))

    @property
    def all_reduce_bytes(self) -> float:
        """Bytes that each worker sends for one all-reduce: reduce-scatter and all-gather."""
        parameters = self.model.element_bytes * self.model.num_parameters
        return 2 * parameters * (self.num_workers - 1) / self.num_workers

    def replica_step(self, size: int) -> Seconds:
        """Mean data-parallel step: an all-reduce after each micro-batch, without overlap."""
        compute = unshared_times(self.model, self.platform, 1, size)
        links = [
            OtherFlows(self.platform.other_flows, seed=f"{self.seed}, ring {worker}")
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

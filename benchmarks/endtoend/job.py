"""A training job: its setting, the reports of its workers, and the pool that drives it.

Torch's workers and the Trainer's have the same setting and reports. A stage computes for real, and
then sleeps until it has taken as long as on the emulated device.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from benchmarks.harness.pool import TIMEOUT, LocalHosts, PoolWorker, ProgressMessage, WorkerPool
from benchmarks.harness.report import ratio_over_rounds
from polyrhythm.describe.scenario import LinkChange, Scenario
from polyrhythm.describe.slowness import Slowness
from polyrhythm.lab.lab import Lab
from polyrhythm.plan.plan import Plan
from polyrhythm.types import Bytes, Seconds, Worker

_ENOUGH = 5  # steps of each pipeline, for a steady rate


@dataclass(slots=True, kw_only=True)
class EmulatedSpeed:
    """Gives a real stage the speed of an emulated device, by hooks on its module.

    An action takes a time per sample, with no fixed part; what a scenario adds is drawn before each
    forward and each backward of a micro-batch, and slept first. Only time on a core counts as
    compute: what an action waits for meanwhile, such as weights in transfer, takes extra time.
    """

    forward: Seconds  # of one sample
    backward: Seconds
    slowness: Slowness = field(default_factory=Slowness)
    start: Seconds | None = None  # of the clock of slowness; None: nothing takes time
    first: Seconds | None = field(default=None, init=False)  # when the first action began
    slept: Seconds = field(default=0.0, init=False)
    _computing_since: Seconds = field(default=0.0, init=False)

    def attach(self, module: nn.Module) -> None:
        """Slow down this stage, whose first argument has samples in rows."""
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            self._delay(self.forward, len(given[0]))

    def _after_forward(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        number = len(given[0])
        self._fill_up(self.forward * number)

        def before_backward(gradient: Tensor) -> None:
            self._delay(self.backward, number)
            # Called at the end of the whole backward, as DDP does to wait for its averages.
            Variable._execution_engine.queue_callback(lambda: self._fill_up(self.backward * number))

        output.register_hook(before_backward)  # type: ignore[no-untyped-call]

    def _delay(self, each: Seconds, number: int) -> None:
        if self.start is not None:
            both = (self.forward + self.backward) * number
            now = time.monotonic()
            self.first = self.first or now
            self._sleep(self.slowness.delay(now - self.start, each * number, both))
        self._computing_since = time.thread_time()

    def _fill_up(self, work: Seconds) -> None:
        if self.start is not None:
            self._sleep(work - (time.thread_time() - self._computing_since))

    def _sleep(self, seconds: Seconds) -> None:
        if seconds > 0:
            self.slept += seconds
            time.sleep(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetting:
    plan: Plan
    num_steps: int
    forward: Seconds  # of one layer and sample, on a device of speed 1
    backward: Seconds
    num_held_out: int = 0  # samples
    timeout: Seconds = TIMEOUT
    slot: int = 0  # steps until a worker waits for the driver; 0: it never does
    scenario: Scenario = field(default_factory=Scenario)  # its `slow` entries delay the compute
    bucket: Bytes = 25 * 2**20  # of gradients that torch averages at once, as DDP

    @property
    def num_layers(self) -> int:
        return sum(self.plan.layers_per_stage)

    @property
    def batch(self) -> int:
        assert self.plan.batch is not None, "the plan is complete"
        return self.plan.batch

    @property
    def microbatch_size(self) -> int:
        assert self.plan.microbatch_size is not None, "the plan is complete"
        return self.plan.microbatch_size

    def speed(self, worker: Worker, device: str) -> EmulatedSpeed:
        num_layers = self.plan.layers_per_stage[worker.stage]
        return EmulatedSpeed(
            forward=self.forward * num_layers,
            backward=self.backward * num_layers,
            slowness=Slowness.of(self.scenario, device),
        )


@dataclass(frozen=True, slots=True)
class StepReport(ProgressMessage):
    """A step of a pipeline, from its last stage."""

    worker: Worker
    step: int
    num_samples: int
    loss: float
    moment: Seconds  # of time.monotonic(), which all hosts of a lab share


@dataclass(frozen=True, slots=True)
class JobReport:
    """A whole job, from each worker."""

    first: Seconds  # when the first action of the first step began
    moment: Seconds  # when the last step ended, with everything that belongs to it
    cpu: Seconds  # on a core since the start
    held_out: float | None  # loss of the final model, where a worker evaluates it


class JobReporter:
    """Sends the reports of one worker to the driver."""

    def __init__(self, pool_worker: PoolWorker, setting: JobSetting) -> None:
        self._driver, self._slot = pool_worker, setting.slot
        self._num_ended, self._cpu = 0, 0.0

    def wait_for_start(self) -> Seconds:
        start = self._driver.wait_for_start()
        self._cpu = time.process_time()
        return start

    def step_ended(
        self, worker: Worker, step: int, num_samples: int, loss: float | None, moment: Seconds
    ) -> None:
        """Report a step; at the end of a slot, return when the next one begins."""
        if loss is not None:
            self._driver.send(StepReport(worker, step, num_samples, loss, moment))
        self._num_ended += 1
        if self._slot and self._num_ended % self._slot == 0:
            self._driver.send("the slot has ended")
            self._driver.recv("waiting for its slot")

    def job_ended(self, moment: Seconds, speed: EmulatedSpeed, held_out: float | None) -> None:
        first = moment if speed.first is None else speed.first
        self._driver.send(JobReport(first, moment, time.process_time() - self._cpu, held_out))


@dataclass(slots=True, kw_only=True)
class JobLog:
    """All reports of a job since its start."""

    start: Seconds
    steps: list[StepReport] = field(default_factory=list)
    ends: list[JobReport] = field(default_factory=list)

    @property
    def seconds(self) -> Seconds:
        """Return the time from the start of the first step to the end of the last on any worker."""
        return max(end.moment for end in self.ends) - min(end.first for end in self.ends)

    @property
    def num_samples(self) -> int:
        return sum(step.num_samples for step in self.steps)

    @property
    def rate(self) -> float:
        """Return samples per second."""
        return self.num_samples / self.seconds

    @property
    def steady_rate(self) -> float:
        """Return the rate of the second half of all steps; that of all where these are few."""
        steps = sorted(self.steps, key=lambda step: step.moment)
        half = len(steps) // 2
        if half < _ENOUGH * len({step.worker for step in steps}):
            return self.rate
        duration = steps[-1].moment - steps[half - 1].moment
        return sum(step.num_samples for step in steps[half:]) / duration

    def losses(self, setting: JobSetting) -> tuple[float, ...]:
        """Return mean losses over the batches of steps that all pipelines made together."""
        found = []
        for number in range(setting.num_steps):
            steps = [step for step in self.steps if step.step == number]
            if sum(step.num_samples for step in steps) == setting.batch:
                found.append(sum(step.loss * step.num_samples for step in steps) / setting.batch)
        return tuple(found)

    def step_of_slot(self, slot: int, num_steps: int) -> Seconds:
        """Return the mean step of a slot.

        Two steps are left out: the Trainer reports a step, and waits for its slot, one step later;
        and before the step after that, work in the background had extra time.
        """
        first, last = slot * num_steps + 1, (slot + 1) * num_steps - 1
        return (self._end_of_step(last) - self._end_of_step(first)) / (num_steps - 2)

    def _end_of_step(self, number: int) -> Seconds:
        """Return when a step had ended on all pipelines."""
        return max(step.moment for step in self.steps if step.step == number)


class JobPool(WorkerPool):
    """The workers of one job, on the devices of its plan."""

    def __init__(
        self,
        hosts: Lab | LocalHosts,
        work: Callable[..., None],
        setting: JobSetting,
        *args: object,
        port: int | None = None,
    ) -> None:
        devices = [device for pipeline in setting.plan.pipelines for device in pipeline.devices]
        super().__init__(
            hosts, work, setting, *args, on=devices, timeout=setting.timeout, port=port
        )
        self.setting, self.log = setting, JobLog(start=0.0)

    def _wait_until_ready(self) -> None:
        """Wait until all workers have made their connections."""
        self.gather("preparing")

    def begin(self) -> None:
        """Start the first slot, or the whole job."""
        self.log = JobLog(start=self.start())

    def follow(
        self, links: Iterable[LinkChange] = (), on_step: Callable[[JobLog], None] = lambda _: None
    ) -> JobLog:
        """Wait for the end of the slot or job, while links change at their times since the start.

        LabError if a worker fails, or if no step ends within the timeout.
        """

        def add(step: StepReport) -> None:
            self.log.steps.append(step)
            on_step(self.log)

        ends = self.gather("training", links=links, clock_start=self.log.start, on_progress=add)
        self.log.ends += [end for end in ends if isinstance(end, JobReport)]
        return self.log


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRow:
    """One slot of one side."""

    part: str  # of the benchmark
    side: str
    round: int
    step: Seconds  # mean, without the first two of the slot


def interleave(
    part: str,
    pools: Mapping[str, JobPool],
    show: Callable[[str], None],
    after_slot: Callable[[], None] = lambda: None,
) -> list[SlotRow]:
    """Run jobs of equal settings in alternating slots, so that all meet the same conditions."""
    rows, setting = [], next(iter(pools.values())).setting
    for slot in range(setting.num_steps // setting.slot):
        for side, pool in pools.items():
            if slot == 0:
                pool.begin()
            else:
                pool.broadcast("the next slot")
            step = pool.follow().step_of_slot(slot, setting.slot)
            rows.append(SlotRow(part=part, side=side, round=slot, step=step))
            show(f"{part}: {side}, {step:.3f} s a step")
            after_slot()
    for pool in pools.values():
        pool.broadcast("the end")
        pool.follow()
    return rows


def ratio_of_steps(rows: Sequence[SlotRow], side: str, other: str) -> float:
    """Return the ratio of the steps of two sides.

    The first slot does not count, in which both make connections and choose their sync modes.
    """
    return ratio_over_rounds([row for row in rows if row.round > 0], "step", side, other)

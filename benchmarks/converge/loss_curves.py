"""Runs of real training: gradients and averages are real, the speed of the machines is emulated.

A step adds up the gradients of a few micro-batches. Each takes milliseconds, and then sleeps until
it has taken as long as on the emulated machine. What the scenario adds is drawn before the forward
and before the backward of the first. The k-th step of a worker has the same delays under every
policy. Between micro-batches an average that overlaps may be applied.

At fixed moments the mean of all workers' models is kept, and evaluated when all runs have ended:
that costs no measured time. A worker's model at a moment is the one it had then, between the end of
one step and the end of the next. Workers share a counter of batches: a run ends after a fixed
number of batches, whichever workers have learned from them.
"""

import contextlib
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch
import torch._dynamo  # before the fork: it takes a second
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from benchmarks.converge.setting import (
    DEPTH_RATES,
    MICROBATCHES,
    OVERLAP,
    WARM_UP,
    ConvergeRun,
    EmulatedMachines,
)
from benchmarks.converge.tasks import Batch, LearningTask, SourceText, num_weights
from benchmarks.harness.pool import (
    TIMEOUT,
    LocalHosts,
    PoolWorker,
    WorkerPool,
    run_concurrently,
    shared_zeros,
)
from polyrhythm.describe.slowness import Slowness, load_traces
from polyrhythm.describe.trace import Trace
from polyrhythm.errors import LaunchError
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.demo.train import next_byte_loss
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.types import Seconds

_EVALUATION_TIMEOUT: Seconds = 120.0
_DEPTH_TIMEOUT: Seconds = 120.0  # of a pipeline
_LOCK_TIMEOUT: Seconds = 30.0  # a worker holds the lock for a millisecond
_TRIES = 9  # steps that are computed to measure the time of one


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """The loss of the mean model against time and batches, in order of time.

    Single points go up and down by chance, so a curve is smoothed before it is read. Between points
    it is a straight line.
    """

    times: tuple[Seconds, ...]
    batches: tuple[int, ...]  # learned from by then
    losses: tuple[float, ...]

    def time_to(self, target: float) -> Seconds:
        """Return when the loss first was at the target or below; inf if never."""
        return _crossing(self.times, smoothed(self.losses), target)

    def batches_to(self, target: float) -> float:
        """Return how many batches had been learned from by then; inf if never."""
        return _crossing(self.batches, smoothed(self.losses), target)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the mean of each point with its neighbours, one neighbour at the ends."""
    return [statistics.fmean(losses[max(0, i - 1) : i + 2]) for i in range(len(losses))]


def _crossing(places: Sequence[float], losses: Sequence[float], target: float) -> float:
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0:
                return places[0]
            before = losses[i - 1]
            part = (before - target) / (before - loss)
            return places[i - 1] + part * (places[i] - places[i - 1])
    return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergeRow:
    """One run."""

    setting: str
    task: str
    side: str
    seed: int
    lr: float
    target: float
    seconds: Seconds  # the whole run
    seconds_to_target: Seconds
    batches_to_target: float
    final_loss: float  # of the mean model at the end
    distance: float  # of a worker's model from the mean at the end, the mean over workers
    late_share: float  # of steps whose real compute took longer than the emulated
    curve: LossCurve


class SharedModels:
    """Memory that the workers of a run share: the number of the next batch, and sums of models.

    Must be made before the fork.
    """

    def __init__(self, machines: EmulatedMachines, num_weights: int) -> None:
        self._machines, num_moments = machines, 4 * machines.num_points
        self._lock = multiprocessing.get_context("fork").Lock()
        self._taken = shared_zeros(1, np.int64)
        self._sums = shared_zeros((num_moments, num_weights), np.float32)
        self._arrived = shared_zeros(num_moments, np.int64)

    def take_batch(self) -> int | None:
        """Return the number of the next batch; None if there are no more."""
        with self._locked():
            number = int(self._taken[0])
            if number == self._machines.num_batches:
                return None
            self._taken[0] = number + 1
            return number

    def moment(self, number: int) -> Seconds:
        """Return the time of a point of the curve; inf past the last of them."""
        return (number + 1) * self._machines.every if number < len(self._arrived) else math.inf

    def add(self, number: int, weights: np.ndarray) -> None:
        with self._locked():
            self._sums[number] += weights
            self._arrived[number] += 1

    def means(self) -> list[np.ndarray]:
        """Return the mean models of the moments that all workers have reached."""
        num_workers = self._machines.num_workers
        num_complete = int((self._arrived == num_workers).sum())
        return [self._sums[number] / num_workers for number in range(num_complete)]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT):  # its holder may have died
            raise LaunchError(
                f"a worker has held the lock for {_LOCK_TIMEOUT:g} s",
                expected="a millisecond",
                fix="find out from its output why it is stuck",
            )
        try:
            yield
        finally:
            self._lock.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    ends: list[Seconds]  # of its steps, since the start
    num_late: int
    end: Seconds
    distance: float  # of its model from the mean
    mean: np.ndarray  # the weights of the mean model


class ModelTrack:
    """One worker's model over time."""

    def __init__(self, shared: SharedModels, model: nn.Module) -> None:
        self._shared, self._model, self._held = shared, model, weights_of(model)
        self._ends: list[Seconds] = []
        self._num_late = self._next = 0

    def step(self, now: Seconds, *, is_late: bool) -> None:
        """Record that a step has ended, with another model."""
        self._ends.append(now)
        self._num_late += is_late
        self._pass_moments(now)
        self._held = weights_of(self._model)

    def finish(self, now: Seconds) -> WorkerReport:
        """Return the report; the model has become the mean of all workers' models."""
        self._pass_moments(now)
        mean = weights_of(self._model)
        distance = float(np.linalg.norm(self._held - mean))
        return WorkerReport(
            ends=self._ends, num_late=self._num_late, end=now, distance=distance, mean=mean
        )

    def _pass_moments(self, now: Seconds) -> None:
        while self._shared.moment(self._next) <= now:
            self._shared.add(self._next, self._held)
            self._next += 1


def weights_of(model: nn.Module) -> np.ndarray:
    flat: Tensor = parameters_to_vector(p.detach() for p in model.parameters())
    return flat.numpy()


def load_weights(model: nn.Module, weights: np.ndarray) -> None:
    vector_to_parameters(torch.from_numpy(weights), model.parameters())


@dataclass(slots=True)
class EmulatedStep:
    """When the emulated machine would end its micro-batches; a backward takes two forwards."""

    slowness: Slowness
    step: Seconds

    @classmethod
    def of(cls, run: ConvergeRun, worker: int, traces: Mapping[str, Trace]) -> "EmulatedStep":
        scenario = run.machines.scenario(run.seed)
        slowness = Slowness.of(scenario, f"worker {worker}", index=worker, traces=traces)
        return cls(slowness, run.machines.step)

    def moments(self, now: Seconds, num_microbatches: int) -> list[Seconds]:
        """Return when the micro-batches of a step that begins now begin, and the step's end."""
        forward, backward = self.step / 3, self.step * 2 / 3
        begin = now + self.slowness.delay(now, forward, self.step)
        delay = self.slowness.delay(begin + forward, backward, self.step)
        part = self.step / num_microbatches
        return [begin] + [begin + delay + part * k for k in range(1, num_microbatches + 1)]


def compare(lanes: Sequence[Sequence[ConvergeRun]]) -> list[ConvergeRow]:
    """Run the runs of each lane one after the other, and the lanes concurrently.

    Runs that are compared share the machine, and so whatever else it does meanwhile.
    """
    timeout = max(sum(run.machines.timeout for run in lane) for lane in lanes)
    runs = [partial(_run_lane, lane) for lane in lanes]
    of_lanes = run_concurrently(runs, timeout=timeout + _EVALUATION_TIMEOUT)
    return [row for rows in of_lanes for row in rows]


def _run_lane(runs: Sequence[ConvergeRun], barrier: Callable[[], object]) -> list[ConvergeRow]:
    trained = [_run(run) for run in runs]
    barrier()  # evaluating must not disturb runs of another lane
    torch.set_num_threads(1)
    return [_evaluate(*each) for each in trained]


def _run(run: ConvergeRun) -> tuple[ConvergeRun, SharedModels, list[WorkerReport]]:
    machines = run.machines
    shared = SharedModels(machines, num_weights(run.task))
    traces = load_traces(machines.scenario(0))
    with WorkerPool(LocalHosts(machines.num_workers), train, run, shared, traces) as pool:
        pool.gather("preparing")
        pool.start()
        return run, shared, pool.gather("training", machines.timeout)


def _evaluate(
    run: ConvergeRun, shared: SharedModels, reports: Sequence[WorkerReport]
) -> ConvergeRow:
    losses = _losses(run.task, [*shared.means(), reports[0].mean])
    times = [shared.moment(number) for number in range(len(losses) - 1)]
    ends = sorted(end for report in reports for end in report.ends)
    num_batches, seconds = run.machines.num_batches, reports[0].end
    curve = LossCurve(
        times=(*times, seconds),
        batches=(*np.searchsorted(ends, times).tolist(), num_batches),
        losses=tuple(losses),
    )
    return ConvergeRow(
        setting=run.machines.name,
        task=run.task.name,
        side=run.side,
        seed=run.seed,
        lr=run.lr,
        target=run.target,
        seconds=seconds,
        seconds_to_target=curve.time_to(run.target),
        batches_to_target=curve.batches_to(run.target),
        final_loss=losses[-1],
        distance=statistics.fmean(report.distance for report in reports),
        late_share=sum(report.num_late for report in reports) / num_batches,
        curve=curve,
    )


def _losses(task: LearningTask, models: Sequence[np.ndarray]) -> list[float]:
    """Return the held-out losses; a process that has computed must not fork."""
    model, losses = task.build(0), []
    with torch.no_grad():
        for weights in models:
            load_weights(model, weights)
            losses.append(task.loss(model, task.held_out).item())
    return losses


def train(
    worker: PoolWorker, run: ConvergeRun, shared: SharedModels, traces: Mapping[str, Trace]
) -> None:
    """Train as one of the workers of a run, until there are no more batches."""
    torch.set_num_threads(1)
    task, emulated = run.task, EmulatedStep.of(run, worker.rank, traces)
    with worker.process_group():
        model = task.build(run.seed)
        optimizer = task.optimizer(model, run.lr, of_models=run.averages_models)
        with GroupSync(model, optimizer, run.policy, state=run.state, timeout=TIMEOUT) as sync:
            track = ModelTrack(shared, model)
            start = worker.wait_for_start()
            for step in count():
                if (number := shared.take_batch()) is None:
                    break
                begin, *ends = emulated.moments(time.monotonic() - start, MICROBATCHES)
                _sleep_until(start + begin)
                batch = task.draw(run.seed, worker.rank, step)
                for part, end in zip(_microbatches(batch), ends, strict=True):
                    sync.apply_pending()
                    torch.autograd.backward(task.loss(model, part) / MICROBATCHES)
                    is_late = _sleep_until(start + end)
                clip_grad_norm_(model.parameters(), task.max_grad_norm)
                # By rounds, not batches: workers that average gradients must make equal steps.
                done = number // worker.world_size / run.machines.steps
                set_rate(optimizer, run.lr * rate(done))
                sync.overlap = run.side == OVERLAP and done >= WARM_UP
                optimizer.step()
                sync.step()
                optimizer.zero_grad()
                track.step(time.monotonic() - start, is_late=is_late)
            sync.average_all()
            worker.send(track.finish(time.monotonic() - start))


def compute_time(task: LearningTask) -> Seconds:
    """Return the median time of the gradients of a step, alone on this machine."""
    with WorkerPool(LocalHosts(), _compute, task) as pool:
        return float(statistics.median(pool.gather(f"computing {_TRIES} steps")[0]))


def _compute(worker: PoolWorker, task: LearningTask) -> None:
    torch.set_num_threads(1)
    model, times = task.build(0), list[Seconds]()
    for step in range(_TRIES):
        start = time.perf_counter()
        for part in _microbatches(task.draw(0, 0, step)):
            torch.autograd.backward(task.loss(model, part))
        times.append(time.perf_counter() - start)
    worker.send(times)


def _microbatches(batch: Batch) -> Iterator[Batch]:
    inputs, targets = batch
    return zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)


def _sleep_until(moment: Seconds) -> bool:
    """Return whether the moment had passed already."""
    spare = moment - time.monotonic()
    time.sleep(max(0.0, spare))
    return spare < 0


def rate(part: float) -> float:
    """Return the learning rate relative to its peak after `part` of all batches: up, then to 0."""
    return min(part / WARM_UP, (1 - part) / (1 - WARM_UP))


def set_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def losses_by_depth(task: SourceText, *, seed: int, steps: int) -> dict[str, float]:
    """Return the final loss of the same pipeline without a flush at two depths, by schedule.

    A stage with more batches in flight is less delayed by other stages, and its gradients are of
    older weights. Time does not matter here, so nothing is slowed down: four real stages train as
    fast as they can, and only the loss after equally many batches is compared.
    """
    runs = [partial(_depth_loss, task, schedule, seed, steps) for schedule in DEPTH_RATES]
    return dict(zip(DEPTH_RATES, run_concurrently(runs, timeout=2 * _DEPTH_TIMEOUT), strict=True))


def _depth_loss(
    task: SourceText, schedule: str, seed: int, steps: int, barrier: Callable[[], object]
) -> float:
    hosts = LocalHosts(task.shape.num_layers)  # one layer each
    with WorkerPool(hosts, _train_stage, task, schedule, seed, steps) as pool:
        weights = np.concatenate(pool.gather("training a pipeline", _DEPTH_TIMEOUT))
    torch.set_num_threads(1)
    return _losses(task, [weights])[0]


def _train_stage(
    worker: PoolWorker, task: SourceText, schedule: str, seed: int, steps: int
) -> None:
    """Train one stage, and send its weights."""
    torch.set_num_threads(1)
    stage, lr = worker.rank, DEPTH_RATES[schedule]
    with worker.process_group():
        module = task.layers(range(stage, stage + 1), seed)
        optimizer = task.optimizer(module, lr, of_models=False)
        num_updates = count()

        def update() -> None:
            clip_grad_norm_(module.parameters(), task.max_grad_norm)
            set_rate(optimizer, lr * rate(next(num_updates) / steps))
            optimizer.step()
            optimizer.zero_grad()

        with Pipeline(
            module,
            loss_fn=next_byte_loss,
            n_microbatches=1,
            schedule=schedule,
            flush=False,
            timeout=TIMEOUT,
        ) as pipeline:
            for step in range(steps):
                inputs, targets = task.draw(seed, 0, step)
                given = (inputs,) if pipeline.is_first else ()
                target = targets if pipeline.is_last else None
                pipeline.step(*given, target=target, return_outputs=False)
                if pipeline.has_gradients:
                    update()
            for _ in pipeline.drain():
                update()
        worker.send(weights_of(module))

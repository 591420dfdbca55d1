"""One worker of the synchronisation benchmark, on a host of the lab.

Weights are drawn to zero; the gradient is the weights plus noise of the worker's own, so workers
drift apart as far as they do not synchronise. An order has two parts: what to prepare and, once all
are prepared, when to start. The process of the last rank is the parameter server where a side needs
one.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.harness.compute import EmulatedCompute, EmulatedLayer
from benchmarks.harness.pipeline_job import pipeline_groups
from benchmarks.harness.pool import TIMEOUT, PoolWorker
from benchmarks.sync.settings import MICROBATCHES_PER_WORKER, SyncSetting, SyncSide, device_name
from polyrhythm.describe.slowness import Slowness, load_traces
from polyrhythm.events import LogReader, worker_log
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.averaging.parameter_server import ParameterServer
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import Seconds, Worker

_WORKERS_PER_NODE = 4  # as on Prague's cluster; the network is the same everywhere
_NUM_ACTIVATIONS = 16
_NUM_REPORTED = 2000  # weights, which show how far workers are apart


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOrder:
    """Train a side; the setting has the seed of the round."""

    number: int
    setting: SyncSetting
    side: SyncSide

    @property
    def name(self) -> str:
        return f"order {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAnswer:
    """Times are those of time.monotonic(), one clock for all hosts of the lab."""

    start: Seconds
    completions: list[Seconds]  # of steps with an update
    weights: list[float]  # after the last step that ended in time
    group_sizes: list[int]  # of this worker's averages; empty if none are logged
    gradient_error: float  # of `balanced`: the largest difference, relative to the largest gradient
    cpu: Seconds


def work(worker: PoolWorker, num_stages: int) -> None:
    """`num_stages`: of a pipeline in a grid."""
    torch.set_num_threads(1)
    with worker.process_group():
        num_workers, training = worker.world_size - 1, None
        pipelines = pipeline_groups(num_workers, num_stages)
        for order in worker.orders():
            _release(training)
            training = None
            gc.collect()  # reference cycles keep threads that wake up now and then
            if worker.rank == num_workers:
                _serve_parameters(order, worker)
            else:
                group = pipelines[worker.rank // num_stages]
                training = _prepared(order, worker, group)
                worker.send("ready")
                # Sides of other lanes are prepared meanwhile.
                worker.send(training.run(worker.recv("waiting for the start", 4 * TIMEOUT)))
        _release(training)


def _release(training: "SyncTraining | None") -> None:
    """Close a pipeline once all stages are done: until then they may need its messages."""
    if training is not None and training.pipeline is not None:
        training.pipeline.close()


def _serve_parameters(order: SyncOrder, worker: PoolWorker) -> None:
    """Start before the workers look for their server; serve until the last has left."""
    server = None
    if order.side.mode is not None and order.side.mode.has_server:
        server = ParameterServer(
            num_pipelines=order.setting.num_pipelines,
            num_stages=order.setting.num_stages,
            timeout=TIMEOUT,
            name=order.name,
        )
    worker.send("ready")
    if server is not None:
        server.serve()
    worker.recv("waiting for the start", 4 * TIMEOUT)
    worker.send([] if server is None else server.lost)


class _Stage(EmulatedLayer):
    """The weights of a worker. A negative batch is the last one: so all stages know the end."""

    def __init__(
        self, setting: SyncSetting, side: SyncSide, compute: EmulatedCompute, seed: int
    ) -> None:
        super().__init__(torch.zeros(setting.num_floats), compute)
        self._noise = torch.Generator().manual_seed(seed)
        self._num_microbatches = side.num_microbatches
        self.was_last = False

    def forward(self, x: Tensor) -> Tensor:
        self.was_last = bool(x[0, 0] < 0)
        return super().forward(x)

    def gradient(self) -> Tensor:
        noise = torch.empty_like(self.weight).normal_(generator=self._noise)
        return self.weight.detach() + noise

    def gradient_fn(self, weight: Tensor) -> Callable[[], Tensor]:
        return lambda: self.gradient() / self._num_microbatches


@dataclass(slots=True, kw_only=True)
class SyncTraining:
    """One worker's part in one order."""

    setting: SyncSetting
    side: SyncSide
    model: _Stage
    optimizer: torch.optim.Optimizer
    compute: EmulatedCompute
    log: EventLog
    pipeline: Pipeline | None = None  # in a grid
    sync: GroupSync | None = None
    gradient_error: float = 0.0
    end: Seconds = math.inf

    def run(self, start: Seconds) -> SyncAnswer:
        """Train from `start` until the setting's time is over, then leave."""
        self.end = start + self.setting.length
        # No sleep goes beyond the end: nobody waits for a step that does not count.
        self.compute.start, self.compute.end = start, self.end
        time.sleep(max(0.0, start - time.monotonic()))
        cpu, weights = time.process_time(), self.model.weight.detach().clone()
        completions = []
        mode = self.side.mode
        is_balanced = mode is not None and mode.balances_microbatches
        plain_steps = self._balanced_steps if is_balanced else self._plain_steps
        steps = plain_steps() if self.pipeline is None else self._stage_steps(self.pipeline)
        for has_update in steps:
            now = time.monotonic()
            if has_update:
                completions.append(now)
            if now <= self.end:
                weights = self.model.weight.detach().clone()
        cpu = time.process_time() - cpu
        if self.sync is not None:
            self.sync.average_all()  # nobody leaves while others may average with it
            self.sync.close()
        self.log.close()
        return SyncAnswer(
            start=start,
            completions=completions,
            weights=weights[:_NUM_REPORTED].tolist(),
            group_sizes=_group_sizes(self.log),
            gradient_error=self.gradient_error,
            cpu=cpu,
        )

    # Each runs steps until the time is over, and yields after each whether it had an update.

    def _plain_steps(self) -> Iterator[bool]:
        """Data-parallel: forward, backward, update, average."""
        setting, weight = self.setting, self.model.weight
        numbers: Iterable[int] = count()
        if self.side.mode is not None and not self.side.mode.has_coordinator:
            # The static schedule does not tell a worker that its partner has left: all workers run
            # the same number of steps, as many as fit into the time if averages took none.
            numbers, self.compute.end = range(math.ceil(setting.length / setting.step)), math.inf
        for _ in numbers:
            forward_done = self.compute.spend(setting.forward, since=time.monotonic())
            self.compute.spend(setting.backward, since=forward_done)
            if time.monotonic() >= self.compute.end:
                return
            weight.grad = self.model.gradient()
            self.optimizer.step()
            if self.sync is not None:
                self.sync.step()
            yield True

    def _balanced_steps(self) -> Iterator[bool]:
        """Compute a share of the global batch. The gradient of each micro-batch is fixed."""
        assert self.sync is not None, "balanced is a policy"
        setting, weight = self.setting, self.model.weight
        num_microbatches = MICROBATCHES_PER_WORKER * setting.num_workers
        fixed = torch.Generator().manual_seed(0)
        gradients = torch.empty(num_microbatches, setting.num_floats).normal_(generator=fixed)
        mean = gradients.double().mean(dim=0)
        while True:
            total, now = torch.zeros_like(weight), time.monotonic()
            for microbatch in self.sync.share(num_microbatches):
                for part in (setting.forward, setting.backward):
                    now = self.compute.spend(part / MICROBATCHES_PER_WORKER, since=now)
                total += gradients[microbatch]
            if time.monotonic() >= self.end:
                return
            weight.grad = total
            self.optimizer.step()
            if time.monotonic() < self.end:  # else some may have left without their share
                error = (weight.grad - mean).abs().max() / mean.abs().max()
                self.gradient_error = max(self.gradient_error, error.item())
            self.sync.step()
            yield True

    def _stage_steps(self, pipeline: Pipeline) -> Iterator[bool]:
        batch = torch.ones(self.side.num_microbatches, _NUM_ACTIVATIONS)
        while not self.model.was_last:
            if pipeline.is_first and time.monotonic() >= self.end:
                batch = -batch
            inputs = (batch,) if pipeline.is_first else ()
            target = batch if pipeline.is_last else None
            pipeline.step(*inputs, target=target, return_outputs=False)
            if pipeline.has_gradients:
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.sync is not None:
                    self.sync.step()
            yield pipeline.has_gradients


def _prepared(order: SyncOrder, pool_worker: PoolWorker, group: dist.ProcessGroup) -> SyncTraining:
    """Return when all workers have joined; `group`: the stages of this worker's pipeline."""
    setting, side, rank = order.setting, order.side, pool_worker.rank
    worker = Worker(rank % setting.num_stages, rank // setting.num_stages)
    traces = load_traces(setting.scenario)
    compute = EmulatedCompute(
        forward=setting.forward,
        backward=setting.backward,
        slowness=Slowness.of(setting.scenario, device_name(rank), index=rank, traces=traces),
    )
    model = _Stage(setting, side, compute, seed=1000 * setting.scenario.seed + rank)
    training = SyncTraining(
        setting=setting,
        side=side,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=setting.learning_rate),
        compute=compute,
        log=EventLog(worker_log(pool_worker.folder / order.name, worker)),
    )
    is_staged = setting.num_stages > 1
    if is_staged:
        training.pipeline = Pipeline(
            model,
            loss_fn=functional.mse_loss,
            n_microbatches=side.num_microbatches,
            schedule=side.schedule,
            flush=side.flush,
            process_group=group,
            timeout=TIMEOUT,
            pipeline=worker.pipeline,
        )
    if side.policy is not None:
        training.sync = GroupSync(
            model if training.pipeline is None else training.pipeline,
            training.optimizer,
            side.policy,
            options=side.options,
            overlap=side.overlap,
            worker=None if is_staged else worker,
            num_pipelines=setting.num_pipelines,
            node=f"node{rank // _WORKERS_PER_NODE}",
            seed=setting.scenario.seed,
            timeout=TIMEOUT,
            log=training.log,
            name=order.name,
        )
        training.sync.average_all()  # makes all connections: a job is longer than a benchmark
    return training


def _group_sizes(log: EventLog) -> list[int]:
    """Return the sizes of averaging groups, without the global averages at start and end."""
    averages = [event for event in LogReader(log.path).new() if event.kind == "average"]
    return [
        len(str(event.values["members"]).split())
        for event in averages
        if event.why != "average_all"
    ]

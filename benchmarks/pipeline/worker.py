"""Four stages on four hosts of the lab, and a pool that drives them step by step.

The same emulated stage runs under torch's Schedule1F1B and under our Pipeline: only the executor
and the schedule differ. A third comparison, in one process, has real compute and no network.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from benchmarks.harness.compute import EmulatedCompute, EmulatedLayer
from benchmarks.harness.network import set_links
from benchmarks.harness.pool import TIMEOUT, LocalHosts, PoolWorker, WorkerPool
from benchmarks.pipeline.networks import HOSTS, LATENCY, PipelineNetwork, bandwidth, bursts
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.lab.lab import Lab
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.types import Seconds

BASELINE = "torch"
_STEP_TIMEOUT: Seconds = 90.0  # for one step of the slowest side on the slowest network
_NUM_MICROBATCHES, _MICROBATCH_SIZE, _WIDTH = 8, 16, 256  # of the plain loop


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    num_microbatches: int
    num_floats: int  # of a message

    @property
    def message_bytes(self) -> int:
        return 4 * self.num_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    seconds: Seconds  # from when all stages were ready until all were done
    schedule: str
    peak_in_flight: int


class StagePool(WorkerPool):
    """One process per host and stage."""

    def __init__(self, lab: Lab, load: StageLoad) -> None:
        super().__init__(lab, _work, load, serves_orders=True)
        self._lab, self._load = lab, load

    def set_network(self, network: PipelineNetwork, forward: Seconds) -> None:
        for link, transfer in zip(pairwise(HOSTS), network.transfers, strict=True):
            rate = bandwidth(transfer, forward, self._load.message_bytes)
            set_links(self._lab, LATENCY, rate, between=link)

    def step(
        self,
        side: str,
        forward: Seconds,
        network: PipelineNetwork,
        *,
        seed: int,
        restart: bool = False,
    ) -> list[StepAnswer]:
        """Run one step of a side: BASELINE, or a schedule of ours.

        `forward`: of a micro-batch; a backward takes twice as long. A bursty network changes in the
        same way for the same `seed`. `restart`: as if the side had not run before.
        """
        changes: Sequence[LinkChange] = ()
        if network.bursty:
            message = self._load.message_bytes
            changes = bursts(forward, message, until=_STEP_TIMEOUT, seed=seed)
        return self.call("step", side, forward, restart, timeout=_STEP_TIMEOUT, links=changes)


def _work(worker: PoolWorker, load: StageLoad) -> None:
    torch.set_num_threads(1)
    with worker.process_group():
        sides = _Sides(worker, load)
        worker.serve(sides)
        sides.close()


class _Sides:
    """The executors of this stage by side, each made when it is first needed."""

    def __init__(self, worker: PoolWorker, load: StageLoad) -> None:
        self._rank, self._num_stages = worker.rank, worker.world_size
        self._load = load
        self._made: dict[str, tuple[EmulatedCompute, Any]] = {}
        self._batch = torch.ones(load.num_microbatches, load.num_floats)

    def step(self, side: str, forward: Seconds, restart: bool) -> StepAnswer:
        compute, executor = self._side(side, restart)
        compute.forward, compute.backward = forward, 2 * forward
        inputs = (self._batch,) if self._rank == 0 else ()
        target = self._batch if self._rank == self._num_stages - 1 else None
        dist.barrier()
        start = time.perf_counter()
        executor.step(*inputs, target=target, return_outputs=False)
        dist.barrier()
        seconds = time.perf_counter() - start
        if not isinstance(executor, Pipeline):
            return StepAnswer(seconds=seconds, schedule=BASELINE, peak_in_flight=0)
        return StepAnswer(
            seconds=seconds,
            schedule=str(executor.last_spec),
            peak_in_flight=executor.peak_in_flight,
        )

    def close(self) -> None:
        for _, executor in self._made.values():
            if isinstance(executor, Pipeline):
                executor.close()

    def _side(self, name: str, restart: bool) -> tuple[EmulatedCompute, Any]:
        if restart and name in self._made and name != BASELINE:
            self._made.pop(name)[1].close()
        if name not in self._made:
            compute = EmulatedCompute(start=0.0)
            stage = EmulatedLayer(torch.ones(1), compute)
            self._made[name] = compute, self._executor(name, stage)
        return self._made[name]

    def _executor(self, name: str, stage: EmulatedLayer) -> Schedule1F1B | Pipeline:
        number = self._load.num_microbatches
        if name != BASELINE:
            return Pipeline(
                stage,
                loss_fn=functional.mse_loss,
                n_microbatches=number,
                schedule=name,
                timeout=TIMEOUT,
            )
        wrapped = PipelineStage(stage, self._rank, self._num_stages, torch.device("cpu"))
        return Schedule1F1B(wrapped, number, loss_fn=functional.mse_loss)


def plain_loop(num_rounds: int) -> float:
    """Return the time of a plain gradient-accumulation loop over that of a one-stage Pipeline.

    The median over rounds, in turns, of real compute: what the executor itself costs.
    """
    # In a process of its own: this one must stay able to fork.
    with WorkerPool(LocalHosts(), _compare_with_plain_loop, num_rounds) as pool:
        (ratio,) = pool.gather(f"{num_rounds} rounds of a plain loop")
    return float(ratio)


def _compare_with_plain_loop(worker: PoolWorker, num_rounds: int) -> None:
    torch.set_num_threads(1)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)]
    model = nn.Sequential(*layers)
    pipeline = Pipeline(model, loss_fn=functional.mse_loss, n_microbatches=_NUM_MICROBATCHES)
    inputs = torch.randn(_NUM_MICROBATCHES * _MICROBATCH_SIZE, _WIDTH)
    target = torch.randn_like(inputs)

    def ours() -> None:
        pipeline.step(inputs, target=target, return_outputs=False)

    def plain() -> None:
        chunks = inputs.chunk(_NUM_MICROBATCHES), target.chunk(_NUM_MICROBATCHES)
        for x, y in zip(*chunks, strict=True):
            torch.autograd.backward(functional.mse_loss(model(x), y) / _NUM_MICROBATCHES)

    sides = (plain, ours)
    for side in sides:
        _timed(side, model)
    ratios = []
    for number in range(num_rounds):
        first, second = sides if number % 2 else sides[::-1]
        times = {first: _timed(first, model), second: _timed(second, model)}
        ratios.append(times[plain] / times[ours])
    worker.send(statistics.median(ratios))


def _timed(side: Callable[[], None], model: nn.Module) -> Seconds:
    start = time.perf_counter()
    for _ in range(3):
        side()
        model.zero_grad()
    return time.perf_counter() - start

"""A job of emulated pipelines in a lab: one worker per device, each a stage with its sync.

Workers record the end of each step in memory that they share with the driver: watching and ending
a job on a slow network sends nothing over it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist
from torch.nn import functional

from benchmarks.harness.compute import EmulatedCompute, EmulatedLayer
from benchmarks.harness.network import make_links_fast, restore_links
from benchmarks.harness.pool import (
    PORT,
    TIMEOUT,
    PoolWorker,
    WorkerPool,
    machine_too_slow,
    shared_zeros,
)
from polyrhythm.describe.scenario import Scenario
from polyrhythm.describe.slowness import Slowness
from polyrhythm.lab.commands import SwitchTiming
from polyrhythm.lab.lab import Lab
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.types import Bytes, Seconds, Worker

FLOAT: Bytes = 4
# What a message between stages takes beyond the headers of its packets: what the pipeline, gloo and
# TCP send about it and about messages in the other direction. Counted by the lab, for messages of 4
# and 8 KB; those of real training are a thousand times as large, and it hardly matters.
ENVELOPE: Bytes = 400
MAX_STEPS = 1000  # of one worker
_ports = count(PORT)  # of rendezvous: each job has its own
_POLL: Seconds = 0.05
# What the executor does between two actions takes no time: beside a GPU it would run meanwhile,
# and here it waits for cores that all hosts share.
_GRACE: Seconds = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSync:
    """How the replicas of a stage synchronise: the arguments of GroupSync."""

    policy: str = "all_reduce"
    options: Mapping[str, object] = field(default_factory=dict)
    overlap: bool = False
    decoupled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedWorker:
    """What one worker does in each step. Sizes are numbers of floats."""

    worker: Worker
    device: str  # of the scenario
    num_stages: int
    num_pipelines: int
    num_microbatches: int
    schedule: str
    forward: Seconds  # of a micro-batch
    backward: Seconds
    num_activations: int
    num_weights: int
    sync: ReplicaSync = ReplicaSync()
    scenario: Scenario | None = None  # its `slow` entries delay the compute

    @property
    def rank(self) -> int:
        return self.worker.pipeline * self.num_stages + self.worker.stage

    def compute(self) -> EmulatedCompute:
        return EmulatedCompute(
            forward=self.forward,
            backward=self.backward,
            slowness=Slowness.of(self.scenario or Scenario(), self.device),
            grace=_GRACE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    ends: tuple[tuple[Seconds, ...], ...]  # of each pipeline's steps, since all began
    switch_timing: SwitchTiming  # of the emulated network meanwhile


class StepRecord:
    """When each worker ended each step, on time.monotonic(). Must be made before the fork."""

    def __init__(self, *, num_stages: int, num_pipelines: int) -> None:
        self.num_stages, self.num_pipelines = num_stages, num_pipelines
        self._times = shared_zeros((num_pipelines, num_stages, MAX_STEPS), np.float64)

    def add(self, rank: int, step: int, moment: Seconds) -> None:
        assert step < MAX_STEPS, "the driver ends the job before"
        self._times[*divmod(rank, self.num_stages), step] = moment

    def ends(self) -> list[list[Seconds]]:
        """Return, per pipeline, when each step had ended on all its stages."""
        counts, last = self.num_ended(), self._times.max(axis=1)
        return [
            of_pipeline[:number].tolist() for of_pipeline, number in zip(last, counts, strict=True)
        ]

    def num_ended(self) -> list[int]:
        """Return, per pipeline, the number of steps that have ended on all its stages."""
        counts: list[int] = np.count_nonzero(self._times.min(axis=1), axis=1).tolist()
        return counts


def run_job(lab: Lab, workers: Sequence[EmulatedWorker], num_steps: int) -> JobTimes:
    """Run workers, in rank order, until pipelines have ended `num_steps` steps each, on average."""
    first = workers[0]
    assert num_steps * first.num_pipelines < MAX_STEPS, "the record has room"
    record = StepRecord(num_stages=first.num_stages, num_pipelines=first.num_pipelines)
    make_links_fast(lab)
    devices = [worker.device for worker in workers]
    with WorkerPool(lab, _work, workers, record, on=devices, port=next(_ports)) as pool:
        pool.gather("preparing")
        restore_links(lab)
        lab.report(reset=True)
        start = pool.start()
        _wait_for_steps(record, pool, num_steps)
        switch_timing, ends = lab.report().switch_timing, record.ends()
    since = tuple(tuple(end - start for end in of_pipeline) for of_pipeline in ends)
    return JobTimes(ends=since, switch_timing=switch_timing)


def _wait_for_steps(record: StepRecord, pool: WorkerPool, num_steps: int) -> None:
    num_before, deadline = 0, time.monotonic() + TIMEOUT
    while (num_ended := sum(record.num_ended())) < num_steps * record.num_pipelines:
        if num_ended > num_before:
            num_before, deadline = num_ended, time.monotonic() + TIMEOUT
        pool.check_running("training")
        if time.monotonic() >= deadline:
            raise machine_too_slow(f"no step ended within {TIMEOUT:g} s")
        time.sleep(_POLL)


def _work(pool_worker: PoolWorker, workers: Sequence[EmulatedWorker], record: StepRecord) -> None:
    """Connect over the fast network, wait for the start, run steps until the driver ends this."""
    spec = workers[pool_worker.rank]
    pool_worker.keep_time()
    with pool_worker.process_group():
        layer = EmulatedLayer(torch.zeros(spec.num_weights), spec.compute())
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        pipeline = Pipeline(
            layer,
            loss_fn=functional.mse_loss,
            n_microbatches=spec.num_microbatches,
            schedule=spec.schedule,
            process_group=pipeline_groups(len(workers), spec.num_stages)[spec.worker.pipeline],
            timeout=TIMEOUT,
            pipeline=spec.worker.pipeline,
        )
        sync = None
        if spec.num_pipelines > 1:
            sync = GroupSync(
                pipeline,
                optimizer,
                spec.sync.policy,
                options=spec.sync.options,
                overlap=spec.sync.overlap,
                decoupled=spec.sync.decoupled,
                worker=spec.worker,
                num_pipelines=spec.num_pipelines,
                node=spec.device,
                timeout=TIMEOUT,
            )
        batch = torch.ones(spec.num_microbatches, spec.num_activations)

        def compute() -> None:
            given = (batch,) if pipeline.is_first else ()
            target = batch if pipeline.is_last else None
            pipeline.step(*given, target=target, return_outputs=False)
            # Once per step: adding up over micro-batches would take cores that all hosts share.
            layer.weight.grad = torch.ones_like(layer.weight)

        compute()
        if sync is not None:
            sync.average_all()  # makes all connections; the policy sees nothing of it
        layer.compute.start = pool_worker.wait_for_start(2 * TIMEOUT)
        for step in count():
            compute()
            optimizer.step()  # after averaging the gradients, where the policy averages these
            if sync is not None:
                sync.step()
            record.add(spec.rank, step, time.monotonic())


def pipeline_groups(num_workers: int, num_stages: int) -> list[dist.ProcessGroup]:
    """Return a process group per pipeline; all workers make all of them."""
    return [
        dist.new_group(list(range(first, first + num_stages)))
        for first in range(0, num_workers, num_stages)
    ]

"""One worker of a job, on the host of its device in the lab: a stage of a pipeline, and its sync.

Connections are made in a hurry. Then it says so, hears when to begin, and runs steps until it is
ended.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist

from benchmarks.sleeping.record import Record
from benchmarks.sleeping.stage import SleepingStage, loss
from benchmarks.words import word_of_boss
from polyrhythm.describe.scenario import Scenario
from polyrhythm.describe.slowness import Slowness
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.types import Seconds, Worker

DEADLINE: Seconds = 60.0  # for any wait for another process

# Of this host alone. Connections first meet a fast network. With windows as wide as it allows, TCP
# would fill the queues of slow links for seconds, take that for loss, and hold back for long.
_RECEIVE_BUFFER = Path("/proc/sys/net/ipv4/tcp_rmem")
_SHORT = "4096 65536 131072"
_PRIORITY = 1  # before all that is not of the lab, and after its switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """How replicas keep together, as GroupSync is told."""

    policy: str = "all_reduce"
    options: Mapping[str, object] = field(default_factory=dict)
    overlap: bool = False
    decoupled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one worker does in each step. Sizes are numbers of four bytes."""

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
    averaging: Averaging = Averaging()
    scenario: Scenario = field(
        default_factory=lambda: Scenario(name="calm")
    )  # its `slow` is played

    @property
    def rank(self) -> int:
        return self.worker.pipeline * self.num_stages + self.worker.stage


def work(part: Part, meeting_point: str, boss: Connection, record: Record) -> None:
    """Record when each step was over, until the boss ends this process."""
    _RECEIVE_BUFFER.write_text(_SHORT)
    settle()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{meeting_point}",
        rank=part.rank,
        world_size=part.num_stages * part.num_pipelines,
        timeout=timedelta(seconds=DEADLINE),
    )
    stage = SleepingStage(
        forward_takes=part.forward,
        backward_takes=part.backward,
        num_weights=part.num_weights,
        slowness=Slowness.of(part.scenario, part.device),
    )
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)
    pipeline = Pipeline(
        stage,
        loss_fn=loss,
        num_microbatches=part.num_microbatches,
        schedule=part.schedule,
        group=_own_pipeline(part),
        timeout=DEADLINE,
        pipeline=part.worker.pipeline,
    )
    sync = _sync(part, pipeline, optimizer)
    batch = torch.ones(part.num_microbatches, part.num_activations)

    def compute() -> None:
        given = (batch,) if pipeline.is_first else ()
        target = batch if pipeline.is_last else None
        pipeline.step(*given, target=target, return_outputs=False)
        stage.make_gradients()

    compute()
    if sync is not None:
        sync.average_all()  # makes all connections, and tells the policy nothing
    boss.send("ready")
    begin = word_of_boss(boss, "waiting until all are prepared", 2 * DEADLINE)
    time.sleep(max(0.0, begin - time.monotonic()))
    stage.begin(begin)
    for number in count():
        compute()
        optimizer.step()  # after averaging the gradients, where these are averaged
        if sync is not None:
            sync.step()
        record.add(part.rank, number, time.monotonic())


def settle() -> None:
    """Become a process that wakes up in time, and leaves the cores to the others otherwise."""
    with contextlib.suppress(PermissionError):  # not root: sleeps end later where others compute
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    torch.set_num_threads(1)


def _sync(part: Part, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> GroupSync | None:
    if part.num_pipelines == 1:
        return None
    averaging = part.averaging
    return GroupSync(
        pipeline,
        optimizer,
        averaging.policy,
        options=averaging.options,
        overlap=averaging.overlap,
        decoupled=averaging.decoupled,
        worker=part.worker,
        num_pipelines=part.num_pipelines,
        node=part.device,
        timeout=DEADLINE,
    )


def _own_pipeline(part: Part) -> dist.ProcessGroup:
    groups: list[dist.ProcessGroup] = [
        dist.new_group(list(range(first, first + part.num_stages)))
        for first in range(0, part.num_stages * part.num_pipelines, part.num_stages)
    ]
    return groups[part.worker.pipeline]

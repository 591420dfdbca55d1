"""One worker of a plan, on the host of its device in the lab: a stage of a pipeline, and its sync.

Connections are made and a first step is run in a hurry. Then it says so, hears when to begin, and
runs steps that count.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist

from polyrhythm.bench.plan.lab_stage import SleepingStage, loss
from polyrhythm.run.average.group_sync import GroupSync
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.types import Seconds, Worker

DEADLINE: Seconds = 60.0  # for any wait for another process

# Of this host alone. Connections first meet a fast network. With windows as wide as it allows, TCP
# would fill the queues of slow links for seconds, take that for loss, and hold back for long.
_RECEIVE_BUFFER = Path("/proc/sys/net/ipv4/tcp_rmem")
_SHORT = "4096 65536 131072"
_PRIORITY = 1  # before all that is not of the lab, and after its switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one worker does in each step. Sizes are numbers of four bytes."""

    worker: Worker
    num_stages: int
    num_pipelines: int
    num_microbatches: int
    schedule: str
    forward: Seconds  # of a micro-batch
    backward: Seconds
    num_activations: int
    num_weights: int
    num_steps: int

    @property
    def rank(self) -> int:
        return self.worker.pipeline * self.num_stages + self.worker.stage


def work(part: Part, meeting_point: str, boss: Connection) -> None:
    """Answer with the times of time.monotonic() at which each step was over."""
    _RECEIVE_BUFFER.write_text(_SHORT)
    with contextlib.suppress(PermissionError):  # not root: sleeps end later where others compute
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{meeting_point}",
        rank=part.rank,
        world_size=part.num_stages * part.num_pipelines,
        timeout=timedelta(seconds=DEADLINE),
    )
    stage = SleepingStage(
        forward_takes=part.forward, backward_takes=part.backward, num_weights=part.num_weights
    )
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)
    pipeline = Pipeline(
        stage,
        loss_fn=loss,
        num_microbatches=part.num_microbatches,
        schedule=part.schedule,
        group=_own_pipeline(part),
        deadline=DEADLINE,
        pipeline=part.worker.pipeline,
    )
    sync: GroupSync | None = None
    if part.num_pipelines > 1:
        sync = GroupSync(
            pipeline,
            optimizer,
            "all_reduce",
            worker=part.worker,
            num_pipelines=part.num_pipelines,
            timeout=DEADLINE,
        )
        sync.consolidate()  # makes all connections
    batch = torch.ones(part.num_microbatches, part.num_activations)

    def step() -> Seconds:
        given = (batch,) if pipeline.is_first else ()
        target = batch if pipeline.is_last else None
        pipeline.step(*given, target=target, return_outputs=False)
        stage.make_gradients()
        optimizer.step()  # after averaging the gradients
        return time.monotonic()

    step()
    stage.hurries = False
    boss.send("ready")
    time.sleep(max(0.0, boss.recv() - time.monotonic()))
    boss.send([step() for _ in range(part.num_steps)])
    boss.recv()  # until all are done: others may need what this one has sent


def _own_pipeline(part: Part) -> dist.ProcessGroup:
    groups: list[dist.ProcessGroup] = [
        dist.new_group(list(range(first, first + part.num_stages)))
        for first in range(0, part.num_stages * part.num_pipelines, part.num_stages)
    ]
    return groups[part.worker.pipeline]

"""One worker of a run: real gradients, real averages, and the pace of a machine that is not there.

A step computes its gradient, which takes a few milliseconds, and then sleeps until it has taken as
long as on the emulated machine; what the scenario adds is drawn before the forward and before the
backward. The same worker has the same luck in its k-th step, whatever the policy.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from polyrhythm.bench.converge_plan import ALL_REDUCE, WARM_UP, Run, Setting
from polyrhythm.bench.converge_record import Record, Track
from polyrhythm.describe.slowness import Slowness
from polyrhythm.describe.trace import Trace
from polyrhythm.run.group_sync import GroupSync
from polyrhythm.run.launch import Place
from polyrhythm.types import Seconds

DEADLINE: Seconds = 60.0  # of any wait for another worker


@dataclass(slots=True)
class Pace:
    """When the emulated machine would be done; a backward takes two forwards."""

    slowness: Slowness
    step: Seconds

    @classmethod
    def of(cls, setting: Setting, worker: int, seed: int, traces: Mapping[str, Trace]) -> "Pace":
        scenario = setting.scenario(seed)
        slowness = Slowness.of(scenario, f"worker {worker}", index=worker, traces=traces)
        return cls(slowness, setting.step)

    def due(self, now: Seconds) -> Seconds:
        """Of a step that begins now. Each call draws anew."""
        for work in (self.step / 3, self.step * 2 / 3):
            now += work + self.slowness.delay(now, work, self.step)
        return now


def train(place: Place, run: Run, record: Record, traces: Mapping[str, Trace]) -> None:
    """As one of the workers, until there are no more batches."""
    torch.set_num_threads(1)
    task, side = run.task, run.side
    pace = Pace.of(run.setting, place.rank, run.seed, traces)
    with place.joined(DEADLINE):
        model = task.build(run.seed)
        optimizer = task.optimizer(model, side.lr, of_models=side.policy != ALL_REDUCE)
        with GroupSync(
            model,
            optimizer,
            side.policy,
            options=side.options,
            overlap=side.overlap,
            state=side.state,
            timeout=DEADLINE,
        ) as sync:
            track = Track(record, place.rank, model)
            if place.rank == 0:
                record.begin()
            dist.barrier()
            for step in count():
                if (number := record.take()) is None:
                    break
                due = pace.due(record.now())
                batch = task.draw(run.seed, place.rank, step)
                torch.autograd.backward(task.loss(model, batch))
                clip_grad_norm_(model.parameters(), task.largest_norm)
                spare = due - record.now()
                time.sleep(max(0.0, spare))
                # By rounds, not batches: workers that average gradients must make equal steps.
                part = number // place.world_size / run.setting.steps
                set_rate(optimizer, side.lr * rate(part))
                optimizer.step()
                sync.step()
                optimizer.zero_grad()
                track.step(number, is_late=spare < 0)
            sync.consolidate()
            track.finish(model)


def rate(part: float) -> float:
    """The learning rate, relative to its peak, after `part` of all batches: up, then down to 0."""
    return min(part / WARM_UP, (1 - part) / (1 - WARM_UP))


def set_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr

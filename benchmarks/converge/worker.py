"""One worker of a run: real gradients, real averages, and the pace of a machine that is not there.

A step adds up the gradients of a few micro-batches. Each takes milliseconds, and then sleeps until
it has taken as long as on the emulated machine. What the scenario adds is drawn before the forward
and before the backward of the first. The same worker has the same luck in its k-th step, whatever
the policy. Between micro-batches an average that overlaps may be taken in.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from benchmarks.converge.plan import ALL_REDUCE, MICROBATCHES, WARM_UP, Run, Setting
from benchmarks.converge.record import Record, Track
from benchmarks.converge.tasks import Batch, Task
from polyrhythm.describe.slowness import Slowness
from polyrhythm.describe.trace import Trace
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext
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

    def moments(self, now: Seconds, num_microbatches: int) -> list[Seconds]:
        """Of a step that begins now: when its micro-batches begin, and its end. Draws anew."""
        forward, backward = self.step / 3, self.step * 2 / 3
        begin = now + self.slowness.delay(now, forward, self.step)
        delay = self.slowness.delay(begin + forward, backward, self.step)
        part = self.step / num_microbatches
        return [begin] + [begin + delay + part * k for k in range(1, num_microbatches + 1)]


def train(ctx: DistContext, run: Run, record: Record, traces: Mapping[str, Trace]) -> None:
    """As one of the workers, until there are no more batches."""
    torch.set_num_threads(1)
    task, side = run.task, run.side
    pace = Pace.of(run.setting, ctx.rank, run.seed, traces)
    with ctx.process_group(DEADLINE):
        model = task.build(run.seed)
        optimizer = task.optimizer(model, side.lr, of_models=side.policy != ALL_REDUCE)
        with GroupSync(
            model,
            optimizer,
            side.policy,
            options=side.options,
            state=side.state,
            timeout=DEADLINE,
        ) as sync:
            track = Track(record, ctx.rank, model)
            if ctx.rank == 0:
                record.begin()
            dist.barrier()
            for step in count():
                if (number := record.take()) is None:
                    break
                begin, *ends = pace.moments(record.now(), MICROBATCHES)
                _sleep_until(begin, record)
                batch = task.draw(run.seed, ctx.rank, step)
                for part, end in zip(_microbatches(batch), ends, strict=True):
                    sync.refresh()
                    torch.autograd.backward(task.loss(model, part) / MICROBATCHES)
                    is_late = _sleep_until(end, record)
                clip_grad_norm_(model.parameters(), task.largest_norm)
                # By rounds, not batches: workers that average gradients must make equal steps.
                done = number // ctx.world_size / run.setting.steps
                set_rate(optimizer, side.lr * rate(done))
                sync.overlap = side.overlap and done >= WARM_UP
                optimizer.step()
                sync.step()
                optimizer.zero_grad()
                track.step(number, is_late=is_late)
            sync.average_all()
            track.finish(model)


def compute_times(task: Task, num_steps: int) -> Iterator[Seconds]:
    """Of the gradients of so many steps, with nothing emulated."""
    torch.set_num_threads(1)
    model = task.build(0)
    for step in range(num_steps):
        began = time.perf_counter()
        for part in _microbatches(task.draw(0, 0, step)):
            torch.autograd.backward(task.loss(model, part))
        yield time.perf_counter() - began


def _microbatches(batch: Batch) -> Iterator[Batch]:
    inputs, targets = batch
    return zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)


def _sleep_until(moment: Seconds, record: Record) -> bool:
    """Whether it has passed already."""
    spare = moment - record.now()
    time.sleep(max(0.0, spare))
    return spare < 0


def rate(part: float) -> float:
    """The learning rate, relative to its peak, after `part` of all batches: up, then down to 0."""
    return min(part / WARM_UP, (1 - part) / (1 - WARM_UP))


def set_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr

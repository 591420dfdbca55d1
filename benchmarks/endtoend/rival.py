"""The rival: torch's own Schedule1F1B over gloo, and gradients averaged in buckets as DDP does.

torch's pipeline takes a stage that is wrapped in DistributedDataParallel, too. But then the last
micro-batch's gradient is sent to the stage before only when the average is there: stages average
one after the other, and a step takes three times as long where averages do. So here each stage
averages when its part of the schedule is over, bucket by bucket, several at a time.
"""

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection

import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.endtoend.pace import Pace
from benchmarks.endtoend.side import Assignment, Line, Seat, enter
from benchmarks.endtoend.task import SEED, model, optimizer, rates, texts
from polyrhythm.plan.plan import Plan
from polyrhythm.run.data.loader import SampleLoader
from polyrhythm.run.data.reader import make_order
from polyrhythm.run.demo.gpt import next_byte_loss
from polyrhythm.run.trainer.batch_shares import GlobalBatch, microbatch_ranges
from polyrhythm.types import Bytes, Worker


def work(told: Assignment, seat: Seat, boss: Connection) -> None:
    """One stage of a pipeline, for so many steps."""
    plan = told.plan
    enter(seat, plan.num_workers)
    dist.init_process_group("gloo", timeout=timedelta(seconds=told.timeout))
    worker = plan.worker(seat.rank)
    pace, line = told.pace(worker, seat.device), Line(boss, told.timeout, told.turn)
    own_pipeline, own_stage = _groups(plan, worker)
    module, schedule = _stage(told, worker, pace, own_pipeline)
    chosen = optimizer(module.parameters())
    rate = rates(told.num_steps)(chosen)
    samples, share = _samples(told, worker)
    global_batch = GlobalBatch(size=told.batch, microbatch_size=told.microbatch_size)

    def compute(step: int) -> list[Tensor]:
        batch, losses = samples.load((global_batch.range_of(step, share),)), list[Tensor]()
        given = (batch.inputs,) if worker.stage == 0 else ()
        schedule.step(*given, target=batch.target, losses=losses, return_outputs=False)
        average(list(module.parameters()), own_stage, told.bucket)
        return losses

    compute(0)  # makes all connections, and tells stages each other's shapes
    chosen.zero_grad()
    pace.begin(line.ready())
    for step in range(told.num_steps):
        losses = compute(step)
        chosen.step()
        chosen.zero_grad()
        rate.step()
        loss = torch.stack(losses).detach().mean().item() if losses else None
        line.ended(worker, step, len(share) * told.microbatch_size, loss)
    line.done(worker, time.monotonic(), pace, None)
    dist.barrier()
    dist.destroy_process_group()


def average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket: Bytes) -> None:
    """All gradients over the replicas of a stage; buckets of `bucket` bytes, all begun at once."""
    sent = []
    for some in buckets(parameters, bucket):
        gradients = [p.grad for p in some if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        sent.append((gradients, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for gradients, flat, pending in sent:
        assert pending is not None, "it is asynchronous"
        pending.wait()
        flat /= group.size()
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def buckets(parameters: Sequence[nn.Parameter], limit: Bytes) -> Iterator[list[nn.Parameter]]:
    """From the last to the first, until a bucket has `limit` bytes or more."""
    some, size = list[nn.Parameter](), 0.0
    for parameter in reversed(parameters):
        some.append(parameter)
        size += parameter.nbytes
        if size >= limit:
            yield some
            some, size = [], 0.0
    if some:
        yield some


def _stage(
    told: Assignment, worker: Worker, pace: Pace, group: dist.ProcessGroup
) -> tuple[nn.Module, Schedule1F1B]:
    plan = told.plan
    first, end = list(pairwise(accumulate(plan.layers_per_stage, initial=0)))[worker.stage]
    module = nn.Sequential(*list(model(told.num_layers))[first:end])
    pace.keep(module)
    stage = PipelineStage(module, worker.stage, plan.num_stages, torch.device("cpu"), group=group)
    number = plan.pipelines[worker.pipeline].num_microbatches
    assert number is not None, "the plan is complete"
    return module, Schedule1F1B(stage, number, loss_fn=next_byte_loss)


def _groups(plan: Plan, worker: Worker) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Of this pipeline, and of this stage; all processes make all groups."""
    pipelines = [
        dist.new_group([plan.rank(Worker(stage, number)) for stage in range(plan.num_stages)])
        for number in range(plan.num_pipelines)
    ]
    stages = [
        dist.new_group([plan.rank(Worker(stage, number)) for number in range(plan.num_pipelines)])
        for stage in range(plan.num_stages)
    ]
    return pipelines[worker.pipeline], stages[worker.stage]


def _samples(told: Assignment, worker: Worker) -> tuple[SampleLoader, range]:
    """The same samples in the same order as the Trainer's, and which micro-batches are ours."""
    text, _ = texts(told.num_held_out)
    is_first, is_last = worker.stage == 0, worker.stage == told.plan.num_stages - 1
    order = make_order(text, seed=SEED, shuffle=True)
    samples = SampleLoader(text, order, needs_inputs=is_first, needs_target=is_last)
    numbers = [pipeline.num_microbatches or 0 for pipeline in told.plan.pipelines]
    return samples, microbatch_ranges(numbers)[worker.pipeline]

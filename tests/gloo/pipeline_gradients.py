"""Gradients of the demo's model: of one process, and of pipelines in real processes."""

import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate

from polyrhythm.plan.plan import Plan, even_plan
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.demo.job import GPTShape
from polyrhythm.run.demo.train import ByteText, build_layers, next_byte_loss
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import Worker

SHAPE = GPTShape(num_blocks=2, width=16, context=12)
TEXT = ByteText(bytes(range(256)) * 4, context=12)
MICROBATCH_SIZE = 3
SEED = 7


def microbatches(pipeline: int, num_microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return inputs and targets; they differ between pipelines."""
    draw = random.Random(pipeline)
    drawn = [
        default_collate([TEXT[draw.randrange(len(TEXT))] for _ in range(MICROBATCH_SIZE)])
        for _ in range(num_microbatches)
    ]
    return [inputs for inputs, _ in drawn], [targets for _, targets in drawn]


def single_process_gradients(
    folder: Path, *, num_pipelines: int, num_microbatches: int = 5
) -> list[Tensor]:
    """Return the gradients of the whole model on the whole batch, from a separate process.

    In the test process backward() would start autograd's threads, which do not survive a fork.
    """
    path = folder / "single.pt"

    def work(ctx: DistContext) -> None:
        torch.save(whole_batch_gradients(num_pipelines, num_microbatches), path)

    with LocalJob(work, 1, output_folder=folder) as job:
        assert job.wait(40), "not done in time"
    return torch.load(path)


def whole_batch_gradients(num_pipelines: int, num_microbatches: int) -> list[Tensor]:
    model = build_layers(SHAPE, range(SHAPE.num_layers), seed=SEED)
    batches = [microbatches(p, num_microbatches) for p in range(num_pipelines)]
    inputs = torch.cat([x for inputs, _ in batches for x in inputs])
    targets = torch.cat([y for _, targets in batches for y in targets])
    next_byte_loss(model(inputs), targets).backward()
    return gradients(model)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def one_step(
    ctx: DistContext,
    plan: Plan,
    schedule: str,
    num_microbatches: int,
    folder: Path,
    device: torch.device,
) -> None:
    worker = plan.worker(ctx.rank)
    ranks = [plan.rank(Worker(stage, worker.pipeline)) for stage in range(plan.num_stages)]
    with ctx.process_group(timeout=30), EventLog(folder / f"{worker}.jsonl", worker) as log:
        pipeline = Pipeline(
            build_layers(SHAPE, plan.layers(worker.stage), seed=SEED).to(device),
            loss_fn=next_byte_loss,
            n_microbatches=num_microbatches,
            schedule=schedule,
            process_group=dist.new_group(ranks, use_local_synchronization=True),
            timeout=30,
            log=log,
        )
        inputs, targets = microbatches(worker.pipeline, num_microbatches)
        with pipeline:
            arguments = [torch.cat(inputs)] if pipeline.is_first else []
            pipeline.step(*arguments, target=torch.cat(targets))
        optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.0)
        size = plan.num_pipelines
        with GroupSync(
            pipeline, optimizer, "all_reduce", worker=worker, num_pipelines=size, timeout=30
        ):
            optimizer.step()
        found = [gradient.cpu() for gradient in gradients(pipeline.module)]
    torch.save(found, folder / f"{worker}.pt")


def distributed_gradients(
    folder: Path,
    *,
    num_stages: int,
    num_pipelines: int,
    num_microbatches: int = 5,
    schedule: str = "1f1b",
    device: str = "cpu",
) -> list[list[Tensor]]:
    """Return, per pipeline, the gradients of all stages in the order of the whole model."""
    plan = even_plan(
        num_layers=SHAPE.num_layers, num_stages=num_stages, num_pipelines=num_pipelines
    )
    with LocalJob(
        lambda ctx: one_step(ctx, plan, schedule, num_microbatches, folder, torch.device(device)),
        plan.num_workers,
        output_folder=folder,
    ) as job:
        assert job.wait(40), "not done in time"
    ranks = range(plan.num_workers)
    parts = {plan.worker(r): torch.load(folder / f"{plan.worker(r)}.pt") for r in ranks}
    return [
        [g for stage in range(num_stages) for g in parts[plan.replicas(stage)[pipeline]]]
        for pipeline in range(num_pipelines)
    ]

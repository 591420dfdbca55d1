"""Train one worker's stage of the demo model.

A step: run the schedule over the micro-batches, update, synchronise with the other replicas of the
stage, record. With all_reduce the gradient is that of the global batch, as in one process.
"""

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from polyrhythm.errors import LaunchError
from polyrhythm.events import worker_log
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.demo.gpt import build_layers, next_byte_loss
from polyrhythm.run.demo.job import DemoConfig, DemoJob
from polyrhythm.run.demo.text import ByteText, read_text, standard_library
from polyrhythm.run.emulated_compute import EmulatedCompute
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import Worker


def load_text(settings: DemoConfig) -> ByteText:
    """Load the text; called before workers are forked, so that they share its memory."""
    text = standard_library() if settings.text is None else read_text(settings.text)
    return ByteText.of(
        text, context=settings.context, microbatch_size=settings.microbatch_size, seed=settings.seed
    )


def train(
    ctx: DistContext,
    job: DemoJob,
    text: ByteText,
    run: Path | None,
    compute: EmulatedCompute | None = None,
) -> None:
    """Train as the worker of this rank; rank 0 broadcasts the run folder `run`.

    `compute` slows the worker as a scenario requires.
    """
    job.check_processes(ctx.world_size)
    worker = job.plan.worker(ctx.rank)
    device = _device(job.settings, ctx)
    with ctx.process_group(job.settings.timeout):
        run = _broadcast_run_folder(job, text, run)
        with EventLog(worker_log(run, worker), worker) as log:
            if ctx.rank == 0:
                _record_job(job, device, log)
            with _build_pipeline(job, worker, device, log, compute) as pipeline:
                optimizer = AdamW(pipeline.module.parameters(), lr=job.settings.lr)
                with _build_sync(job, worker, pipeline, optimizer, log) as sync:
                    _run_steps(job, worker, pipeline, optimizer, sync, text, log)


def _broadcast_run_folder(job: DemoJob, text: ByteText, run: Path | None) -> Path:
    """Receive rank 0's run folder and check that its text is the same: Python versions differ."""
    buffer = torch.zeros(4096, dtype=torch.uint8)
    if run is not None:
        message = f"{text.digest} {run}".encode()
        buffer[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    with peer_errors(job.plan.worker(0), "receiving the run folder"):
        dist.broadcast(buffer, src=0)
    digest, _, folder = bytes(buffer.tolist()).rstrip(b"\0").decode().partition(" ")
    if digest != text.digest:
        raise LaunchError(
            f"this worker's text has digest {text.digest}, rank 0's {digest}",
            expected="the same text on every machine",
            fix="use the same Python everywhere, or pass the same file: --text FILE",
        )
    return Path(folder)


def _build_pipeline(
    job: DemoJob,
    worker: Worker,
    device: torch.device,
    log: EventLog,
    compute: EmulatedCompute | None,
) -> Pipeline:
    settings, plan = job.settings, job.plan
    layers = build_layers(settings.shape, plan.layers(worker.stage), seed=settings.seed)
    ranks = [plan.rank(Worker(stage, worker.pipeline)) for stage in range(plan.num_stages)]
    return Pipeline(
        layers.to(device),
        loss_fn=next_byte_loss,
        n_microbatches=settings.microbatches,
        schedule=settings.schedule,
        process_group=dist.new_group(
            ranks, timeout=timedelta(seconds=settings.timeout), use_local_synchronization=True
        ),
        timeout=settings.timeout,
        log=log,
        compute=compute,
        pipeline=worker.pipeline,
    )


def _build_sync(
    job: DemoJob, worker: Worker, pipeline: Pipeline, optimizer: AdamW, log: EventLog
) -> AbstractContextManager[GroupSync | None]:
    if job.plan.num_pipelines == 1:
        return nullcontext()
    return GroupSync(
        pipeline,
        optimizer,
        job.settings.sync,
        options=job.settings.policy_options,
        worker=worker,
        num_pipelines=job.plan.num_pipelines,
        seed=job.settings.seed,
        timeout=job.settings.timeout,
        log=log,
    )


def _run_steps(
    job: DemoJob,
    worker: Worker,
    pipeline: Pipeline,
    optimizer: AdamW,
    sync: GroupSync | None,
    text: ByteText,
    log: EventLog,
) -> None:
    settings = job.settings
    warmup = max(1, settings.steps // 10)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    losses: list[Tensor] = []
    for step in range(settings.steps):
        start = log.now()
        inputs, targets = text.batch(
            step=step, pipeline=worker.pipeline, num_microbatches=settings.microbatches
        )
        arguments = (inputs,) if pipeline.is_first else ()
        pipeline.step(*arguments, target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        if sync is not None:
            sync.step()
        optimizer.zero_grad()
        scheduler.step()
        values: dict[str, float | int] = {}
        if pipeline.is_last:
            loss = torch.stack(losses).mean().item()
            values = {"loss": loss, "tokens": settings.tokens_per_step}
        log.write("step", start=start, step=step, values=values)


def _record_job(job: DemoJob, device: torch.device, log: EventLog) -> None:
    settings = job.settings
    log.write(
        "run",
        name="demo",
        values={
            "stages": settings.stages,
            "pipelines": settings.pipelines,
            "steps": settings.steps,
            "schedule": settings.schedule,
            "sync": settings.sync,
            "device": device.type,
            "torch": str(torch.__version__),
        },
    )


def _device(settings: DemoConfig, ctx: DistContext) -> torch.device:
    # In the worker: a process that has initialised CUDA cannot fork workers that use it.
    if settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(
            "--device cuda on a machine without a usable GPU",
            expected="torch.cuda.is_available()",
            fix="use --device cpu; `polyrhythm doctor` lists what this machine has",
        )
    return torch.device("cuda", ctx.local_rank % torch.cuda.device_count())

"""The work of one worker: its stage of the demo model, step after step.

A step: run the schedule over the micro-batches, sum gradients with the other replicas of the stage,
update, record. The summed gradient is the mean over the global batch, exactly as in one process.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from polyrhythm.errors import LaunchError
from polyrhythm.events import EventLog, worker_log
from polyrhythm.run.compute import Compute
from polyrhythm.run.gpt import build_layers, next_byte_loss
from polyrhythm.run.job import Job, Settings
from polyrhythm.run.launch import Place
from polyrhythm.run.peers import waiting_for
from polyrhythm.run.pipeline import PipelineStage
from polyrhythm.run.replicas import Replicas
from polyrhythm.run.text import ByteText, read_text, standard_library
from polyrhythm.types import Worker


def load_text(settings: Settings) -> ByteText:
    """Called before workers are forked, so that they share it."""
    text = standard_library() if settings.text is None else read_text(settings.text)
    return ByteText.of(
        text,
        context=settings.context,
        microbatch_size=settings.microbatch_size,
        seed=settings.seed,
    )


def train(
    place: Place, job: Job, text: ByteText, run: Path | None, compute: Compute | None = None
) -> None:
    """Train as the worker of this place; rank 0 tells the others its `run`, the run folder.

    `compute` holds the worker back where a scenario wants it slow.
    """
    job.check_processes(place.world_size)
    worker = job.plan.worker(place.rank)
    device = _device(job.settings, place)
    with place.joined(job.settings.deadline):
        run = _agree_on_folder(job, text, run)
        with EventLog(worker_log(run, worker), worker) as log:
            if place.rank == 0:
                _record_job(job, device, log)
            stage = _build_stage(job, worker, device, log)
            stage.compute = compute or stage.compute
            replicas = Replicas(job.plan, worker, deadline=job.settings.deadline)
            _run_steps(job, stage, replicas, text)


def _agree_on_folder(job: Job, text: ByteText, run: Path | None) -> Path:
    """Hear rank 0's folder, and that it has the same text: machines may have other Pythons."""
    told = torch.zeros(4096, dtype=torch.uint8)
    if run is not None:
        message = f"{text.digest} {run}".encode()
        told[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    with waiting_for(job.plan.worker(0), "hearing the run folder"):
        dist.broadcast(told, src=0)
    digest, _, folder = bytes(told.tolist()).rstrip(b"\0").decode().partition(" ")
    if digest != text.digest:
        raise LaunchError(
            f"this worker's text has digest {text.digest}, rank 0's {digest}",
            expected="the same text on every machine",
            fix="use the same Python everywhere, or give the same file: --text FILE",
        )
    return Path(folder)


def _build_stage(job: Job, worker: Worker, device: torch.device, log: EventLog) -> PipelineStage:
    settings = job.settings
    layers = build_layers(settings.shape, job.plan.layers(worker.stage), seed=settings.seed)
    return PipelineStage(
        module=layers.to(device),
        loss_fn=next_byte_loss,
        plan=job.plan,
        worker=worker,
        boundary=torch.Size((settings.microbatch_size, settings.context, settings.width)),
        log=log,
        device=device,
    )


def _run_steps(job: Job, stage: PipelineStage, replicas: Replicas, text: ByteText) -> None:
    settings, log, worker = job.settings, stage.log, stage.worker
    optimizer = AdamW(stage.module.parameters(), lr=settings.lr)
    warmup = max(1, settings.steps // 10)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    for step in range(settings.steps):
        began = log.now()
        batch = [
            text.microbatch(step=step, pipeline=worker.pipeline, microbatch=m)
            for m in range(settings.microbatches)
        ]
        inputs, targets = zip(*batch, strict=True)
        loss = stage.run_step(job.schedule[worker.stage], inputs, targets, step=step)
        start = log.now()
        replicas.sum_gradients(stage.module)
        log.write("sync", start=start, step=step, name="all_reduce")
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        values = {} if loss is None else {"loss": loss, "tokens": settings.tokens_per_step}
        log.write("step", start=began, step=step, values=values)


def _record_job(job: Job, device: torch.device, log: EventLog) -> None:
    settings = job.settings
    log.write(
        "run",
        name="demo",
        values={
            "stages": settings.stages,
            "pipelines": settings.pipelines,
            "steps": settings.steps,
            "schedule": settings.schedule,
            "device": device.type,
            "torch": str(torch.__version__),
        },
    )


def _device(settings: Settings, place: Place) -> torch.device:
    # Asked in the worker: a process that has touched CUDA cannot fork workers that use it.
    if settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(
            "--device cuda on a machine without a usable GPU",
            expected="torch.cuda.is_available()",
            fix="use --device cpu; `polyrhythm doctor` says what this machine has",
        )
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())

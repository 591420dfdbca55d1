"""Train one worker's stage of the demo model, with the Trainer."""

from pathlib import Path

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from polyrhythm.errors import LaunchError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.store import JobStore, Members, job_store_backend
from polyrhythm.run.demo.gpt import (
    ByteText,
    build_layers,
    next_byte_loss,
    read_text,
    standard_library,
)
from polyrhythm.run.demo.job import DemoConfig, DemoJob
from polyrhythm.run.trainer.config import DataConfig
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sync.modes import SyncConfig


def load_text(settings: DemoConfig) -> ByteText:
    """Load the text; called before workers are forked, so that they share its memory."""
    text = standard_library() if settings.text is None else read_text(settings.text)
    return ByteText(text, context=settings.context)


def train(ctx: DistContext, job: DemoJob, text: ByteText, run_dir: Path | None) -> None:
    """Train as the worker of this rank; rank 0 broadcasts the run folder."""
    settings, plan = job.settings, job.plan
    job.check_processes(ctx.world_size)
    warmup = max(1, settings.steps // 10)
    with ctx.process_group(settings.timeout):
        store = JobStore(
            job_store_backend("polyrhythm/demo", settings.timeout),
            ctx.rank,
            timeout=settings.timeout,
            name_of=lambda rank: str(plan.worker(rank)),
        )
        members = Members(tuple(range(ctx.world_size)))
        fix = "pass the same file as --text on all machines, or use the same Python there"
        store.check_consistent("the text", {"text digest": text.digest}, members, fix=fix)
        folder = store.broadcast_object("the run folder", str(run_dir), members)
        with Trainer(
            lambda: build_layers(
                settings.shape, range(settings.shape.num_layers), seed=settings.seed
            ),
            next_byte_loss,
            lambda parameters: AdamW(parameters, lr=settings.lr),
            text,
            batch_size=settings.batch_size,
            microbatch_size=settings.microbatch_size,
            plan=plan,
            schedule=settings.schedule,
            sync=SyncConfig(settings.sync, options=settings.policy_options),
            lr_scheduler_fn=lambda optimizer: LambdaLR(
                optimizer, lambda step: min(1.0, (step + 1) / warmup)
            ),
            data=DataConfig(seed=settings.seed),
            device=_device(settings, ctx),
            run_dir=folder,
            timeout=settings.timeout,
        ) as trainer:
            trainer.fit(max_steps=settings.steps)


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

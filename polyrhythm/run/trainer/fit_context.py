"""What one worker of a job is to do, and how far it has come."""

import base64
import pickle
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from polyrhythm.errors import LaunchError
from polyrhythm.events import EventLog
from polyrhythm.run.checkpoint.manifest import CheckpointError, Manifest
from polyrhythm.run.data.loader import SampleLoader
from polyrhythm.run.data.reader import DatasetState
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.batch_shares import GlobalBatch
from polyrhythm.run.trainer.checkpointer import TrainerCheckpointer
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.run.trainer.preemption import PreemptionHandler
from polyrhythm.run.trainer.step_loop import WeightedLoss
from polyrhythm.run.trainer.store import LEADER
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.types import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class FitContext:
    """All that does not change while training goes on."""

    config: TrainerConfig
    worker: Worker
    global_batch: GlobalBatch
    shares: tuple[int, ...]  # micro-batches of each pipeline in a step, in lockstep
    pipeline: Pipeline
    samples: SampleLoader
    loss: WeightedLoss
    log: EventLog | None
    checkpointer: TrainerCheckpointer | None  # None without a run folder
    preemption: PreemptionHandler

    @property
    def num_pipelines(self) -> int:
        return len(self.shares)

    def new_optimizer(self) -> Optimizer:
        """Of this stage's parameters; raises LaunchError if it is of something else."""
        optimizer = self.config.optimizer_fn(self.pipeline.module.parameters())
        if not isinstance(optimizer, Optimizer):
            raise LaunchError(
                f"optimizer_fn gave a {type(optimizer).__name__}",
                expected="an optimizer of the parameters that it is given",
                fix="return it: lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",
            )
        own = set(self.pipeline.module.parameters())
        if any(p not in own for of in optimizer.param_groups for p in of["params"]):
            raise LaunchError(
                "optimizer_fn gave an optimizer of other parameters than it was given",
                expected="those of this worker's stage, which it is called with",
                fix="use its argument: lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",
            )
        return optimizer


@dataclass(slots=True, kw_only=True)
class TrainProgress:
    """At the end of a step, or of a fit."""

    optimizer: Optimizer
    step: int = 0  # global ones that are made
    sampler_state: SamplerState = field(default_factory=SamplerState)  # of samples, at that step
    lr_state: dict[str, Any] | None = None  # the state of the learning rates' schedule

    def make_lr_scheduler(self, own: FitContext, optimizer: Optimizer) -> LRScheduler | None:
        """The schedule of learning rates, where it was."""
        if own.config.lr_scheduler_fn is None:
            return None
        before = [{k: v for k, v in of.items() if k != "params"} for of in optimizer.param_groups]
        lr_scheduler = own.config.lr_scheduler_fn(optimizer)
        if not isinstance(lr_scheduler, LRScheduler) or isinstance(lr_scheduler, ReduceLROnPlateau):
            raise LaunchError(
                f"lr_scheduler_fn gave a {type(lr_scheduler).__name__}",
                expected="a schedule of torch.optim.lr_scheduler, which goes by steps alone",
                fix="return LambdaLR(optimizer, ...), OneCycleLR, ...; one that follows losses "
                "would differ from worker to worker",
            )
        if self.lr_state is not None:
            lr_scheduler.load_state_dict(self.lr_state)
            # Making one sets what it schedules, betas perhaps, to where it begins.
            for group, values in zip(optimizer.param_groups, before, strict=True):
                group |= values
            for group, rate in zip(optimizer.param_groups, lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        return lr_scheduler

    def restore(self, found: Manifest) -> DatasetState | None:
        """From a checkpoint; where a stream of samples goes on, if it is one."""
        if not {"supply", "rates"} <= found.extra.keys():
            raise CheckpointError(
                f"a checkpoint of step {found.step} that a Trainer has not made",
                expected="one with which samples were used, and the learning rates",
                fix="load the model from it by Checkpoints.restore, and begin anew",
            )
        self.step, self.sampler_state = (
            found.step,
            msgspec.convert(found.extra["supply"], SamplerState),
        )
        self.lr_state = pickle.loads(base64.b64decode(found.extra["rates"]))
        place = found.extra.get("stream")
        return None if place is None else DatasetState.from_json(place)

    def extra(self, own: FitContext, sampler_state: SamplerState) -> dict[str, Any]:
        """What a checkpoint keeps beside model and optimizer."""
        # Pickled: schedules hold counters of whole numbers, which JSON would turn into texts.
        lr_scheduler = base64.b64encode(pickle.dumps(self.lr_state)).decode()
        extra = {"supply": msgspec.to_builtins(sampler_state), "rates": lr_scheduler}
        # The first worker's word is kept, and it has read until there.
        place = own.samples.state_at(sampler_state.first_unused) if own.worker == LEADER else None
        return extra if place is None else extra | {"stream": place.as_json()}

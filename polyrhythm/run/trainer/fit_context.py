"""The constant context of one worker's training, and its progress."""

import base64
import pickle
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from polyrhythm.errors import LaunchError
from polyrhythm.run.checkpoint.manifest import CheckpointError, Manifest
from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.run.data.loader import SampleLoader
from polyrhythm.run.data.reader import DatasetState
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.batch_shares import GlobalBatch
from polyrhythm.run.trainer.checkpointer import TrainerCheckpointer
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.run.trainer.preemption import PreemptionHandler
from polyrhythm.run.trainer.rank_assignment import LEADER
from polyrhythm.run.trainer.step_loop import WeightedLoss
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.types import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class FitContext:
    """The objects and settings that do not change during training."""

    config: TrainerConfig
    worker: Worker
    store: JobStore
    members: Members
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
        """Make the optimizer of this stage's parameters; raises LaunchError."""
        optimizer = self.config.optimizer_fn(self.pipeline.module.parameters())
        if not isinstance(optimizer, Optimizer):
            raise LaunchError(
                f"optimizer_fn returned a {type(optimizer).__name__}",
                expected="an optimizer of the parameters that it is called with",
                fix="return it: lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",
            )
        own = set(self.pipeline.module.parameters())
        if any(p not in own for group in optimizer.param_groups for p in group["params"]):
            raise LaunchError(
                "optimizer_fn returned an optimizer of other parameters",
                expected="the parameters of this worker's stage, which it is called with",
                fix="use its argument: lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",
            )
        return optimizer


@dataclass(slots=True, kw_only=True)
class TrainProgress:
    """The training state at the end of a step or of a fit."""

    optimizer: Optimizer
    step: int = 0  # global steps done
    sampler_state: SamplerState = field(default_factory=SamplerState)  # at the end of a phase
    lr_state: dict[str, Any] | None = None  # state of the learning rate scheduler

    def make_lr_scheduler(self, context: FitContext, optimizer: Optimizer) -> LRScheduler | None:
        """Make the learning rate scheduler and load its state."""
        if context.config.lr_scheduler_fn is None:
            return None
        groups = optimizer.param_groups
        before = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        lr_scheduler = context.config.lr_scheduler_fn(optimizer)
        if not isinstance(lr_scheduler, LRScheduler) or isinstance(lr_scheduler, ReduceLROnPlateau):
            raise LaunchError(
                f"lr_scheduler_fn returned a {type(lr_scheduler).__name__}",
                expected="a scheduler of torch.optim.lr_scheduler that depends on steps alone",
                fix="return LambdaLR(optimizer, ...), OneCycleLR, ...; a scheduler that follows "
                "losses would differ between workers",
            )
        if self.lr_state is not None:
            lr_scheduler.load_state_dict(self.lr_state)
            # Its constructor resets what it schedules (rates, perhaps betas) to the start.
            for group, values in zip(groups, before, strict=True):
                group |= values
            for group, rate in zip(groups, lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        return lr_scheduler

    def restore(self, manifest: Manifest) -> DatasetState | None:
        """Load the state from a checkpoint; return the state of an iterable dataset."""
        extra = manifest.extra
        if not {"supply", "rates"} <= extra.keys():
            raise CheckpointError(
                f"a checkpoint of step {manifest.step} that was not saved by a Trainer",
                expected="a checkpoint with sampler state and learning rates",
                fix="load the model from it by Checkpointer.restore, and start from step 0",
            )
        self.step = manifest.step
        self.sampler_state = msgspec.convert(extra["supply"], SamplerState)
        self.lr_state = pickle.loads(base64.b64decode(extra["rates"]))
        stream = extra.get("stream")
        return None if stream is None else DatasetState.from_json(stream)

    def extra(self, context: FitContext, sampler_state: SamplerState) -> dict[str, Any]:
        """Return what a checkpoint holds besides model and optimizer."""
        # Pickled: schedulers hold dicts with integer keys, which JSON would turn into strings.
        rates = base64.b64encode(pickle.dumps(self.lr_state)).decode()
        extra = {"supply": msgspec.to_builtins(sampler_state), "rates": rates}
        if context.worker != LEADER:  # the manifest has rank 0's `extra`
            return extra
        stream = context.samples.state_at(sampler_state.first_unused)
        return extra if stream is None else extra | {"stream": stream.as_json()}

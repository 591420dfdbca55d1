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
from polyrhythm.run.data.loading import Samples
from polyrhythm.run.data.reading import Bookmark
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.keeping import Keeping
from polyrhythm.run.trainer.loop import Loss
from polyrhythm.run.trainer.notice import Notice
from polyrhythm.run.trainer.settings import Settings
from polyrhythm.run.trainer.shares import Batches
from polyrhythm.run.trainer.telling import FIRST
from polyrhythm.sync.dispenser import Supply
from polyrhythm.types import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """All that does not change while training goes on."""

    settings: Settings
    worker: Worker
    batches: Batches
    shares: tuple[int, ...]  # micro-batches of each pipeline in a step, in lockstep
    pipeline: Pipeline
    samples: Samples
    loss: Loss
    log: EventLog | None
    keeping: Keeping | None  # None without a run folder
    notice: Notice

    @property
    def num_pipelines(self) -> int:
        return len(self.shares)

    def new_optimizer(self) -> Optimizer:
        """Of this stage's parameters; raises LaunchError if it is of something else."""
        optimizer = self.settings.optimizer_fn(self.pipeline.module.parameters())
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
class Progress:
    """At the end of a step, or of a fit."""

    optimizer: Optimizer
    step: int = 0  # global ones that are made
    supply: Supply = field(default_factory=Supply)  # of samples, at that step
    rates: dict[str, Any] | None = None  # the state of the learning rates' schedule

    def new_rates(self, own: Assignment, optimizer: Optimizer) -> LRScheduler | None:
        """The schedule of learning rates, where it was."""
        if own.settings.lr_scheduler_fn is None:
            return None
        before = [{k: v for k, v in of.items() if k != "params"} for of in optimizer.param_groups]
        rates = own.settings.lr_scheduler_fn(optimizer)
        if not isinstance(rates, LRScheduler) or isinstance(rates, ReduceLROnPlateau):
            raise LaunchError(
                f"lr_scheduler_fn gave a {type(rates).__name__}",
                expected="a schedule of torch.optim.lr_scheduler, which goes by steps alone",
                fix="return LambdaLR(optimizer, ...), OneCycleLR, ...; one that follows losses "
                "would differ from worker to worker",
            )
        if self.rates is not None:
            rates.load_state_dict(self.rates)
            # Making one sets what it schedules, betas perhaps, to where it begins.
            for group, values in zip(optimizer.param_groups, before, strict=True):
                group |= values
            for group, rate in zip(optimizer.param_groups, rates.get_last_lr(), strict=True):
                group["lr"] = rate
        return rates

    def restore(self, found: Manifest) -> Bookmark | None:
        """From a checkpoint; where a stream of samples goes on, if it is one."""
        if not {"supply", "rates"} <= found.extra.keys():
            raise CheckpointError(
                f"a checkpoint of step {found.step} that a Trainer has not made",
                expected="one with which samples were used, and the learning rates",
                fix="load the model from it by Checkpoints.restore, and begin anew",
            )
        self.step, self.supply = found.step, msgspec.convert(found.extra["supply"], Supply)
        self.rates = pickle.loads(base64.b64decode(found.extra["rates"]))
        place = found.extra.get("stream")
        return None if place is None else Bookmark.from_json(place)

    def extra(self, own: Assignment, supply: Supply) -> dict[str, Any]:
        """What a checkpoint keeps beside model and optimizer."""
        # Pickled: schedules hold counters of whole numbers, which JSON would turn into texts.
        rates = base64.b64encode(pickle.dumps(self.rates)).decode()
        extra = {"supply": msgspec.to_builtins(supply), "rates": rates}
        # The first worker's word is kept, and it has read until there.
        place = own.samples.bookmark(supply.unused) if own.worker == FIRST else None
        return extra if place is None else extra | {"stream": place.as_json()}

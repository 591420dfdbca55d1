"""What one worker of a job is to do, and how far it has come."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polyrhythm.events import EventLog
from polyrhythm.run.data.loading import Samples
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.keeping import Keeping
from polyrhythm.run.trainer.loop import Loss
from polyrhythm.run.trainer.notice import Notice
from polyrhythm.run.trainer.settings import Settings
from polyrhythm.run.trainer.shares import Batches
from polyrhythm.run.trainer.turns import FIRST
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
        return self.settings.optimizer_fn(self.pipeline.module.parameters())


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
        rates = own.settings.lr_scheduler_fn(optimizer)
        if self.rates is not None:
            rates.load_state_dict(self.rates)
            for group, rate in zip(optimizer.param_groups, rates.get_last_lr(), strict=True):
                group["lr"] = rate
        return rates

    def extra(self, own: Assignment, supply: Supply) -> dict[str, Any]:
        """What a checkpoint keeps beside model and optimizer."""
        extra = {"supply": msgspec.to_builtins(supply), "rates": self.rates}
        # The first worker's word is kept, and it has read until there.
        place = own.samples.bookmark(supply.unused) if own.worker == FIRST else None
        return extra if place is None else extra | {"stream": place.as_json()}

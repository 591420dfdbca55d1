"""The training state that a checkpoint holds besides model and optimizer."""

import base64
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from polyrhythm.errors import LaunchError
from polyrhythm.run.checkpoint.encoding import decode_state, encode_state
from polyrhythm.run.checkpoint.manifest import CheckpointError, Manifest
from polyrhythm.run.data.reader import DatasetState
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.sync.dispatch import SamplerState

_LR_STATE = "the state of the learning rate scheduler"


@dataclass(slots=True, kw_only=True)
class TrainProgress:
    """The training state at the end of a step or of a fit."""

    optimizer: Optimizer
    step: int = 0  # global steps done
    sampler_state: SamplerState = field(default_factory=SamplerState)  # at the end of a phase
    lr_state: dict[str, Any] | None = None  # state of the learning rate scheduler

    def make_lr_scheduler(self, config: TrainerConfig, optimizer: Optimizer) -> LRScheduler | None:
        """Make the learning rate scheduler and load its state."""
        if config.lr_scheduler_fn is None:
            return None
        groups = optimizer.param_groups
        before = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        lr_scheduler = config.lr_scheduler_fn(optimizer)
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
        self.lr_state = decode_state(base64.b64decode(extra["rates"]), _LR_STATE)
        stream = extra.get("stream")
        return None if stream is None else DatasetState.from_json(stream)

    def extra(
        self, sampler_state: SamplerState, dataset_state: DatasetState | None
    ) -> dict[str, Any]:
        """Return what a checkpoint holds besides model and optimizer."""
        rates = base64.b64encode(encode_state(self.lr_state, _LR_STATE)).decode()
        extra = {"supply": msgspec.to_builtins(sampler_state), "rates": rates}
        return extra if dataset_state is None else extra | {"stream": dataset_state.as_json()}

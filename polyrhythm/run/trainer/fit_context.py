"""What one call of `fit` works with: the objects that stay, and the progress of training."""

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import msgspec
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from polyrhythm.errors import LaunchError
from polyrhythm.run.checkpoint.encoding import decode_state, encode_state
from polyrhythm.run.checkpoint.manifest import CheckpointError, Evaluation, Manifest
from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.run.data.loader import SampleLoader
from polyrhythm.run.data.reader import StreamState
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.checkpointer import TrainerCheckpointer
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.run.trainer.evaluate import BatchDispatcher
from polyrhythm.run.trainer.metrics import MetricGather
from polyrhythm.run.trainer.optimizers import LRSchedule
from polyrhythm.run.trainer.preemption import InterruptDelay, PreemptionHandler
from polyrhythm.run.trainer.rank_assignment import LEADER
from polyrhythm.run.trainer.sampler import DataSettings, GlobalBatch
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.types import Worker

_LR_STATE = "the state of the learning rate scheduler"


@dataclass(slots=True, kw_only=True)
class TrainProgress:
    """The training state at the end of a step or of a fit."""

    optimizer: Optimizer
    step: int = 0  # global steps done
    sampler_state: SamplerState = field(default_factory=SamplerState)  # at the end of a phase
    lr_state: dict[str, Any] | None = None  # state of the learning rate scheduler
    evaluation: tuple[int, Evaluation] | None = None  # the last one, and the step that it is of
    is_finite: bool = True  # the loss and the gradients of the last step
    is_updating: bool = False  # weights, optimizer and step are not of the same step
    problem: str = ""  # after a failed fit: why this is not the state after `step`
    interrupts: InterruptDelay = field(default_factory=InterruptDelay)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Mark a block that updates them, and delay Ctrl-C until its end."""
        with self.interrupts.delayed():
            self.is_updating = True
            yield
            self.is_updating = False

    def make_lr_scheduler(
        self, config: TrainerConfig, optimizer: Optimizer, max_steps: int
    ) -> LRScheduler | None:
        """Make the learning rate scheduler and load its state."""
        lr_schedule = config.lr_schedule
        if lr_schedule is None:
            return None
        groups = optimizer.param_groups
        before = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        lr_scheduler: Any
        if isinstance(lr_schedule, LRSchedule):
            lr_scheduler = lr_schedule.scheduler(optimizer, max_steps)
        else:
            lr_scheduler = lr_schedule(optimizer)
        if not isinstance(lr_scheduler, LRScheduler) or isinstance(lr_scheduler, ReduceLROnPlateau):
            raise LaunchError(
                f"lr_schedule returned a {type(lr_scheduler).__name__}",
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
        if config.run_dir is not None:  # refused now, not at the first save
            encode_state(lr_scheduler.state_dict(), _LR_STATE)
        found: LRScheduler = lr_scheduler
        return found

    def restore(self, manifest: Manifest) -> StreamState | None:
        """Load the state from a checkpoint; return the state of an iterable dataset."""
        extra = manifest.extra
        self.step, self.is_updating, self.problem = manifest.step, False, ""
        self.evaluation = None
        self.sampler_state = msgspec.convert(extra["supply"], SamplerState)
        self.lr_state = decode_state(base64.b64decode(extra["rates"]), _LR_STATE)
        return _stream_state(manifest)

    def extra(
        self, sampler_state: SamplerState, dataset_state: StreamState | None
    ) -> dict[str, Any]:
        """Return what a checkpoint holds besides model and optimizer."""
        rates = base64.b64encode(encode_state(self.lr_state, _LR_STATE)).decode()
        extra = {"supply": msgspec.to_builtins(sampler_state), "rates": rates}
        if self.evaluation is not None and self.evaluation[0] == self.step:
            extra[Evaluation.KEY] = msgspec.to_builtins(self.evaluation[1])
        return extra if dataset_state is None else extra | {"stream": dataset_state.as_json()}


def _stream_state(manifest: Manifest) -> StreamState | None:
    stream = manifest.extra.get("stream")
    return None if stream is None else StreamState.from_json(stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitContext:
    """The objects and settings that do not change during training."""

    config: TrainerConfig
    worker: Worker
    store: JobStore
    members: Members
    first_stages: Members  # by pipeline
    global_batch: GlobalBatch
    shares: tuple[int, ...]  # micro-batches of each pipeline in a step, in lockstep
    pipeline: Pipeline
    samples: SampleLoader
    log: EventLog | None
    checkpointer: TrainerCheckpointer | None  # None without a run folder
    preemption: PreemptionHandler
    machines: Sequence[str]  # by rank; needed under sync="auto"
    metric_store: JobStore  # of the thread that publishes metrics in groups
    evaluation_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    metric_gathers: dict[tuple[int, ...], MetricGather] = field(default_factory=dict)  # by ranks
    # Of the replicas of this stage, by pipelines: after a loss, those that are left.
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def num_pipelines(self) -> int:
        return len(self.shares)

    @property
    def pipelines(self) -> list[int]:
        """The pipelines that are left; in a phase they are numbered by their index here."""
        return [rank // self.pipeline.num_stages for rank in self.first_stages.ranks]

    def among(self, pipelines: Sequence[int]) -> "FitContext":
        """Return the context without the other pipelines, which are lost: these do their work."""

        def left(members: Members) -> Members:
            ranks = (r for r in members.ranks if r // self.pipeline.num_stages in pipelines)
            return Members(tuple(ranks), members.epoch)

        return replace(
            self,
            members=left(self.members),
            first_stages=left(self.first_stages),
            shares=self.global_batch.equal_shares(len(pipelines)),
        )

    @property
    def is_leader(self) -> bool:
        return self.worker == LEADER

    def metric_gather(self, *, in_lockstep: bool) -> MetricGather | None:
        """Return the gather of the workers in lockstep, in groups of the stages of this pipeline.

        None if this worker is the only one; made by all of them together.
        """
        num_stages, pipeline = self.pipeline.num_stages, self.worker.pipeline
        own = tuple(range(pipeline * num_stages, (pipeline + 1) * num_stages))
        ranks = self.members.ranks if in_lockstep else own
        if len(ranks) == 1:
            return None
        if ranks not in self.metric_gathers:
            self.metric_gathers[ranks] = MetricGather(ranks, timeout=self.config.timeout)
        return self.metric_gathers[ranks]

    def batch_dispatcher(self, num_samples: int) -> BatchDispatcher:
        """Return the dispatcher of the next evaluation; all workers make it."""
        return BatchDispatcher(
            next(self.evaluation_numbers),
            self.store,
            self.members,
            num_samples,
            max(1, self.global_batch.size // self.num_pipelines),
        )

    @property
    def data_settings(self) -> DataSettings:
        data, global_batch = self.config.data, self.global_batch
        return DataSettings(
            batch_size=global_batch.size,
            microbatch_size=global_batch.microbatch_size,
            seed=data.seed,
            shuffle=data.shuffle,
            num_samples=self.samples.num_samples,
            first_position=global_batch.first_position,
        )

    def saved_settings(self, manifest: Manifest, *, restarts_data: bool) -> DataSettings | None:
        """Return those of a checkpoint, None if it has none; refuse it if they do not fit."""
        if not {"supply", "rates"} <= manifest.extra.keys():
            raise CheckpointError(
                f"a checkpoint of step {manifest.step} that was not saved by a Trainer",
                expected="a checkpoint with sampler state and learning rates",
                fix="load the model from it by Checkpointer.restore, and start from step 0",
            )
        stream = _stream_state(manifest)
        if stream is not None and not restarts_data:
            self.samples.check_state(stream)
        if "data" not in manifest.extra:
            return None
        saved = msgspec.convert(manifest.extra["data"], DataSettings)
        if not restarts_data:
            self.data_settings.check_continues(saved)
        return saved

    def extra(self, progress: TrainProgress, sampler_state: SamplerState) -> dict[str, Any]:
        """Return what a checkpoint holds besides model and optimizer."""
        first_unused = sampler_state.first_unused  # the manifest has the leader's `extra`
        dataset_state = self.samples.state_at(first_unused) if self.is_leader else None
        settings = {"data": msgspec.to_builtins(self.data_settings)}
        return progress.extra(sampler_state, dataset_state) | settings

    def new_optimizer(self) -> Optimizer:
        """Make the optimizer of this stage's parameters; raises LaunchError."""
        named = list(self.pipeline.module.named_parameters())
        try:
            optimizer = self.config.optimizer_fn(named)
        except Exception as error:  # the user's function may raise anything
            raise LaunchError(
                f"optimizer_fn raised {type(error).__name__}: {error}",
                expected="a function of (name, parameter) pairs, as torch's optimizers take them",
                fix="to choose parameters, write [p for name, p in named if p.dim() > 1]",
            ) from error
        if not isinstance(optimizer, Optimizer):
            raise LaunchError(
                f"optimizer_fn returned a {type(optimizer).__name__}",
                expected="an optimizer of the parameters that it is called with",
                fix="return it: lambda named: torch.optim.AdamW(named, lr=3e-4)",
            )
        own = {parameter for _, parameter in named}
        if any(p not in own for group in optimizer.param_groups for p in group["params"]):
            raise LaunchError(
                "optimizer_fn returned an optimizer of other parameters",
                expected="the parameters of this worker's stage, which it is called with",
                fix="use its argument: lambda named: torch.optim.AdamW(named, lr=3e-4)",
            )
        return optimizer

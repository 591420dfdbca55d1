"""One call of `fit`: a sequence of phases, each of which trains in one sync mode.

A step of a worker: acquire samples, run the pipeline, update, synchronise, record.

A job with a fixed sync mode has one phase; in groups an evaluation ends it, so that all replicas
are equal, and the next one continues. Under `sync="auto"` a phase ends when another mode is
predicted to be faster: all replicas average to equal weights, rank 0 broadcasts which samples are
left, and the next phase starts from there. A preemption notice also ends the phase
(`preemption.py`).
"""

import base64
import contextlib
import logging
import math
import time
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from polyrhythm.errors import LaunchError, PeerError, TrainingError, peer_errors
from polyrhythm.events import Value
from polyrhythm.run.checkpoint.encoding import decode_state, encode_state
from polyrhythm.run.checkpoint.manifest import CheckpointError, Evaluation, Manifest
from polyrhythm.run.comm.epoch import current_epoch
from polyrhythm.run.comm.process_groups import new_gloo_group
from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.run.data.loader import SampleLoader, StageLoader
from polyrhythm.run.data.reader import StreamState
from polyrhythm.run.data.sample_dispatcher import SampleDispatcher
from polyrhythm.run.pipeline.batch import BatchSlice, EndOfDataError
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.check_model import check_inputs
from polyrhythm.run.trainer.checkpointer import TrainerCheckpointer
from polyrhythm.run.trainer.config import FitConfig, TrainerConfig
from polyrhythm.run.trainer.elastic import ElasticJob
from polyrhythm.run.trainer.evaluate import EVAL_LOSS, BatchDispatcher, Evaluator
from polyrhythm.run.trainer.metrics import (
    STEPS_TOGETHER,
    Callback,
    GroupMetrics,
    Improvement,
    Measured,
    MeasuredStep,
    MetricGather,
    PeakMemory,
    StepMetrics,
    call_hooks,
    count_tokens,
)
from polyrhythm.run.trainer.optimizers import LRSchedule
from polyrhythm.run.trainer.preemption import InterruptDelay, PreemptionHandler
from polyrhythm.run.trainer.rank_assignment import LEADER
from polyrhythm.run.trainer.sampler import (
    DataSettings,
    FixedShareSampler,
    GlobalBatch,
    LockstepSampler,
    make_sampler,
    sum_of_weights,
)
from polyrhythm.run.trainer.sync_strategy import (
    DecoupledStrategy,
    LossScaler,
    NoSync,
    make_sync_strategy,
    zero_momentum,
)
from polyrhythm.run.trainer.sync_tuner import StepTimeExchange
from polyrhythm.sinks.jsonl import AppendedLines, EventLog
from polyrhythm.sinks.metrics import Logger, StepInfo
from polyrhythm.sinks.progress import FitProgress
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.sync.modes import SyncMode
from polyrhythm.sync.replay import JobShape, StepTiming
from polyrhythm.types import AUTO, Seconds, Worker

_LR_STATE = "the state of the learning rate scheduler"
_LOOK_INTERVAL: Seconds = 0.1  # for a checkpoint that has become complete
NUM_STEPS_KEPT = 1000  # in memory, of a fit
_BY_CALLBACK = "a callback"  # ends training early
_RESTORE = ", and restore() the newest checkpoint, which has finite weights"
_logger = logging.getLogger(__name__)
_MIN_COMPUTE: Seconds = 1e-6  # clock differences may yield 0 or less


@dataclass(slots=True, kw_only=True)
class TrainProgress:
    """The training state at the end of a step or of a fit."""

    optimizer: Optimizer
    paused: DecoupledStrategy | None = None  # of the last fit: the state stays sharded
    step: int = 0  # global steps done
    sampler_state: SamplerState = field(default_factory=SamplerState)  # at the end of a phase
    lr_state: dict[str, Any] | None = None  # state of the learning rate scheduler
    scaler: LossScaler | None = None  # in float16
    evaluation: tuple[int, Evaluation] | None = None  # the last one, and the step that it is of
    is_finite: bool = True  # the loss and the gradients of the last step
    is_updating: bool = False  # weights, optimizer and step are not of the same step
    # In groups that may lose workers: these weights were not averaged with all others since a step.
    is_cut: bool = False
    # Replicas have averaged weights, but not the optimizer's state.
    has_own_optimizer: bool = False
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

    def load(self, step: int, extra: Mapping[str, Any]) -> StreamState | None:
        """Load what `extra` has returned after `step`; return the state of an iterable dataset."""
        self.step, self.is_updating, self.problem = step, False, ""
        self.evaluation = None
        self.sampler_state = msgspec.convert(extra["supply"], SamplerState)
        self.lr_state = decode_state(base64.b64decode(extra["rates"]), _LR_STATE)
        if self.scaler is not None:
            self.scaler = LossScaler(self.scaler.device)
            if "scaler" in extra:  # otherwise it was saved without one, and a new one starts
                self.scaler.load_state_dict(extra["scaler"])
        return _stream_state(extra)

    def extra(
        self, sampler_state: SamplerState, dataset_state: StreamState | None
    ) -> dict[str, Any]:
        """Return what a checkpoint holds besides model and optimizer."""
        rates = base64.b64encode(encode_state(self.lr_state, _LR_STATE)).decode()
        extra = {"supply": msgspec.to_builtins(sampler_state), "rates": rates}
        if self.evaluation is not None and self.evaluation[0] == self.step:
            extra[Evaluation.KEY] = msgspec.to_builtins(self.evaluation[1])
        if self.scaler is not None:
            extra["scaler"] = self.scaler.state_dict()
        return extra if dataset_state is None else extra | {"stream": dataset_state.as_json()}


def _stream_state(extra: Mapping[str, Any]) -> StreamState | None:
    stream = extra.get("stream")
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
    open_gather_store: Callable[[], JobStore]  # for a MetricGather
    site: str | None  # of the workers that communicate over NCCL
    note: str = ""  # shown before the first step
    elastic: ElasticJob | None = None  # if the job goes on after a loss
    evaluation_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    # By ranks, and whether they go around broken links.
    metric_gathers: dict[tuple[tuple[int, ...], bool], MetricGather] = field(default_factory=dict)
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

    @property
    def keeps_copies(self) -> bool:
        """Whether each shard of the optimizer's state has a copy, for when its owner is lost."""
        return self.elastic is not None and self.config.sync.buddy

    def metric_gather(self, *, in_lockstep: bool, has_detours: bool) -> MetricGather | None:
        """Return the gather of the workers in lockstep, in groups of the stages of this pipeline.

        None if this worker is the only one; made by all of them together. `has_detours`: training
        goes around broken links between pipelines.
        """
        num_stages, pipeline = self.pipeline.num_stages, self.worker.pipeline
        own = tuple(range(pipeline * num_stages, (pipeline + 1) * num_stages))
        ranks = self.members.ranks if in_lockstep else own
        if len(ranks) == 1:
            return None
        key = ranks, in_lockstep and has_detours
        if key not in self.metric_gathers:
            self.metric_gathers[key] = MetricGather(
                ranks,
                timeout=self.config.timeout,
                store=self.open_gather_store() if in_lockstep and has_detours else None,
                name=f"gather {len(self.metric_gathers)}",
            )
        return self.metric_gathers[key]

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
        stream = _stream_state(manifest.extra)
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
        return new_optimizer(self.config, self.pipeline.module)


def new_optimizer(config: TrainerConfig, module: torch.nn.Module) -> Optimizer:
    """Make the optimizer of a stage's parameters; raises LaunchError."""
    named = list(module.named_parameters())
    try:
        optimizer = config.optimizer_fn(named)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncDecision:
    """The leader's decision at the end of a window or of a phase: how the fit continues."""

    sync_mode: str | None  # of the next phase; None: the fit is over
    sampler_state: SamplerState  # which samples are left
    exit_status: int = 0  # after a preemption notice or Ctrl-C the fit ends early, and the process
    problem: str = ""  # the fit ends early, with this error: a loss that is not finite
    lost: tuple[int, ...] = ()  # pipelines that are no longer waited for


class FitLoop:
    """All phases of one fit on one worker."""

    def __init__(
        self,
        name: str,
        context: FitContext,
        progress: TrainProgress,
        config: FitConfig,
        loggers: Sequence[Logger],
        evaluator: Evaluator | None = None,
        *,
        may_gather_together: bool = False,
    ) -> None:
        """`name` is unique to this fit; `loggers` are empty except on the leader."""
        self.context, self.progress, self.config, self.loggers = context, progress, config, loggers
        # Counted from the start of training.
        self.num_steps = config.num_steps(context.global_batch, context.samples.num_samples)
        self._evaluator, self.evals = evaluator, list[tuple[int, dict[str, float]]]()
        self._limit = 0  # samples of all phases until the end of this one
        self._saved = SavedCheckpoints(name, context, config.callbacks)
        self._name, self._num_decisions, self._num_gathers = name, 0, 0
        self._last_mode = ""
        self.stage_loader = StageLoader(context.pipeline, context.samples)
        is_whole = context.samples.num_samples is None and context.samples.num_shards == 1
        if is_whole and context.num_pipelines > 1 and context.is_leader:
            _logger.info(
                "each pipeline reads the whole stream, and skips the samples of others: a dataset "
                "with `num_shards` and `shard(num_shards, index)` is divided among pipelines"
            )
        self.exchange: StepTimeExchange | None = None  # under sync="auto"
        if context.config.sync.mode == AUTO and context.num_pipelines > 1:
            shape = JobShape(
                shares=context.shares,
                num_stages=context.pipeline.num_stages,
                overlap=True,
                is_one_machine=len({context.machines[rank] for rank in context.members.ranks}) == 1,
            )
            self.exchange = StepTimeExchange(
                name,
                context.store,
                context.first_stages,
                context.pipelines,
                shape,
                context.log,
            )
        self.steps: deque[StepInfo] = deque(maxlen=NUM_STEPS_KEPT)
        self.losses = array("d")  # of all steps: 8 bytes each
        self.exit_status = 0  # after a preemption notice
        self.wants_stop = False  # a callback of this worker
        self.is_stopping = False  # in lockstep, by a callback: no worker starts another step
        self.problem = ""  # why the fit ends with an error
        self.may_gather_together = may_gather_together  # no worker has a callback
        self.has_checked_inputs = False  # on first stages, by the first batch
        self.has_warned_of_labels = self.has_warned_of_scale = False
        self.peak_memory = PeakMemory(context.pipeline.device)
        self.display: FitProgress | None = None
        self.phase: Phase | None = None  # the last one
        self.why_epoch_ends = ""  # after the current step, since a worker leaves
        self.committed: int | None = None  # the last step that all workers have made in this epoch
        self._is_continued = False  # after the end of an epoch

    def continue_from(self, earlier: "FitLoop") -> None:
        """Take over what `earlier`, of the epoch before, has reported of the same fit."""
        self.steps, self.losses, self.evals = earlier.steps, earlier.losses, earlier.evals
        self.wants_stop, self.problem = earlier.wants_stop, earlier.problem
        self.is_stopping, self.phase = earlier.is_stopping, earlier.phase
        self._is_continued = True
        self.has_checked_inputs = earlier.has_checked_inputs
        self.has_warned_of_labels = earlier.has_warned_of_labels
        self.has_warned_of_scale = earlier.has_warned_of_scale

    def continue_others(self) -> None:
        """Take part in a fit that others have begun."""
        self._is_continued = True

    def end_epoch(self) -> None:
        """After a failure: set the progress to that after the last step that all have made."""
        if self.committed is not None:
            self.catch_up(self.committed + 1)

    def catch_up(self, num_steps: int) -> None:
        """Set the progress to that after so many global steps, which others may have made."""
        if self.phase is not None:
            self.phase.set_progress(num_steps)

    def set_samples(self, sampler_state: SamplerState) -> None:
        """After the end of an epoch in groups: go on after the samples that are used."""
        progress = self.progress
        progress.sampler_state = sampler_state
        progress.step = self.context.global_batch.step_at(sampler_state.num_used)
        if self.phase is not None:
            self.phase.set_lr_scheduler(progress.step)
            progress.lr_state = self.phase.lr_state()

    def run(self) -> None:
        name: str | None = self.context.config.sync.first_mode.name
        if self.context.is_leader and self.config.progress:
            self.display = FitProgress(
                self.progress.step,
                self.num_steps,
                epochs_at=None if self.context.samples.num_samples is None else self._epochs_at,
                note=self.context.note,
            )
        try:
            self._saved.begin()
            with self.progress.interrupts.installed():
                while name is not None:
                    name = self._train(SyncMode.named(name))
            self._saved.finish()
            if self.context.elastic is not None:
                self._wait_for_last_save()
                self.context.elastic.end_fit()
            self.context.pipeline.finish_log()
        finally:
            if self.context.checkpointer is not None:
                self.context.checkpointer.before_update()  # which users may make now
            if self.display is not None:
                self.display.close()
            self.stage_loader.close()
            if self._evaluator is not None:
                self._evaluator.close()
            for sink in (self.context.log, *self.loggers):
                if isinstance(sink, AppendedLines):
                    sink.flush()
        if self.problem:
            self._raise_not_finite()

    def _wait_for_last_save(self) -> None:
        """Wait until the last checkpoint is on disk: after a loss meanwhile it is saved again."""
        context, checkpointer = self.context, self.context.checkpointer
        if checkpointer is not None:
            name = f"the last checkpoint of {self._name}"
            context.store.run_on_leader(name, checkpointer.wait_for_disk, context.members)

    def request_stop(self, why: str, group_metrics: GroupMetrics | None = None) -> None:
        """End training early; `why` is empty, or says what was not finite.

        In lockstep all workers call it at the end of the same step. In groups one worker does, with
        its `group_metrics`, and the leader ends the samples.
        """
        if group_metrics is not None:
            group_metrics.request_stop(why or _BY_CALLBACK)
        else:
            self.is_stopping, self.problem = True, self.problem or why

    def report(self, info: StepInfo, shown: StepInfo) -> bool:
        """Show and log the metrics of a step; return whether a callback wants to stop."""
        self.steps.append(info)
        self.losses.append(math.nan if info.loss is None else info.loss)
        if self.display is not None:
            self.display.update(shown)
        if self.loggers:
            values = shown.values()
            for logger in self.loggers:
                logger.log(shown.step, values)
        wants_stop = call_hooks(self.config.callbacks, "on_step", info)
        return self._saved.report() or wants_stop

    def _epochs_at(self, step: int) -> float:
        assert self.context.samples.num_samples is not None, "an epoch has an end"
        return self.context.global_batch.start_of(step) / self.context.samples.num_samples

    def is_evaluated(self, step: int) -> bool:
        """Whether an evaluation is due during training, before its last step, after `step`."""
        every = self.config.eval_every
        return every is not None and step % every == 0 and 0 < step < self.num_steps

    @property
    def _next_evaluation(self) -> int:
        """The step after which the next evaluation is due; the last one has one, too."""
        every = self.config.eval_every or self.num_steps
        return min(self.num_steps, (self.progress.step // every + 1) * every)

    def _evaluate(self) -> bool:
        """Evaluate the weights, equal on all replicas; return whether they are to be kept as best.

        None of it changes how training goes on, except that a callback may end it.
        """
        context, step = self.context, self.progress.step
        num_samples = None if self._evaluator is None else self._evaluator.samples.num_samples
        if self._evaluator is None or num_samples is None or step in dict(self.evals):
            return False
        self.stage_loader.wait()
        dispatcher = context.batch_dispatcher(num_samples)
        values = self._evaluator.run(dispatcher)
        if values is None:  # a notice, which ends training before its next step, if there is one
            name = f"the notice during evaluation {dispatcher.number}"
            own = context.preemption.status
            self.exit_status = max(context.store.all_gather_object(name, own, context.members))
            return False
        name = f"the decision after evaluation {dispatcher.number}"
        try:
            wants_stop, is_best = self._report_evaluation(step, values)
        except Exception as error:
            context.store.fail(name, error, context.members)
            raise
        answers = context.store.all_gather_object(name, (wants_stop, is_best), context.members)
        context.store.delete(
            f"the decision after evaluation {dispatcher.number - 1}", context.members
        )
        self.is_stopping |= any(wants_stop for wants_stop, _ in answers)
        return bool(answers[0][1])  # only the leader knows the best one

    def _report_evaluation(self, step: int, values: dict[str, float]) -> tuple[bool, bool]:
        """Return whether a callback wants to stop, and on the leader whether it is the best."""
        self.evals.append((step, values))
        if self.display is not None:
            self.display.eval_loss = values[EVAL_LOSS]
        for logger in self.loggers:
            logger.log(step, values)
        is_best, config = False, self.context.config.checkpoint
        if config.keep_best is not None:
            improvement = Improvement(config.keep_best, config.best_mode)
            value = values[improvement.metric]
            if math.isfinite(value):
                found = Evaluation(improvement.metric, improvement.mode, value)
                self.progress.evaluation = step, found
            checkpointer = self.context.checkpointer
            if self.context.is_leader and checkpointer is not None:
                is_best = checkpointer.is_best(improvement, value)
        return call_hooks(self.config.callbacks, "on_eval", step, values), is_best

    def _raise_not_finite(self) -> NoReturn:
        """Raise the error of on_nan="stop" on all workers, when checkpoints are on disk."""
        checkpointer = self.context.checkpointer
        if checkpointer is not None:
            checkpointer.wait()
        raise TrainingError(
            self.problem,
            expected='finite losses and gradients, with on_nan="stop"',
            fix="use a lower learning rate or clip_grad_norm"
            + (_RESTORE if self.context.config.checkpoint.every else "")
            + '; or pass on_nan="skip", which omits such steps',
        )

    @property
    def end_of_samples(self) -> int:
        return self.context.global_batch.start_of(self.num_steps)

    def _train(self, mode: SyncMode) -> str | None:
        """Train one phase and return the sync mode of the next; None ends the fit."""
        if self.exchange is not None and mode.name != self._last_mode:
            self.exchange.begin(mode.name, self.progress.step)
        self._last_mode, self.committed = mode.name, None
        strategy, phase = self._make_strategy(mode), None
        try:
            self.phase = phase = Phase(self, mode, strategy)
            decision = self._in_lockstep(phase) if phase.in_lockstep else self._in_groups(phase)
            progress, before = self.progress, self.progress.step
            progress.sampler_state = decision.sampler_state
            num_used = decision.sampler_state.num_used
            progress.step = self.context.global_batch.step_at(num_used)
            phase.set_lr_scheduler(progress.step)  # to the same step on all workers
            progress.lr_state = phase.lr_state()
            self.exit_status = decision.exit_status
            self.problem = self.problem or decision.problem
            if decision.lost:
                self._forget(decision.lost)
            next_mode = decision.sync_mode
            # In groups another pipeline may have run the step after which a checkpoint is due.
            is_saved = not phase.in_lockstep and self._is_save_due(before, progress.step)
            if (next_mode is None or self.is_evaluated(progress.step)) and not (
                self.problem or self.exit_status
            ):
                is_saved |= self._evaluate()
                next_mode = None if self.is_stopping else next_mode
            is_last = next_mode is None and not self.problem
            is_saved |= is_last and bool(self.context.config.checkpoint.every or self.exit_status)
            if is_saved:
                self._save(strategy, progress.sampler_state, blocking=is_last)
            if is_last and isinstance(strategy, DecoupledStrategy):
                strategy.pause()
                progress.optimizer, progress.paused = strategy.optimizer, strategy
            else:
                self._close_strategy(strategy)
        except BaseException:
            if isinstance(strategy, DecoupledStrategy):
                self.progress.optimizer = strategy.optimizer  # with this replica's shards
            try:
                if phase is not None:
                    phase.abort()
            finally:
                strategy.abort()
            raise
        if not phase.in_lockstep and next_mode not in (None, mode.name):
            broadcast_optimizer_state(progress, self.context)
        return next_mode

    def _forget(self, lost: Sequence[int]) -> None:
        """Continue without pipelines that were lost in groups."""
        left = [pipeline for pipeline in self.context.pipelines if pipeline not in lost]
        self.context = self.context.among(left)
        self.context.preemption.first_stages = self.context.first_stages
        if self.exchange is not None:
            self.exchange.forget(lost)

    def _in_lockstep(self, phase: "Phase") -> SyncDecision:
        """Train in fixed windows; after each window rank 0 may switch the sync mode."""
        window = None if self.exchange is None else self.exchange.num_steps
        self._agree_after_loss(phase)
        while True:
            self._run_window(phase, window)
            if phase.is_over or self.why_epoch_ends:  # perhaps after the last step of a window
                phase.finish_metrics()
                phase.strategy.average_all()
                phase.gather_dataset_states()
                if self.why_epoch_ends and not self.context.preemption.is_stop_requested:
                    raise PeerError(
                        "a worker", action="training", waited=0.0, cause=self.why_epoch_ends
                    )
                return self._decide(lambda: self._final_decision(phase.sampler.sampler_state()))
            assert self.exchange is not None, "without windows, run() ends the phase"
            if self.context.pipeline.is_first:
                self.exchange.publish()
            decision = self._decide(lambda: self._after_window(phase))
            if decision.sync_mode != phase.mode.name:
                phase.finish_metrics()
                phase.strategy.average_all()
                phase.gather_dataset_states()
                return decision

    def _run_window(self, phase: "Phase", window: int | None) -> None:
        """Run so many steps, or all that are left, with evaluations between them."""
        end = self.num_steps + 1 if window is None else self.progress.step + window
        while not phase.is_over and self.progress.step < end:
            # After the last step another one is tried, which ends the phase.
            next_stop = self._next_evaluation if self._evaluator is not None else end
            phase.run(max(1, min(end, next_stop) - self.progress.step))
            if not phase.is_over and self.is_evaluated(self.progress.step):
                self._evaluate_between_steps(phase)

    def _agree_after_loss(self, phase: "Phase") -> None:
        """Agree on what a loss may have cut at some workers: an evaluation, a wish to stop."""
        if not self._is_continued:
            return
        self._is_continued = False
        step, context = self.progress.step, self.context
        own = step in dict(self.evals), self.is_stopping, self.problem
        name = f"the state of the fit in {self.phase_name}"
        found = context.store.all_gather_object(name, own, context.members)
        self.is_stopping = any(is_stopping for _, is_stopping, _ in found)
        self.problem = next((problem for *_, problem in found if problem), "")
        if not all(is_done for is_done, *_ in found):
            self.evals = [each for each in self.evals if each[0] != step]
            if self.is_evaluated(step):
                self._evaluate_between_steps(phase)

    def _evaluate_between_steps(self, phase: "Phase") -> None:
        """In lockstep: evaluate, and save a checkpoint that is due, too, or that is the best."""
        phase.finish_metrics()
        # The next step ends the phase; the fit evaluates then, or the next epoch.
        if self.is_stopping or self.why_epoch_ends:
            return
        if phase.mode.averages == "model":
            phase.strategy.average_all()
        else:
            phase.strategy.synchronize()
        step = self.progress.step
        is_best = self._evaluate()
        if is_best or (not self.exit_status and self._is_save_due(step, step)):
            self.progress.lr_state = phase.lr_state()
            phase.gather_dataset_states()
            self._save(phase.strategy, phase.sampler.sampler_state())

    def _in_groups(self, phase: "Phase") -> SyncDecision:
        """Train until the samples run out; rank 0 may end them early."""
        self._agree_after_loss(phase)
        elastic, progress = self.context.elastic, self.progress
        progress.has_own_optimizer = True
        if elastic is None:
            self._run_and_average(phase)
        else:
            with elastic.draining(phase.end_samples):
                progress.is_cut = True
                self._run_and_average(phase)
                if self.context.pipeline.is_first:
                    progress.sampler_state = replace(phase.sampler.sampler_state(), limit=None)
                progress.is_cut = False
            elastic.check()
        decision = self._decide(lambda: self._after_groups(phase))
        if phase.group_metrics is not None:
            phase.group_metrics.delete()
        return decision

    def _run_and_average(self, phase: "Phase") -> None:
        """Run the steps of a phase in groups, and average with all replicas."""
        phase.run()
        if phase.group_metrics is not None:  # before all meet in the average: the leader reads it
            phase.group_metrics.stop()
            phase.group_metrics.announce_stop()
        phase.strategy.average_all()

    def _decide(self, decide: Callable[[], SyncDecision]) -> SyncDecision:
        """Call `decide` on the leader and return its decision on every worker."""
        self._num_decisions += 1
        store, members = self.context.store, self.context.members
        name, last_but_one = (
            f"sync decision {number} of {self._name}"
            for number in (self._num_decisions, self._num_decisions - 2)
        )
        decision: SyncDecision = store.run_on_leader(name, decide, members, as_type=SyncDecision)
        if self.context.is_leader:  # all have read the last but one, or would not be here
            store.delete(last_but_one, members)
        return decision

    def _after_window(self, phase: "Phase") -> SyncDecision:
        assert self.exchange is not None, "only sync='auto' trains in windows"
        sampler_state = phase.sampler.sampler_state()
        decision = self.exchange.after_window(self.progress.step)
        is_over = sampler_state.num_used >= self.end_of_samples
        return SyncDecision(
            sync_mode=phase.mode.name if is_over else decision.sync_mode,
            sampler_state=sampler_state,
        )

    def _after_groups(self, phase: "Phase") -> SyncDecision:
        sampler_state = replace(phase.sampler.sampler_state(), limit=None)
        lost = tuple(sorted(phase.lost_pipelines()))
        assert phase.group_metrics is not None, "the leader is a first stage"
        why = phase.group_metrics.read_stop()
        if why and why != _BY_CALLBACK:
            self.problem = why
        is_left = sampler_state.num_used < self.end_of_samples
        next_mode = phase.next_sync_mode
        # For an evaluation; or a lost pipeline's last samples, which no average has, are left.
        goes_on = sampler_state.num_used >= self._limit or bool(lost)
        if next_mode is None and goes_on and not self.context.preemption.is_stop_requested:
            next_mode = phase.mode.name
        if next_mode is not None and is_left and not why:
            return SyncDecision(sync_mode=next_mode, sampler_state=sampler_state, lost=lost)
        return replace(self._final_decision(sampler_state), lost=lost)

    def _final_decision(self, sampler_state: SamplerState) -> SyncDecision:
        return SyncDecision(
            sync_mode=None,
            sampler_state=sampler_state,
            exit_status=self.context.preemption.status,
            problem=self.problem,
        )

    def gather_dataset_states(self, sampler_state: SamplerState) -> None:
        """Gather the states of shards that other pipelines have read; first stages call it."""
        context = self.context
        if context.samples.num_shards == 1 or context.num_pipelines == 1:
            return
        own = context.samples.state_at(sampler_state.first_unused)
        assert own is not None, "it has shards"
        self._num_gathers += 1
        names = (f"dataset states {self._num_gathers - i} of {self._name}" for i in range(2))
        members, (name, last) = context.first_stages, names
        for state in context.store.all_gather_object(name, own.as_json(), members):
            context.samples.remember(StreamState.from_json(state))
        context.store.delete(last, members)  # all have read it, or would not be here

    @property
    def phase_name(self) -> str:
        """A unique name: each phase ends with a decision."""
        return f"{self._name}/{self._num_decisions}"

    def _make_strategy(self, mode: SyncMode) -> NoSync:
        context, config = self.context, self.context.config
        self._limit = self._limit_of(mode)
        paused, self.progress.paused = self.progress.paused, None
        if paused is not None and mode.decoupled:
            paused.resume()
            return paused
        if paused is not None:
            self._close_strategy(paused)
        skips_on_gpu = self.config.on_nan == "skip" and context.pipeline.device.type == "cuda"
        if self.progress.scaler is not None or skips_on_gpu:
            zero_momentum(self.progress.optimizer)
        pipelines, (stage, pipeline) = context.pipelines, context.worker
        left, group = tuple(pipelines), None
        if 1 < len(left) < dist.get_world_size() // context.pipeline.num_stages:
            if left not in context.groups:
                ranks = [number * context.pipeline.num_stages + stage for number in left]
                timeout = timedelta(seconds=config.timeout)
                context.groups[left] = dist.new_group(
                    ranks, timeout=timeout, use_local_synchronization=True
                )
            group = context.groups[left]
        return make_sync_strategy(
            context.pipeline,
            self.progress.optimizer,
            config.clip_grad_norm,
            mode=mode,
            overlap=mode.can_overlap if config.sync.mode == AUTO else config.sync.overlap,
            options=config.sync.options,
            worker=Worker(stage, pipelines.index(pipeline)),
            num_pipelines=context.num_pipelines,
            process_group=group,
            site=context.site,
            buddy=context.keeps_copies,
            seed=config.data.seed,
            timeout=config.timeout,
            sampler_state=replace(self.progress.sampler_state, limit=self._limit),
            name=self.phase_name,
        )

    def _limit_of(self, mode: SyncMode) -> int:
        """Return how many samples the next phase may use: in groups, those until an evaluation."""
        end = self._next_evaluation if self._evaluator is not None else self.num_steps
        return self.end_of_samples if mode.lockstep else self.context.global_batch.start_of(end)

    def is_checkpoint_due(self, before: int, step: int) -> bool:
        """Whether one is due during training after `step`, if the last save looked at `before`."""
        every = self.context.config.checkpoint.every
        return every is not None and step // every > before // every and step < self.num_steps

    def _is_save_due(self, before: int, step: int) -> bool:
        """Likewise, between steps: one that is due with an evaluation was left for after that."""
        is_left = self.is_evaluated(step) and self.is_checkpoint_due(step - 1, step)
        return is_left or self.is_checkpoint_due(before, step)

    def _save(
        self, strategy: NoSync, sampler_state: SamplerState, *, blocking: bool = False
    ) -> None:
        context, progress = self.context, self.progress
        if context.checkpointer is not None:
            blocking |= context.config.checkpoint.keep_best is not None  # it must not be skipped
            extra = context.extra(progress, sampler_state)
            context.checkpointer.save(progress.step, strategy, extra, blocking=blocking)

    def _close_strategy(self, strategy: NoSync) -> None:
        state = strategy.optimizer.state_dict() if isinstance(strategy, DecoupledStrategy) else None
        strategy.close()
        self.context.pipeline.optimizer_state = None  # which is freed
        if state is not None:  # it was sharded over the replicas
            self.progress.optimizer = self.context.new_optimizer()
            self.progress.optimizer.load_state_dict(state)


class BufferCopies:
    """Copies of a module's buffers, such as running statistics, for a step that is repeated."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._buffers = list(module.buffers())
        # Torch changes running statistics without a new version.
        norms = (each for each in module.modules() if isinstance(each, _NormBase))
        self._unversioned = {buffer for norm in norms for buffer in norm.buffers()}
        self._copies = [(buffer._version, buffer.clone()) for buffer in self._buffers]

    def save(self) -> None:
        """Copy the buffers that may have changed since the last call."""
        for number, buffer in enumerate(self._buffers):
            if self._may_have_changed(buffer, self._copies[number][0]):
                self._copies[number] = buffer._version, buffer.clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Set changed buffers to what they were."""
        for buffer, (version, copied) in zip(self._buffers, self._copies, strict=True):
            if self._may_have_changed(buffer, version):
                buffer.copy_(copied)

    def _may_have_changed(self, buffer: Tensor, version: int) -> bool:
        return buffer._version != version or buffer in self._unversioned


def _copy_containers(value: Any) -> Any:
    """Copy a state with its numbers, but no other objects: a scheduler may hold any."""
    if isinstance(value, dict):
        return {key: _copy_containers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        make = getattr(value, "_make", type(value))  # of a namedtuple
        return make(map(_copy_containers, value))
    return value.clone() if isinstance(value, Tensor) else value


class SavedCheckpoints:
    """Calls `on_checkpoint` on every worker for each checkpoint that becomes complete in a fit.

    Only the first pipeline saves: its first worker publishes each in the job's store.
    """

    def __init__(self, name: str, context: FitContext, callbacks: Sequence[Any]) -> None:
        self._name, self._context, self._callbacks = name, context, callbacks
        self._is_used = False  # a worker has such a callback
        self._num_reported, self._next_look = 0, 0.0

    def begin(self) -> None:
        """Find out whether any worker has such a callback; all call it."""
        if self._context.checkpointer is None:
            return
        while self._context.checkpointer.pop_saved() is not None:
            pass  # those of `save` and of an earlier fit
        hooks = (getattr(each, "on_checkpoint", None) for each in self._callbacks)
        does_nothing = None, Callback.on_checkpoint
        own = any(getattr(hook, "__func__", hook) not in does_nothing for hook in hooks)
        store, name = self._context.store, f"checkpoint callbacks of {self._name}"
        self._is_used = any(store.all_gather_object(name, own, self._context.members))

    def report(self) -> bool:
        """Call the callbacks for checkpoints that have become complete; return whether to stop."""
        now = time.monotonic()
        if not self._is_used or now < self._next_look:
            return False
        self._next_look = now + _LOOK_INTERVAL
        wants_stop = False
        while (found := self._next()) is not None:
            step, path = found
            self._num_reported += 1
            wants_stop |= call_hooks(self._callbacks, "on_checkpoint", step, Path(path))
        return wants_stop

    def finish(self) -> None:
        """At the end of a fit: wait for the last one."""
        if not self._is_used:
            return
        context, self._next_look = self._context, 0.0

        def finish_last() -> None:
            assert context.checkpointer is not None, "there are checkpoints"
            context.checkpointer.wait()
            self.report()

        name = f"the end of the checkpoints of {self._name}"
        context.store.run_on_leader(name, finish_last, context.members)
        self._next_look = 0.0
        self.report()

    def _next(self) -> tuple[int, str] | None:
        context, name = self._context, f"checkpoint {self._num_reported} of {self._name}"
        if not context.is_leader:
            found: tuple[int, str] | None = context.store.peek(name, context.members)
            return found
        assert context.checkpointer is not None, "there are checkpoints"
        saved = context.checkpointer.pop_saved()
        if saved is None:
            return None
        published = saved.step, str(saved.path)
        context.store.set_once(name, published, context.members)
        return published


class Phase:
    """The steps of one worker in one sync mode."""

    def __init__(self, fit: FitLoop, mode: SyncMode, strategy: NoSync) -> None:
        context, progress = fit.context, fit.progress
        self._fit, self._context, self._progress = fit, context, progress
        self.mode, self.strategy = mode, strategy
        context.pipeline.optimizer_state = lambda: strategy.optimizer.state
        self.sampler = make_sampler(
            mode,
            context.global_batch,
            context.shares,
            context.pipelines.index(context.worker.pipeline),
            progress.sampler_state,
            fit.num_steps,
            strategy.sync if context.pipeline.is_first else None,
        )
        has_fixed_shares = isinstance(self.sampler, FixedShareSampler)
        context.samples.follow_all(context.num_pipelines > 1 and not has_fixed_shares)
        self._reads_own_shards = context.pipeline.is_first and has_fixed_shares
        self._lr_scheduler = progress.make_lr_scheduler(
            context.config, strategy.optimizer, fit.num_steps
        )
        self.in_lockstep = mode.lockstep or strategy.sync is None
        self._first_lr_state = self._copy_lr_state()
        on_nan = fit.config.on_nan
        # In groups the others average with this pipeline, which must stay finite until all stop.
        strategy.drops_non_finite = on_nan == "skip" or (on_nan == "stop" and not self.in_lockstep)
        if progress.scaler is not None:
            strategy.scaler = progress.scaler
            strategy.scaler.sum_of_weights = sum_of_weights(
                mode, context.global_batch, context.num_pipelines
            )
        # With two pipelines there is no third one to go through.
        has_detours = strategy.sync is not None and context.num_pipelines > 2
        has_detours = has_detours and context.elastic is not None and mode.has_coordinator
        gather = context.metric_gather(in_lockstep=self.in_lockstep, has_detours=has_detours)
        is_late = gather is not None or context.pipeline.device.type == "cuda"
        may_wait = fit.may_gather_together and self.in_lockstep and on_nan != "stop"
        self._metrics = StepMetrics(
            gather,
            num_together=STEPS_TOGETHER if may_wait and gather is not None else 1,
            is_late=is_late,
            may_defer=not fit.config.callbacks,
        )
        self.group_metrics: GroupMetrics | None = None  # in groups, on first stages
        if not self.in_lockstep and context.pipeline.is_first:
            self.group_metrics = GroupMetrics(
                f"metrics of {fit.phase_name}", context.metric_store, context.first_stages
            )
        self._num_tokens: int | None = None  # of this pipeline's last step, on the first stage
        self._number = 0  # of the global step that is updated
        self._unreported: MeasuredStep | None = None  # the last step, until its gather starts
        self._has_cut_step = False  # if it fails now, a step is to be repeated
        self._buffers: BufferCopies | None = None
        if context.elastic is not None:
            context.elastic.routes_around = has_detours
        if context.elastic is not None and self.in_lockstep:
            strategy.commit = self._commit
            self._buffers = BufferCopies(context.pipeline.module)
        self.is_over = False
        self.next_sync_mode: str | None = None  # in groups, on rank 0: the mode to switch to
        self._has_ended_samples = False  # in groups, on rank 0

    def run(self, max_steps: int | None = None) -> None:
        """Run up to `max_steps` steps; stop early when the samples run out."""
        num_steps = 0
        while (max_steps is None or num_steps < max_steps) and self._step():
            num_steps += 1

    def gather_dataset_states(self) -> None:
        """Before a checkpoint or another phase, gather the states of all shards of a stream."""
        if self._reads_own_shards:
            self._fit.gather_dataset_states(self.sampler.sampler_state())

    def advance_lr_scheduler(self, step: int) -> None:
        """Advance to the global step; this pipeline may compute only some of the steps."""
        if self._lr_scheduler is None:
            return
        may_lack_updates = self.strategy.scaler is not None or not self.in_lockstep
        if self._lr_scheduler.last_epoch == 0 < step and may_lack_updates:
            # Torch warns if the first update was skipped, or others have made the first steps.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                self._lr_scheduler.step()
        for _ in range(self._lr_scheduler.last_epoch, step):
            self._lr_scheduler.step()

    def set_lr_scheduler(self, step: int) -> None:
        """Advance to the global step, or go back to it: samples may not count as used any more."""
        scheduler = self._lr_scheduler
        if scheduler is not None and step < scheduler.last_epoch:
            lr_state, scheduled = _copy_containers(self._first_lr_state)
            scheduler.load_state_dict(lr_state)
            groups = self.strategy.optimizer.param_groups
            for group, values in zip(groups, scheduled, strict=True):
                group |= values
        self.advance_lr_scheduler(step)

    def _copy_lr_state(self) -> tuple[Any, list[dict[str, Any]]]:
        """Copy the state of the scheduler, and what it schedules: rates, perhaps betas."""
        if self._lr_scheduler is None:
            return None, []
        groups = self.strategy.optimizer.param_groups
        scheduled = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return _copy_containers((self._lr_scheduler.state_dict(), scheduled))

    def _commit(self) -> None:
        elastic = self._context.elastic
        assert elastic is not None, "otherwise each update is made"
        self._context.pipeline.check_received()
        self._fit.why_epoch_ends = why = elastic.commit()
        self._fit.committed = self._number
        if elastic.ends_job:
            self._context.preemption.stop(why)

    @property
    def _is_committed(self) -> bool:
        """Whether all workers make the update of the current step, if the job is elastic."""
        return self._fit.committed == self._number

    def set_progress(self, num_steps: int) -> None:
        """Set the progress of the fit to that after so many global steps, the last of this phase.

        All workers have made them, but one that has failed after its update may not know it.
        """
        progress, sampler = self._progress, self.sampler
        assert isinstance(sampler, LockstepSampler), "otherwise there is no last step of all"
        self.advance_lr_scheduler(num_steps)
        progress.step, progress.lr_state = num_steps, self.lr_state()
        progress.sampler_state = sampler.sampler_state(num_steps)

    def lr_state(self) -> dict[str, Any] | None:
        """Return the state of the learning rate scheduler."""
        return None if self._lr_scheduler is None else self._lr_scheduler.state_dict()

    def _step(self) -> bool:
        """Run one step; return False, and run none, if the phase is over."""
        self._has_cut_step, self._number = True, self._progress.step
        if self._buffers is not None:
            self._buffers.save()
        start, losses, pipeline = time.perf_counter(), list[Tensor](), self._context.pipeline
        self.strategy.scale_loss()
        with self._context.config.device.precision(pipeline.device):
            run = self._run_first_stage if pipeline.is_first else self._run_later_stage
            batch_slice = run(losses)
        if batch_slice is None:
            self._has_cut_step = False
            self.finish_metrics()
            self.is_over = True
            return False
        before, failure = self._progress.step, None
        what = f"the update of step {pipeline.num_steps - 1}"
        with pipeline.describe_out_of_memory(what), self._progress.update():
            if self._context.checkpointer is not None:
                self._context.checkpointer.before_update()
            self._number = batch_slice.step
            try:
                self.strategy.update(self.sampler.acknowledge)
            except PeerError as error:
                if not self._is_committed:
                    raise
                failure = error  # this step counts all the same, and is reported
            learning_rate = self.strategy.optimizer.param_groups[0]["lr"]
            self.advance_lr_scheduler(batch_slice.step + 1)
            self._progress.step = max(before, batch_slice.step + 1)
        seconds = time.perf_counter() - start
        waited = self._time_step(seconds) if pipeline.is_first else 0.0
        end = time.monotonic()
        step = MeasuredStep(
            self._measured(batch_slice, seconds, waited, end),
            losses,
            pipeline.loss_counts,
            self.strategy.grad_squares,
            learning_rate,
            self.strategy.loss_scale,
            number=pipeline.num_steps - 1,  # which action events carry
            start=start,
            end=end,
        )
        self._unreported = step
        if failure is not None:
            raise failure
        self._has_cut_step = False
        self._save_if_due(before, batch_slice.step + 1)
        self._report(step)
        return True

    def _measured(
        self, batch_slice: BatchSlice, seconds: Seconds, waited: Seconds, now: Seconds
    ) -> Measured:
        worker = self._context.worker
        return Measured(
            step=batch_slice.step,
            stage=worker.stage,
            pipeline=worker.pipeline,
            num_samples=batch_slice.num_samples,
            num_tokens=math.nan if self._num_tokens is None else self._num_tokens,
            seconds=seconds,
            waited=waited,
            peak_memory=self._fit.peak_memory.read(now),
        )

    def _report(self, step: MeasuredStep) -> None:
        """Finish the metrics of the step before, and start to gather those of this one."""
        if self._metrics.is_late:
            self._finish_step()
        step.measured.wants_stop = float(self._fit.wants_stop)
        self._unreported = None
        self._metrics.start(step)
        if not self._metrics.is_late:
            self._finish_step()

    def _finish_step(self, *, is_last: bool = False) -> None:
        """Wait for metrics that are being gathered; report those of all steps until then if due."""
        problem = self._report_all() if self._metrics.finish(is_last=is_last) else ""
        # One worker alone needs no agreement; nor do all that see the same problem.
        if (
            problem
            or self._metrics.is_stop_wanted
            or (self._fit.wants_stop and not self._metrics.is_gathered)
        ) and (self.in_lockstep or self.group_metrics is not None):
            # In groups the first stage has the same metrics, and later ones follow its decision.
            self._fit.request_stop(problem, self.group_metrics)

    def finish_metrics(self) -> None:
        """Wait for the metrics of all steps, and report all that are not reported yet."""
        self._finish_step(is_last=True)
        self._report_all()

    def _report_all(self) -> str:
        """Report the metrics that are not reported yet; return the problem that ends training."""
        problem = ""
        for step, info in self._metrics.pop():
            self._record(step, info)
            fit, shown = self._fit, info
            if self.group_metrics is not None:
                self.group_metrics.update(info)
                if fit.display is not None or fit.loggers:
                    shown = self.group_metrics.combined(self.lost_pipelines()) or info
            fit.wants_stop |= fit.report(info, shown)
            may_warn = self._context.is_leader and not self._metrics.is_abandoned
            if info.loss is None and may_warn and not fit.has_warned_of_labels:
                fit.has_warned_of_labels = True
                _logger.warning("step %d has no label: all are ignored, as -100 is", info.step)
            self._check_scale(info)
            problem = problem or self._check_finite(info)
        return problem

    def _run_first_stage(self, losses: list[Tensor]) -> BatchSlice | None:
        """Run a batch on the first stage, which may also be the last."""
        pipeline, preemption = self._context.pipeline, self._context.preemption
        may_start = not self.in_lockstep or preemption.may_start_step(self._progress.step)
        may_start = may_start and not (self._fit.is_stopping or self._fit.why_epoch_ends)
        batch_slice = self.sampler.next() if may_start else None
        if batch_slice is None:
            pipeline.end_batches()
            return None
        microbatches, metadata = self._fit.stage_loader.of_slice(
            batch_slice, self.sampler.peek(), self.sampler.peek_ahead
        )
        if not self._fit.has_checked_inputs:
            check_inputs(pipeline.module, microbatches[0].kwargs)
            self._fit.has_checked_inputs = True
        self._num_tokens = count_tokens(microbatches)
        pipeline.run_microbatches(
            microbatches,
            training=True,
            losses=losses,
            metadata=metadata,
            on_backward=self._fit.stage_loader.start_prefetch,
        )
        return batch_slice

    def _run_later_stage(self, losses: list[Tensor]) -> BatchSlice | None:
        """Run a batch on a later stage, which receives its slice in the batch header."""
        pipeline = self._context.pipeline
        try:
            load = self._fit.stage_loader.of_header
            pipeline.run_microbatches(load, training=True, losses=losses)
        except EndOfDataError:
            return None
        assert isinstance(pipeline.metadata, BatchSlice), "the first stage passes it"
        return pipeline.metadata

    def _time_step(self, seconds: Seconds) -> Seconds:
        """On the first stage, after a step: time it, and end the phase if rank 0 decides so.

        Return how long the step waited for other pipelines.
        """
        averaged, exchange = self.strategy.pop_timings(), self._fit.exchange
        if exchange is not None:
            exchange.add_timing(
                StepTiming(
                    compute=max(seconds - averaged.waited, _MIN_COMPUTE),
                    waited=averaged.waited,
                    averaging=averaged.exchange,
                    num_microbatches=len(self._context.pipeline.sizes),
                    num_members=averaged.num_members,
                )
            )
        if self.in_lockstep or self._has_ended_samples:
            return averaged.waited
        if exchange is not None:
            decision = exchange.after_step(self._progress.step, self.lost_pipelines)
            if decision is not None and decision.switches:
                self.next_sync_mode = decision.sync_mode
        ends = self.next_sync_mode is not None or self._context.preemption.is_stop_requested
        ends = ends or (self.group_metrics is not None and bool(self.group_metrics.why_stop))
        if self._context.is_leader and ends:
            assert self.strategy.sync is not None, "in groups"
            samples = SampleDispatcher(self.strategy.sync)
            samples.sampler_state(last_batch=self._context.global_batch.size)
            self._has_ended_samples = True
        return averaged.waited

    def _check_scale(self, info: StepInfo) -> None:
        """Warn, once in a fit, of a loss scale that keeps falling."""
        if info.loss_scale is None or not self._context.is_leader:
            return
        if not math.isfinite(info.grad_norm):
            _logger.debug("step %d is skipped: overflow at scale %g", info.step, info.loss_scale)
        if info.loss_scale < 1.0 and not self._fit.has_warned_of_scale:
            self._fit.has_warned_of_scale = True
            _logger.warning(
                "step %d: the loss scale has fallen to %g, since gradients are not finite in most "
                "steps, which are skipped: use bfloat16, a lower learning rate, or check the model "
                "without autocast",
                *(info.step, info.loss_scale),
            )

    def _check_finite(self, info: StepInfo) -> str:
        """Warn of the first step that is not finite; return the problem if it ends training."""
        was_finite, self._progress.is_finite = self._progress.is_finite, info.is_finite
        if info.is_finite:
            return ""
        bad = [p for p in info.pipelines if not math.isfinite(p.loss or 0.0)]
        problem = f"step {info.step}: the gradients are not finite"
        if bad:
            problem = f"step {info.step}: the loss of pipeline {bad[0].pipeline} is {bad[0].loss}"
        if self._fit.config.on_nan == "stop":
            return problem
        is_warned_here = self._context.is_leader or not math.isfinite(info.own.loss or 0.0)
        if was_finite and bad and is_warned_here:
            end = ", and weights may become so; checkpoints with finite weights are kept"
            if self.strategy.drops_non_finite or self._progress.scaler is not None:
                end = ": the step is skipped"
            elif self.mode.exact and len(info.pipelines) > 1:
                end = ": stages whose gradients are not finite skip the step"
            _logger.warning("%s%s", problem, end)
        return ""

    def lost_pipelines(self) -> set[int]:
        """Return the pipelines of this phase that are lost; only the leader knows them."""
        sync, pipelines = self.strategy.sync, self._context.pipelines
        return set() if sync is None else {pipelines[index] for index in sync.lost_pipelines()}

    def _record(self, step: MeasuredStep, info: StepInfo) -> None:
        log = self._context.log
        if log is not None:
            start, own = log.at(step.start), info.own
            values: dict[str, Value] = {"global_step": info.step, "samples": own.num_samples}
            if own.loss is not None:
                values["loss"] = own.loss
            log.write("step", start=start, end=start + own.seconds, step=step.number, values=values)

    def abort(self) -> None:
        """End after an error, which may have come in the middle of a step."""
        try:
            if self._buffers is not None:
                self._metrics.abandon(self._unreported)
                if self._has_cut_step and not self._is_committed:
                    self._buffers.restore()
            try:
                problem = self._report_all()  # to callbacks, which may raise anything
            except PeerError:  # of one that reads weights, which are not complete any more
                problem = ""
            if self._context.elastic is not None and problem:
                self._fit.request_stop(problem)
        finally:
            if self.group_metrics is not None:
                self.group_metrics.stop()
            self.stop_after_last_step()

    def end_samples(self) -> None:
        """In groups: hand out no samples after the current batch; any thread, which never waits."""
        if self._context.pipeline.is_first and self.strategy.sync is not None:
            with contextlib.suppress(PeerError):  # the phase has ended
                self.strategy.sync.sample_client().query_progress(
                    self._context.config.timeout, self._context.global_batch.size
                )

    def stop_after_last_step(self) -> None:
        """After an error, set the progress to that after the last complete step, if possible."""
        progress = self._progress
        if progress.is_cut and self._context.pipeline.is_first:
            with contextlib.suppress(PeerError):  # used if no first stage has averaged with all
                progress.sampler_state = replace(self.sampler.sampler_state(), limit=None)
        if progress.is_updating:
            progress.problem = f"the update of step {progress.step} is incomplete"
        elif isinstance(self.strategy, DecoupledStrategy):
            progress.problem = "each replica has a shard of the optimizer's state"
        elif not self.in_lockstep:
            progress.problem = "the replicas differ, and no longer average"
        else:
            assert isinstance(self.sampler, LockstepSampler), "in lockstep"
            progress.problem = "the state of the learning rate scheduler or of the data is unknown"
            progress.lr_state = self.lr_state()
            progress.sampler_state = self.sampler.sampler_state(progress.step)
            progress.optimizer.zero_grad()
            progress.problem = ""

    def _save_if_due(self, before: int, step: int) -> None:
        """Save if `checkpoint.every` steps are done; the last one led from `before` to `step`.

        Not before an evaluation after the same step: then the checkpoint has its result.
        """
        progress, checkpointer = self._progress, self._context.checkpointer
        is_due = self._fit.is_checkpoint_due(before, step) and not self._fit.is_evaluated(step)
        if checkpointer is not None and is_due:
            progress.lr_state = self.lr_state()
            self.gather_dataset_states()
            extra = self._context.extra(progress, self.sampler.sampler_state())
            # Otherwise an average, or a callback, may change weights before the next update.
            overlap = self.strategy.sync is None and not self._fit.config.callbacks
            checkpointer.save(step, self.strategy, extra, overlap=overlap)


def broadcast_optimizer_state(progress: TrainProgress, context: FitContext) -> None:
    """Broadcast the first pipeline's state to all workers of this stage; all of them call it.

    In groups each replica has its own state, from its own samples. With equal gradients but unequal
    momentum the replicas would diverge, and a lockstep mode does not average weights again. The
    same holds for the scale of the loss.
    """
    optimizer, scaler = progress.optimizer, progress.scaler
    what, num_stages, stage = (
        "the optimizer's state",
        context.pipeline.num_stages,
        context.worker.stage,
    )
    ranks = [pipeline * num_stages + stage for pipeline in context.pipelines]
    group = new_gloo_group(ranks, what, timeout=context.config.timeout)
    is_first, packed = context.worker.pipeline == 0, torch.empty(0, dtype=torch.uint8)
    if is_first:
        states = optimizer.state_dict(), None if scaler is None else scaler.state_dict()
        packed = torch.frombuffer(bytearray(encode_state(states, what)), dtype=torch.uint8)
    size = torch.tensor([packed.numel()])
    with peer_errors(Worker(stage, 0), f"sharing {what}"):
        current_epoch().wait(group.broadcast(size, 0).wait)
        packed = packed if is_first else torch.empty(int(size), dtype=torch.uint8)
        current_epoch().wait(group.broadcast(packed, 0).wait)
    if not is_first:
        state, scale = decode_state(packed.numpy().tobytes(), what)
        optimizer.load_state_dict(state)
        if scaler is not None:
            scaler.load_state_dict(scale)
    progress.has_own_optimizer = False

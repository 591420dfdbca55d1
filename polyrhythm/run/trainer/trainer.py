"""The Trainer: one object that plans, builds the pipeline, synchronises replicas and trains.

    trainer = pr.Trainer(model, loss_fn, optimizer_fn, dataset, batch_size=64)
    trainer.fit(max_steps=1000)

The same script runs in one process, under `polyrhythm train --local N`, and under torchrun on many
machines. A step is one global batch, however many processes compute it.
"""

import atexit
import logging
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, Self, overload

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.events import Value, worker_log
from polyrhythm.plan.after_loss import AfterLoss
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.survivors import machines_without_reserve
from polyrhythm.processes import INTERRUPTED, TERMINATED, FencedError, exit_on_sigterm
from polyrhythm.renamed import RenamedAttribute, renamed_arguments
from polyrhythm.run.averaging.rendezvous import check_worker_keys
from polyrhythm.run.checkpoint.export import hugging_face_configs
from polyrhythm.run.checkpoint.manifest import CheckpointError
from polyrhythm.run.comm.process_groups import DEFAULT_TIMEOUT, step_timeout
from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.run.coordinator.epoch_server import LossTimeouts
from polyrhythm.run.data.loader import SampleLoader
from polyrhythm.run.data.order import SampleOrder
from polyrhythm.run.data.reader import make_order, make_reader
from polyrhythm.run.decoupled.layer_transfer import HeldLayers, move_layers
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.decoupled.reshard import reshard
from polyrhythm.run.emulated_compute import SCENARIO, EmulatedCompute
from polyrhythm.run.machine import machine_name
from polyrhythm.run.pipeline.loss import LossFunction
from polyrhythm.run.pipeline.partition import LayerSplit, ModelPartition, build_model
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.autoplan import choose_global_batch, choose_plan, choose_shares
from polyrhythm.run.trainer.check_model import (
    check_loss,
    check_placement,
    check_stages,
    find_split,
    use_float8,
)
from polyrhythm.run.trainer.checkpointer import TrainerCheckpointer
from polyrhythm.run.trainer.config import (
    CheckpointConfig,
    DataConfig,
    DeviceConfig,
    FitConfig,
    TrainerConfig,
    no_run_dir,
)
from polyrhythm.run.trainer.division import LayerDivision, new_assignment, share_problem
from polyrhythm.run.trainer.elastic import (
    NEWCOMER,
    ElasticJob,
    EpochOverError,
    EpochStart,
    JobOverError,
    ProcessState,
)
from polyrhythm.run.trainer.evaluate import EVAL_LOSS, Evaluator, check_metrics
from polyrhythm.run.trainer.fit_loop import (
    FitContext,
    FitLoop,
    TrainProgress,
    broadcast_optimizer_state,
    new_optimizer,
)
from polyrhythm.run.trainer.job_record import (
    FitRecord,
    JobRecord,
    JobRecords,
    check_settings,
    settings_of,
)
from polyrhythm.run.trainer.metrics import Callback
from polyrhythm.run.trainer.optimizers import LRSchedule, NamedParameters
from polyrhythm.run.trainer.preemption import PreemptionHandler
from polyrhythm.run.trainer.rank_assignment import (
    LEADER,
    Gpu,
    JobMembership,
    JobProcesses,
    assign_ranks,
    choose_sites,
    describe_backends,
    device_of_process,
    join_epoch,
    join_job,
    leave_group,
)
from polyrhythm.run.trainer.run_dir import lock_run_dir, take_over_lock
from polyrhythm.run.trainer.sampler import DataSettings
from polyrhythm.run.trainer.state_transfer import (
    check_state,
    moves_state,
    new_transfer_group,
    settle_groups,
)
from polyrhythm.run.trainer.sync_strategy import DecoupledStrategy, LossScaler, NoSync
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.sinks.metrics import METRICS, JsonLines, Logger, StepInfo
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.sync.modes import SyncConfig
from polyrhythm.sync.setup import check_sync
from polyrhythm.types import AUTO, Seconds, Worker

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FitResult:
    """The steps of one `fit`, as this worker's callbacks got them, and its duration."""

    steps: tuple[StepInfo, ...]  # the last 1000; callbacks get all of them
    losses: tuple[float, ...]  # StepInfo.loss of every step, nan without one
    seconds: Seconds
    num_samples: int  # of all pipelines
    num_left: int  # steps that a callback has stopped, or a preemption notice
    checkpoints: Path | None  # the folder of checkpoints, if there is a run folder
    evals: tuple[tuple[int, dict[str, float]], ...] = ()  # steps done, and loss and metrics

    def __repr__(self) -> str:
        rate = self.num_samples / max(self.seconds, 1e-9)
        last = f", loss={self.losses[-1]:.4g}" if self.losses else ""
        for name, value in self.evals[-1][1].items() if self.evals else ():
            last += f", {name}={value:.4g}"
        saved = f", checkpoints={str(self.checkpoints)!r}" if self.checkpoints else ""
        stopped = f", stopped with {self.num_left} steps left" if self.num_left > 0 else ""
        return (
            f"FitResult({len(self.losses)} steps{stopped}{last}, {rate:,.4g} samples/s, "
            f"{self.seconds:.1f} s{saved})"
        )


class Trainer:
    """Train one worker's share of a job. Every process of the job makes the same Trainer."""

    step = RenamedAttribute("global_step")
    num_fits: ClassVar[int] = 0  # calls of `fit` in this process
    pipeline: Pipeline
    # The workers as ("dp", "pp"), pipelines x stages; None in a job of one process.
    device_mesh: DeviceMesh | None
    _context: FitContext

    @renamed_arguments(
        run="run_dir=",
        checkpoint_every="checkpoint=CheckpointConfig(every=...)",
        keep="checkpoint=CheckpointConfig(keep_last=...)",
        grace="checkpoint=CheckpointConfig(grace_period=...)",
        grace_period="checkpoint=CheckpointConfig(grace_period=...)",
        sync_options="sync=SyncConfig(mode, options=...)",
        overlap="sync=SyncConfig(mode, overlap=True)",
        layers="split=LayerSplit(layers=...)",
        prologue="split=LayerSplit(prologue=...)",
        every="split=LayerSplit(every=...)",
        epilogue="split=LayerSplit(epilogue=...)",
        lr_scheduler_fn="lr_schedule=",
        autocast="device=DeviceConfig(autocast=...)",
        memory_limit="device=DeviceConfig(memory_limit=...)",
        recompute="device=DeviceConfig(recompute=...)",
        backend="device=DeviceConfig(backend=...)",
        callbacks="fit(callbacks=...)",
        progress="fit(progress=...)",
        train_dataset="dataset=",
        data_collator="collate_fn=",
        eval_dataset="fit(eval_dataset=...)",
        compute_metrics="fit(metrics=...)",
        args="arguments of Trainer and fit, see docs/migrate.md",
        shuffle="data=DataConfig(shuffle=...)",
        seed="data=DataConfig(seed=...)",
        compute="the scenario of `polyrhythm lab run --scenario`",
    )
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss_fn: Callable[..., Any] | None = None,
        optimizer_fn: Callable[[NamedParameters], Optimizer] | None = None,
        dataset: Dataset[Any] | Iterable[Any] | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        batch_size: int | None = None,
        microbatch_size: int | None = None,
        plan: Plan | Path | str = AUTO,
        stages: int | None = None,
        pipelines: int | None = None,
        schedule: str = AUTO,
        sync: str | SyncConfig = "decoupled",
        split: LayerSplit = LayerSplit(),
        lr_schedule: LRSchedule | Callable[[Optimizer], LRScheduler] | None = None,
        clip_grad_norm: float | None = None,
        data: DataConfig = DataConfig(),
        device: DeviceConfig | torch.device | str | int | None = None,
        run_dir: Path | str | None = None,
        checkpoint: CheckpointConfig = CheckpointConfig(),
        timeout: Seconds = DEFAULT_TIMEOUT,
    ) -> None:
        """`model` is the whole model, or a function that builds it; the same in every process.

        `loss_fn(output, target)` returns the mean loss of a micro-batch, which is weighted by its
        labels, or (sum, count); without it the model computes its loss from labels, as those of
        Hugging Face do. `collate_fn` makes a micro-batch of items: (inputs, target), or a dict with
        labels. `optimizer_fn` makes an optimizer from (name, parameter) pairs, such as
        `adamw(lr=3e-4)`; `lr_schedule` is `cosine(warmup=100)`, for example, or makes a learning
        rate scheduler of torch from the optimizer. A step is `batch_size` samples, summed over all
        pipelines.

        `plan` assigns stages to devices: a Plan, its file, or auto. Instead of a plan, `stages` and
        `pipelines` are numbers, of which one may follow from the number of processes. `split` names
        the parts of a model whose split is not found; `schedule` is as in `Pipeline`. `sync` is the
        sync mode of the replicas: `decoupled`, or a policy of `GroupSync`, with options in a
        SyncConfig. Auto starts with `decoupled`, measures, and switches to `balanced` or
        overlapping groups if that is predicted to save a quarter of each step.

        `run_dir` is a folder for logs and checkpoints, shared by all processes. `timeout` bounds
        every wait for another process; rank 0 may take 30 times as long to make a plan, and the
        first two steps, in which workers compile, may take half an hour.
        """
        arguments = locals()  # nothing else yet
        if not isinstance(sync, SyncConfig):
            arguments["sync"] = SyncConfig(sync)
        if not isinstance(device, DeviceConfig):
            arguments["device"] = DeviceConfig(device)
        arguments["run_dir"] = None if run_dir is None else Path(run_dir)
        if optimizer_fn is None or dataset is None:
            raise _missing("optimizer_fn" if optimizer_fn is None else "dataset")
        names = (field.name for field in fields(TrainerConfig))
        self._config = config = TrainerConfig(**{name: arguments[name] for name in names})
        self._is_fitting = self._has_started = self._exits_on_sigterm = False
        self._has_state = True  # of its stage, after the last step of all; not that of a spare
        self._num_fits = self._num_begins = 0
        self._num_saves = 0  # after a failure
        self._waits = ""  # shown once, at the start of a job that goes on after losses
        self._failure: str | None = None  # of the last fit
        self._loggers = list[Logger]()  # of all fits, on the leader
        order = make_order(dataset, seed=config.data.seed, shuffle=config.data.shuffle)
        make_reader(dataset, order)  # rejects an unusable dataset before anything is opened
        whole = build_model(model, config.data.seed)
        check_placement(whole)
        check_loss(config, whole)
        config.device.check_usable()
        config.device.check_parameters(whole.named_parameters())
        processes = JobProcesses(timeout)
        settings = settings_of(config.must_match(order), whole)
        # Not for long: a process that joins is in no epoch before it trains.
        self._is_newcomer = processes.ctx.incarnation > 0
        store: JobStore | None = None
        if self._is_newcomer:
            self._enroll(processes, settings)
        else:
            store = self._begin_job(processes, settings, whole, dataset, order)
        self._device = device_of_process(config.device.name, processes.ctx)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._check_capabilities(self._device, store)
        stage, layers_per_stage = self.worker.stage, self.plan.layers_per_stage
        recompute = self.plan.recomputes(stage)
        self._part = config.split.extract_stage(whole, stage, layers_per_stage, recompute=recompute)
        self._part.module.to(self._device)
        if config.device.float8:
            use_float8(self._part.module, self._device)
        self._run_info = hugging_face_configs(whole)
        self._samples = self._make_loader(dataset, order)
        if store is not None:
            self._connect(store)
        try:
            optimizer = new_optimizer(config, self._part.module)
            self._progress = TrainProgress(optimizer=optimizer)
            self._progress.scaler = self._make_scaler(optimizer)
        except BaseException:  # otherwise SIGTERM would stay caught
            if store is not None:
                self._preemption.close()
            raise
        if store is not None:
            self.pipeline.keep_parameters()  # the optimizer holds them
        self._is_open = True
        atexit.register(self._at_exit)

    def _begin_job(
        self,
        processes: JobProcesses,
        settings: dict[str, str],
        whole: nn.Module,
        dataset: Any,
        order: SampleOrder | None,
    ) -> JobStore:
        """Begin the job, together with all other processes; return its store."""
        config = self._config
        find_split(config, whole, dataset, processes.num_processes)
        self.plan, problem = choose_plan(config, whole, dataset, processes)
        self._global_batch = choose_global_batch(config, self.plan)
        config.split.check(whole, self.plan.layers_per_stage)
        self._elastic = self._make_elastic(processes)
        self._division = self._make_division(processes, whole, problem)
        first = self.plan
        self._membership = membership = self._join(processes)
        self._place, self._has_membership = membership.worker, True
        store, members = membership.job_store("training"), membership.members
        store.check_consistent("settings", config.must_match(order), members)
        check = partial(check_stages, config, whole, dataset, self.plan.layers_per_stage)
        store.run_on_leader("the comparison of stages", check, members)
        self._check_sync(store)
        self._lock = None
        if config.run_dir is not None:
            self._lock = lock_run_dir(config.run_dir, store, members)
        self._open_log()
        if self._elastic is not None:
            record = JobRecord(first, self._elastic.ranks, settings)
            self._elastic.records.keep_job(record, writes=True)
        return store

    def _enroll(self, processes: JobProcesses, settings: dict[str, str]) -> None:
        """Enroll in a job that has begun; it is joined in `fit`, where the others train."""
        ctx, timeout = processes.with_store(), self._config.timeout
        assert ctx.store is not None, "it was connected"
        record = JobRecords(ctx.store, timeout).read_job()
        check_settings(settings, record.settings)
        self.plan = record.plan
        self._global_batch = choose_global_batch(self._config, self.plan)
        self._division = None
        self._elastic = ElasticJob(ctx, self.plan, record.ranks, timeout=timeout)
        self._elastic.records.keep_job(record, writes=False)
        self._place, self._has_membership = self.plan.worker(self._elastic.member), False
        self._has_state, self._has_started, self._lock = False, True, None
        self._open_log()

    @property
    def global_step(self) -> int:
        """The number of global steps done, including those before a restore."""
        return self._progress.step

    @property
    def worker(self) -> Worker:
        """Of this process; before it has joined, the place for which it has come."""
        return self._membership.worker if self._has_membership else self._place

    @property
    def model(self) -> nn.Module:
        """This worker's stage; its parameters have their names in the whole model."""
        return self._part.module

    @renamed_arguments(steps="max_steps=", loggers="callbacks=")
    def fit(
        self,
        *,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        eval_dataset: Dataset[Any] | Iterable[Any] | None = None,
        eval_every: int | None = None,
        metrics: Mapping[str, Any] = MappingProxyType({}),
        callbacks: Sequence[Callback | Callable[[StepInfo], object] | Logger] = (),
        on_nan: str = "warn",
        progress: bool = True,
        overwrite: bool = False,
    ) -> FitResult:
        """Train until `max_steps` global steps are done, counted from the start of training.

        Or until every sample was used `max_epochs` times; with both, until the first of them.
        `eval_dataset` is evaluated after every `eval_every` steps and at the end: its mean loss, as
        `eval_loss`, and `metrics`. These are functions of (output, target) of a micro-batch, which
        return a mean over its samples or (sum, count), or torchmetrics.Metric objects.

        `callbacks` get the StepInfo of every step, on all workers, and may return `STOP`; loggers
        among them get metrics, in the first process, which also shows `progress`. If a loss or
        gradients are not finite, `on_nan` warns, skips the update of that step, or stops with an
        error.

        On a preemption notice (SIGTERM) to the job, and with a run folder on Ctrl-C, save a
        checkpoint and exit the process. A run folder with checkpoints is refused without
        `restore()`; `overwrite` moves them aside.
        """
        arguments = locals()  # nothing else yet
        self._check_between_fits("fit()")
        Trainer.num_fits += 1
        self._num_fits += 1
        start = time.perf_counter()
        config = FitConfig(**{field.name: arguments[field.name] for field in fields(FitConfig)})
        was_newcomer = self._is_newcomer
        record = self._join_fit(config) if was_newcomer else self._begin_fit(config)
        if record is None:
            return self._result_of_others()
        name = f"{self._membership.name}/fit {self._num_fits}"
        if (keep_best := self._config.checkpoint.keep_best) is not None:
            config.check_evaluates(keep_best, f"CheckpointConfig(keep_best={keep_best!r})")

        def make_loop() -> FitLoop:
            evaluator = None
            if eval_dataset is not None:
                evaluator = self._evaluator("fit()", eval_dataset, metrics)
                evaluator.is_stop_requested = lambda: self._preemption.is_stop_requested
            return FitLoop(
                name,
                self._context,
                self._progress,
                config,
                self._loggers_of(config),
                evaluator,
                may_gather_together=not record.have_callbacks,
            )

        fit_loop, num_used = make_loop(), self._progress.sampler_state.num_used
        if was_newcomer or fit_loop.num_steps > self.global_step:
            if was_newcomer:
                fit_loop.continue_others()
            else:
                self._begin_run("fit()", overwrite=overwrite)
                self._record_run(fit_loop.num_steps - self.global_step)
            while (why := self._run(fit_loop)) is not None:
                self._recover(fit_loop, why)
                earlier, fit_loop = fit_loop, make_loop()
                fit_loop.continue_from(earlier)
                del earlier  # it holds what the epoch before had in memory
                self._stop_if_asked(fit_loop)
            # Without the pipelines that were lost.
            self._context = replace(fit_loop.context, note="")
        elif fit_loop.num_steps and self.worker == LEADER:
            _logger.warning(
                "nothing to train: %d steps are done, of %d", self.global_step, fit_loop.num_steps
            )
        if fit_loop.exit_status:
            self._exit_preempted(fit_loop.exit_status)
        seconds = time.perf_counter() - start
        return FitResult(
            steps=tuple(fit_loop.steps),
            losses=tuple(fit_loop.losses),
            seconds=seconds,
            num_samples=self._progress.sampler_state.num_used - num_used,
            num_left=max(0, fit_loop.num_steps - self.global_step),
            checkpoints=None if self._checkpointer is None else self._checkpointer.folder,
            evals=tuple(fit_loop.evals),
        )

    def _begin_fit(self, config: FitConfig) -> FitRecord:
        """Agree with the other processes that this fit begins."""
        store, members = self._context.store, self._context.members
        fix = "call fit with the same arguments in all processes"
        store.check_consistent(f"fit {self._num_fits}", config.must_match, members, fix=fix)
        own = bool(config.callbacks)  # which a script may pass in some processes only
        have_callbacks = store.all_gather_object(f"callbacks {self._num_fits}", own, members)
        for what in ("fit", "callbacks"):  # all have read it, or would not be here
            store.delete(f"{what} {self._num_fits - 1}", members)
        settings = {key: str(value) for key, value in config.must_match.items()}
        record = FitRecord(settings, any(have_callbacks))
        if self._elastic is not None:
            self._elastic.records.keep_fit(self._num_fits, record, writes=True)
        return record

    def _join_fit(self, config: FitConfig) -> FitRecord | None:
        """Join the others in this fit; return None if they are in a later one."""
        elastic = self._elastic
        assert elastic is not None, "a newcomer has enrolled"
        try:
            record = elastic.find_fit(self._num_fits)
        except FencedError:
            self._exit_too_late(elastic)
        if record is None:
            _logger.warning("fit %d is over; this process joins a later one", self._num_fits)
            return None
        check_settings({k: str(v) for k, v in config.must_match.items()}, record.settings)
        if config.callbacks and not record.have_callbacks:
            raise LaunchError(
                "fit(callbacks=...) in a process that joins a job without callbacks",
                expected="callbacks in some process of the job, or in none",
                fix="start it with the script of the job",
            )
        why, changes = "joins", None
        self._is_fitting = True  # SIGTERM ends it: nobody waits for it yet
        try:
            while changes is None:
                try:
                    changes = self._begin_epoch(elastic, None, why)
                except EpochOverError as error:
                    why = str(error)
                    _logger.warning("%s: %s", self._place, why)
                    elastic.end_epoch(why)
                    self._disconnect()
        finally:
            self._is_fitting = False
        self._is_newcomer = False
        self.pipeline.num_steps = self.global_step
        if self._config.run_dir is not None and self.worker == LEADER:
            self._lock = take_over_lock(self._config.run_dir)
        _logger.warning("has joined after step %d as %s", self.global_step, self.worker)
        return record

    def _warn_of_skipped(self, what: str) -> None:
        _logger.warning("%s has no effect in a process that has not joined the job yet", what)

    def _exit_too_late(self, elastic: ElasticJob) -> NoReturn:
        elastic.abandon()
        self._exit_job(TERMINATED, "came too late: the job needs it no more")

    def _result_of_others(self) -> FitResult:
        """Return the result of a fit in which this process had no part."""
        return FitResult(
            steps=(), losses=(), seconds=0.0, num_samples=0, num_left=0, checkpoints=None, evals=()
        )

    @overload
    def evaluate(self, dataset: Dataset[Any] | Iterable[Any]) -> float: ...
    @overload
    def evaluate(
        self, dataset: Dataset[Any] | Iterable[Any], *, metrics: Mapping[str, Any]
    ) -> dict[str, float]: ...
    def evaluate(
        self,
        dataset: Dataset[Any] | Iterable[Any],
        *,
        metrics: Mapping[str, Any] | None = None,
    ) -> float | dict[str, float]:
        """Return the mean loss on a dataset; all workers call it, fast pipelines compute more.

        With `metrics`, as in `fit`, a dict of these and `eval_loss`. nan in a process that has come
        back, and joins the others in the next `fit`.
        """
        self._check_between_fits("evaluate()")
        check_metrics(metrics or {})
        if self._is_newcomer:
            self._warn_of_skipped("evaluate()")
            values = dict.fromkeys((EVAL_LOSS, *(metrics or {})), math.nan)
            return math.nan if metrics is None else values
        evaluator = self._evaluator("evaluate()", dataset, metrics or {})
        assert evaluator.samples.num_samples is not None, "it has a length"
        try:
            found = evaluator.run(self._context.batch_dispatcher(evaluator.samples.num_samples))
        finally:
            evaluator.close()
        assert found is not None, "nothing ends it"
        return found[EVAL_LOSS] if metrics is None else found

    def save(self) -> None:
        """Save a checkpoint of the current state; it is on disk when this returns.

        All workers call it: after a decoupled `fit` each has a shard of the optimizer state.
        After an error in `fit`, such as Ctrl-C, the state is that after the last complete step; if
        it is not known on all stages of the first pipeline, raise LaunchError.
        """
        self._check_between_fits("save()")
        if self._is_newcomer:
            self._warn_of_skipped("save()")
            return
        checkpointer, progress = self._require_checkpointer(), self._progress
        self._check_last_step()
        self._begin_run("save()")
        strategy = progress.paused or NoSync(self.pipeline, progress.optimizer, None)
        extra = self._context.extra(progress, progress.sampler_state)
        checkpointer.save(self.global_step, strategy, extra, blocking=True)
        checkpointer.wait()

    def restore(self, path: Path | str | None = None, *, restart_data: bool = False) -> int:
        """Restore a checkpoint, by default the newest of the run, and return its step, or 0.

        `path` is that of a checkpoint, or "best": that of the best evaluation of the run
        (`CheckpointConfig(keep_best=...)`).

        The job that saved it may have had another plan, and another `batch_size`: samples that
        were used stay used, and steps count on. Another seed, shuffle or number of samples is
        refused, unless `restart_data`: then the data starts again from its first sample.

        Raises CheckpointError if the checkpoint at `path` is damaged; without `path`, if
        checkpoints exist and all are damaged.
        """
        self._check_between_fits("restore()")
        if self._is_newcomer:  # it gets the state of the others
            return self.global_step
        progress, checkpoint = self._progress, None if path is None else Path(path)
        check = partial(self._context.saved_settings, restarts_data=restart_data)
        manifest = self._require_checkpointer().restore(checkpoint, progress.optimizer, check)
        if manifest is not None:
            self.pipeline.num_steps = manifest.step
            self._failure = None
            if manifest.is_finite is False and self.worker == LEADER:
                warnings.warn(f"the weights of {path} are not finite", stacklevel=2)
            dataset_state = progress.load(manifest.step, manifest.extra)
            has_schedule = self._config.lr_schedule is not None
            if has_schedule != (progress.lr_state is not None) and self.worker == LEADER:
                _logger.warning(
                    "the checkpoint of step %d was saved %s lr_schedule, and this Trainer has "
                    "%s: learning rates do not continue as before",
                    manifest.step,
                    *(("without an", "one") if has_schedule else ("with an", "none")),
                )
            if restart_data:
                progress.sampler_state = SamplerState()
            elif dataset_state is not None:
                self._samples.resume_from(dataset_state)
            self._continue_batches(check(manifest), restart_data)
        return self.global_step

    def close(self) -> None:
        """Finish the save in progress and leave the job; all workers call it."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self._at_exit)
        if self._is_newcomer:
            self._leave_before_joining()
            return
        self._preemption.close()
        self._samples.close()
        self._close_metrics()
        self._close_connections()
        is_saved = self._checkpointer is None or self._checkpointer.wait()
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._close_files()
        if self._failure is None or self.plan.num_workers == 1:
            self._membership.leave()
        else:
            self._abandon()
        if self._elastic is not None:
            self._elastic.finish()
            if not is_saved:
                raise CheckpointError(
                    "the last checkpoint was not saved",
                    expected="all stages of the first pipeline alive until it is on disk",
                    fix="start the job again: restore() continues from the checkpoint before",
                )

    def _leave_before_joining(self) -> None:
        self._samples.close()
        self._close_files()
        assert self._elastic is not None, "it has enrolled"
        self._elastic.finish()

    def _close_connections(self) -> None:
        """Close the pipeline and the optimizer; a loss after the last fit is none of its failures.

        Nobody needs the others then.
        """
        paused = self._progress.paused
        try:
            if paused is not None:
                paused.close()
            self.pipeline.close()
        except PeerError as error:
            if self._elastic is None or self._failure is not None:
                raise
            if paused is not None:
                paused.abort()
            self.pipeline.__exit__(PeerError, error, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif self._is_open and self._is_newcomer:
            self._is_open = False
            atexit.unregister(self._at_exit)
            self._samples.close()
            self._close_files()
            if self._elastic is not None:
                self._elastic.abandon()
        elif self._is_open:
            self._is_open = False
            atexit.unregister(self._at_exit)
            self._preemption.close()
            self._samples.close()
            self._close_metrics()
            if self._progress.paused is not None:
                self._progress.paused.abort()
            self.pipeline.__exit__(kind, error, trace)
            self._close_files()
            self._abandon()

    def _abandon(self) -> None:
        if self._has_membership:
            self._membership.abandon()
        if self._elastic is not None:
            self._elastic.abandon()

    def _connect(self, store: JobStore) -> None:
        """Make all that connects this worker to the others, of the job or of its current epoch."""
        self._site = self._choose_site(self._device, store)
        self.device_mesh = self._membership.device_mesh(self._device.type)
        group = None if self.device_mesh is None else self.device_mesh.get_group("pp")
        self.pipeline = self._build_pipeline(self._part, self._device, group)
        self._checkpointer = self._make_checkpointer(self._part, group, store)
        if self._checkpointer is not None:
            self._checkpointer.run_info |= self._run_info
        self._context = self._make_context(store)

    def _build_pipeline(
        self, part: ModelPartition, device: torch.device, group: dist.ProcessGroup | None
    ) -> Pipeline:
        config, worker = self._config, self.worker
        in_lab = SCENARIO in os.environ  # a scenario may slow this device
        pipeline = Pipeline(
            part,
            loss_fn=LossFunction(config.loss_fn, counts_labels=True),
            microbatch_sizes=[self._global_batch.microbatch_size],
            schedule=config.schedule,
            memory_limit=config.device.memory_limit,
            process_group=group,
            timeout=config.timeout,
            device=device,
            log=self._log,
            compute=EmulatedCompute.from_environment(os.environ) if in_lab else None,
            pipeline=worker.pipeline,
            seed=config.data.seed if config.data.seed_dropout else None,
            site=self._site,
        )
        planned = self.plan.pipelines[worker.pipeline].schedule
        if config.schedule == AUTO != planned:
            pipeline.spec = ScheduleSpec.parse(planned)  # the initial one
        return pipeline

    def _make_context(self, store: JobStore) -> FitContext:
        config, membership = self._config, self._membership
        if self._exits_on_sigterm:
            self._exits_on_sigterm = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        depart = None
        if self._elastic is not None:
            depart = self._elastic.depart
        self._preemption = PreemptionHandler(
            membership.job_store("preemption"),
            membership.members,
            membership.first_stages,
            grace_period=config.checkpoint.grace_period,
            depart=depart,
        )
        notes = self._backends and f"backend: {self._backends}", self._waits
        return FitContext(
            config=config,
            worker=self.worker,
            store=store,
            members=membership.members,
            first_stages=membership.first_stages,
            global_batch=self._global_batch,
            shares=choose_shares(self.plan, self._global_batch),
            pipeline=self.pipeline,
            samples=self._samples,
            log=self._log,
            checkpointer=self._checkpointer,
            preemption=self._preemption,
            metric_store=membership.job_store("metrics"),
            # The step that a gather follows, and the first ones, may take longer than `timeout`.
            open_gather_store=partial(
                membership.job_store, "gathers", step_timeout(config.timeout, 0)
            ),
            machines=self._gather_machines(store),
            site=self._site,
            note="\n".join(filter(None, notes)),
            elastic=self._elastic,
        )

    def _make_checkpointer(
        self, part: ModelPartition, group: dist.ProcessGroup | None, store: JobStore
    ) -> TrainerCheckpointer | None:
        config, worker = self._config, self.worker
        if config.run_dir is None:
            return None
        return TrainerCheckpointer.of(config, part, worker, group, self.plan, store, self._log)

    def _begin_run(self, what: str, *, overwrite: bool = False) -> None:
        """Before the first step or save: refuse checkpoints that were not restored."""
        if self._checkpointer is not None and not self._has_started:
            begin = partial(self._checkpointer.begin_run, what, overwrite=overwrite)
            store, members = self._context.store, self._context.members
            self._num_begins += 1  # a refused one may have been caught
            name = f"the checkpoints before {what}, attempt {self._num_begins}"
            store.run_on_leader(name, begin, members)
        self._has_started = True

    def _continue_batches(self, saved: DataSettings | None, restarts_data: bool) -> None:
        """After a restore, continue with the samples that are not used yet."""
        step, batch = self.global_step, self._context.global_batch
        if saved is None and not restarts_data and self.worker == LEADER:
            warnings.warn(
                f"the checkpoint of step {step} was saved by an earlier version: whether it has "
                f"the same batch_size, seed, shuffle and number of samples cannot be checked",
                stacklevel=3,
            )
        if saved is None or restarts_data:
            first = self._progress.sampler_state.num_used - step * batch.size
            batch = replace(batch, first_position=first)
        else:
            batch = saved.continued(batch, step, self._progress.sampler_state.num_used)
            if saved.batch_size != batch.size and self.worker == LEADER:
                _logger.warning(
                    "restored with batch_size=%d, saved with %d: steps and learning rates continue "
                    "from step %d, with the samples that are not used yet",
                    *(batch.size, saved.batch_size, step),
                )
        self._global_batch = batch
        self._context = replace(self._context, global_batch=batch)

    def _open_log(self) -> None:
        """Open this worker's event log in the run folder, if there is one."""
        run_dir, self._log = self._config.run_dir, None
        if run_dir is not None:
            self._log = EventLog(worker_log(run_dir, self._place), self._place)

    def _loggers_of(self, config: FitConfig) -> list[Logger]:
        """Return the loggers of a fit, on the leader; a run folder has metrics.jsonl, too."""
        if self.worker != LEADER:
            return []
        if self._config.run_dir is not None and not self._loggers:
            self._loggers.append(JsonLines(self._config.run_dir / METRICS))
        own = self._loggers[: self._config.run_dir is not None]
        self._loggers += [each for each in config.loggers if each not in self._loggers]
        return [*own, *config.loggers]

    def _close_metrics(self) -> None:
        for gather in self._context.metric_gathers.values():
            gather.close()
        for logger in self._loggers:
            logger.close()

    def _close_files(self) -> None:
        if self._log is not None:
            self._log.close()
        if self._lock is not None:
            self._lock.close()

    def _check_sync(self, store: JobStore) -> None:
        """Refuse what averaging between pipelines would refuse later, in the middle of training."""
        num_stages, num_pipelines = self.plan.num_stages, self.plan.num_pipelines
        if num_pipelines > 1:
            check_sync(self._config.sync, num_stages=num_stages, num_pipelines=num_pipelines)
            if self._config.sync.has_coordinator:
                check_worker_keys(store, self._membership.members)

    def _choose_site(self, device: torch.device, store: JobStore) -> str | None:
        """Return the workers with which this one communicates over NCCL; None for none."""
        members, plan = self._membership.members, self.plan
        own = Gpu.of(device)
        kind: Any = Gpu | None
        gpus = store.all_gather_object("backends", own, members, as_type=kind)
        workers = [plan.worker(rank) for rank in members.ranks]
        regions = [plan.region_of(worker) for worker in workers]
        sites = choose_sites(self._config.device.backend, gpus, regions)
        self._backends = ""
        if len(sites) > 1 and any(gpus):
            of_workers = dict(zip(workers, sites, strict=True))
            is_decoupled = self._config.sync.first_mode.decoupled
            self._backends = describe_backends(of_workers, is_decoupled=is_decoupled)
            _logger.info("backend: %s", self._backends)
        return sites[plan.rank(self.worker)]

    def _check_capabilities(self, device: torch.device, store: JobStore | None) -> None:
        """Refuse a precision that the GPU of any process lacks, in all processes.

        Without a store, of a process that joins: for its own GPU.
        """
        own: tuple[Any, ...] | None = None
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            own = capability, f"{torch.cuda.get_device_name(device)} of {self.worker}"
        of_all = [own]
        if store is not None:
            of_all = store.all_gather_object("GPUs", own, self._membership.members)
        for found in of_all:
            if found is not None:
                self._config.device.check_capability(tuple(found[0]), found[1])

    def _make_scaler(self, optimizer: Optimizer) -> LossScaler | None:
        """Make the scaler of float16; freeze what is not trained: nobody unscales its gradients."""
        if self._config.device.autocast is not torch.float16:
            return None
        self._freeze_untrained(optimizer)
        return LossScaler(self._device)

    def _freeze_untrained(self, optimizer: Optimizer) -> None:
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        for parameter in self._part.module.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter in trained)

    def _gather_machines(self, store: JobStore) -> list[str]:
        """Return the machines by rank, for sync="auto"; warn if it can only stay in lockstep."""
        if self._config.sync.mode != AUTO or self.plan.num_pipelines == 1:
            return []
        members = self._membership.members
        machines: list[str] = store.all_gather_object("machines", machine_name(), members)
        if len(set(machines)) == 1 and self.worker == LEADER:
            _logger.warning(
                'sync="auto" stays in lockstep: all processes are on one machine, %s', machines[0]
            )
        return machines

    def _check_between_fits(self, what: str) -> None:
        """Weights, sampler state and learning rates are consistent only between two fits."""
        if not self._is_open:
            raise LaunchError(
                f"{what} after close()",
                expected=f"{what} before close(), or before the end of the `with` block",
                fix="close the Trainer later, or create a new one and restore()",
            )
        if self._is_fitting:
            raise LaunchError(
                f"{what} during fit()",
                expected=f"{what} before or after fit()",
                fix="use CheckpointConfig(every=...)",
            )
        # In one process nothing else has failed: it continues after the last complete step.
        is_known = self.plan.num_workers == 1 and not self._progress.problem
        if self._failure is not None and not is_known and what not in ("save()", self._may_repair):
            raise LaunchError(
                f"{what} after a failed fit(): {self._failure}",
                expected=f"{what} before or after a complete fit()",
                fix="restore() in a new Trainer; save(), if all stages ended after the same step",
            )

    @property
    def _may_repair(self) -> str:
        """What makes the state after a failed fit known again."""
        return "restore()" if self.plan.num_workers == 1 else ""

    def _run(self, fit_loop: FitLoop) -> str | None:
        """Run a fit; return why its epoch has ended before, None for the end of the fit."""
        self._is_fitting, self._failure = True, None
        can_save = self._checkpointer is not None
        try:
            with self._preemption.catch_interrupt() if can_save else nullcontext():
                fit_loop.run()
        except BaseException as error:
            self._failure = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            self.pipeline.abort(f"a failed fit(): {self._failure}")
            if self._elastic is None or not isinstance(error, PeerError):
                raise
            # Not the error: its traceback holds the sockets of the epoch. One of a wait that has
            # ended with the epoch names a healthy peer.
            return self._elastic.why_ended or fit_loop.why_epoch_ends or str(error)
        finally:
            self._is_fitting = False
        return None

    def _stop_if_asked(self, fit_loop: FitLoop) -> None:
        """Begin no step in an epoch of workers that were all asked to leave: save and exit."""
        if self._elastic is not None and self._elastic.ends_job:
            fit_loop.why_epoch_ends = "all that are left are asked to leave"
            self._preemption.stop(fit_loop.why_epoch_ends)

    def _make_elastic(self, processes: JobProcesses) -> ElasticJob | None:
        """Return this process's part in the epochs of the job, if it can go on after a loss."""
        ctx, plan = processes.ctx, self.plan
        if not (ctx.keeps_survivors and plan.num_workers > 1):
            return None
        has_one_pipeline = plan.num_pipelines == 1
        if processes.are_joined or ElasticJob.num_made:
            what = "in a process group of the script" if processes.are_joined else "the second one"
            if not has_one_pipeline:
                _logger.warning("this Trainer, %s, does not go on after the loss of a worker", what)
            return None
        ranks = assign_ranks(plan, processes.device_names())
        machines = {ranks[i]: host.machine for i, host in enumerate(processes.hosts())}
        sync = self._config.sync
        buddy = sync.buddy if sync.first_mode.decoupled else None
        fatal = machines_without_reserve(plan, machines, buddy=buddy)
        if fatal and len({*machines.values()}) > 1 and ctx.rank == 0:
            why = ": the plan has one pipeline" if has_one_pipeline else ""
            _logger.warning("training cannot go on without %s%s", " or ".join(fatal), why)
        if has_one_pipeline:
            self._waits = "a loss ends the job: the plan has one pipeline"
            return None
        coordinator = ctx.coordinator  # None under torchrun: it is started with defaults
        timeouts = LossTimeouts() if coordinator is None else coordinator.timeouts
        order = timeouts.order(self._config.timeout)
        self._waits = f"goes on after losses: {order}"
        if buddy is False:
            self._waits = "a loss ends the job if a shard is lost, as buddy=False keeps no copies"
        ctx = processes.with_coordinator()
        return ElasticJob(ctx, self.plan, ranks, timeout=self._config.timeout)

    def _make_division(
        self, processes: JobProcesses, whole: nn.Module, problem: Problem | None
    ) -> LayerDivision | None:
        """Return what a new division of layers needs; None if the job keeps the first one."""
        if self._elastic is None:
            return None
        problem = share_problem(problem, processes)
        return LayerDivision.of_job(self._config, whole, self.plan, problem, self._global_batch)

    def _join(self, processes: JobProcesses) -> JobMembership:
        """Join the job, or its first epoch."""
        if self._elastic is None:
            return join_job(self.plan, processes)
        return self._join_epoch(self._elastic.next_epoch("", ProcessState(0, 0)))

    def _join_epoch(self, start: EpochStart) -> JobMembership:
        """Join the other workers of an epoch."""
        if start.worker is None:
            cause = f"it is no longer needed: {start.assignment.why}"
            raise PeerError("a worker", action="starting", waited=0.0, cause=cause)
        self.plan = start.assignment.plan
        return join_epoch(start.ctx, self.plan, start.worker, self._config.timeout)

    def _recover(self, fit_loop: FitLoop, why: str) -> None:
        """Go on with the workers that are left, after the last step that all have made.

        A process that is a spare waits here until it is needed, or the job is over.
        """
        elastic = self._elastic
        assert elastic is not None, "otherwise the error was raised"
        fit_loop.end_epoch()
        changes, self._waits = None, ""
        while changes is None:
            _logger.warning("%s: %s", self.worker, why)
            elastic.end_epoch(why)
            self._disconnect()
            try:
                changes = self._begin_epoch(elastic, fit_loop, why)
            except EpochOverError as error:
                why = str(error)
        if self._lock is None and self._config.run_dir is not None and self.worker == LEADER:
            self._lock = take_over_lock(self._config.run_dir)
        self.pipeline.num_steps = self.global_step
        self._failure = None
        _logger.warning("goes on after step %d as %s: %s", self.global_step, self.worker, changes)

    def _begin_epoch(self, elastic: ElasticJob, fit_loop: FitLoop | None, why: str) -> str:
        """Become a worker of the next epoch that needs this process; return what has changed.

        Raises EpochOverError if the epoch has ended before all were ready for a step. `fit_loop` is
        None for a newcomer, who begins as a spare.
        """
        is_spare = fit_loop is None
        while True:
            try:
                start = elastic.next_epoch(why, self._own_state(), waits=is_spare)
            except JobOverError:
                elastic.finish()
                self._exit_job(TERMINATED, "was a spare until the end of the job")
            except FencedError:
                if fit_loop is not None:
                    raise
                self._exit_too_late(elastic)
            except SystemExit:  # SIGTERM to a spare
                elastic.finish()
                raise
            if self._has_groups:
                start, samples = settle_groups(start, self._step_after)
                elastic.report_samples(samples.num_used)
                if fit_loop is not None:
                    fit_loop.set_samples(samples)
                self._has_state = start.states[elastic.member].has_state
                self._progress.is_cut = False
            num_steps = check_state(start)
            if fit_loop is not None and num_steps > self.global_step:
                fit_loop.catch_up(num_steps)  # made while this process was a spare
            try:
                self._share_progress(elastic, start, num_steps)
                assert self.global_step == num_steps, "a spare knows the fit that it waits in"
                num_left = 0 if fit_loop is None else fit_loop.num_steps - num_steps
                if self._divide_layers(elastic, start, num_left):
                    is_spare, why = False, "layers are divided anew"
                    continue
                if start.worker is not None:
                    self._membership = self._join_epoch(start)
                    self._has_membership = True
                    self._connect(self._membership.job_store("training"))
                    self.pipeline.keep_parameters()
                    self._share_scale(self._context.store, self._context.members)
                self._move_state(elastic, start)
                self._share_optimizer(start)
            except FencedError:
                raise
            except PeerError as error:
                raise EpochOverError(str(error)) from None
            if start.leaves:
                elastic.finish()
                self._exit_job(TERMINATED, f"has left after step {self.global_step}")
            # Until all has arrived, also over several epochs, a former spare has none.
            self._has_state = start.worker is not None
            if self._has_state:
                return start.assignment.why
            _logger.warning("process %d is a spare: %s", elastic.member, start.assignment.why)
            is_spare, why = True, ""

    @property
    def _has_groups(self) -> bool:
        """Whether replicas may differ within an epoch, and which samples are used is not fixed."""
        sync = self._config.sync
        return sync.mode == AUTO or not sync.first_mode.lockstep

    def _step_after(self, sampler_state: SamplerState) -> int:
        return self._global_batch.step_at(sampler_state.num_used)

    def _own_state(self) -> ProcessState:
        """Return what this process has in memory when an epoch has ended."""
        progress, elastic = self._progress, self._elastic
        assert elastic is not None, "only an elastic job has epochs"
        is_first = elastic.assignment.places[elastic.member].stage == 0
        return ProcessState(
            NEWCOMER if self._is_newcomer else self._num_fits,
            self.global_step,
            self._has_state,
            is_cut=progress.is_cut,
            samples=progress.sampler_state if self._has_groups and is_first else None,
            is_sharded=isinstance(progress.optimizer, DistributedOptimizer),
            has_own_optimizer=progress.has_own_optimizer,
            can_divide=self._division is not None and self._division.may_try,
        )

    def _share_progress(self, elastic: ElasticJob, start: EpochStart, num_steps: int) -> None:
        """Tell newcomers how far training is, apart from weights and optimizer state."""
        if not start.newcomers:
            return
        store, _ = start.job_store("progress", elastic.member, self._config.timeout)
        source = next(member for member, own in start.states.items() if own.has_state)
        progress, own = self._progress, None
        if elastic.member == source:
            extra = self._context.extra(progress, progress.sampler_state)
            own = self._num_fits, extra
        elif elastic.member not in start.newcomers:
            return
        members = Members((source, *start.newcomers))
        num_fits, extra = store.broadcast_object("how far training is", own, members)
        if elastic.member == source:
            return
        if num_fits != self._num_fits:
            cause = f"it is in fit {num_fits} already, and this process in fit {self._num_fits}"
            raise FencedError("the job", action="joining", waited=0.0, cause=cause)
        dataset_state = progress.load(num_steps, extra)
        if dataset_state is not None:
            self._samples.resume_from(dataset_state)
        settings = msgspec.convert(extra["data"], DataSettings)
        self._global_batch = replace(self._global_batch, first_position=settings.first_position)

    def _share_scale(self, store: JobStore, members: Members) -> None:
        """In float16: scale the loss as the workers that made the last step."""
        scaler = self._progress.scaler
        if scaler is None:
            return
        own = scaler.state_dict() if self._has_state else None
        found = store.all_gather_object("the scale of the loss", own, members)
        scaler.load_state_dict(next(each for each in found if each is not None))

    def _move_state(self, elastic: ElasticJob, start: EpochStart) -> None:
        """Move the state of this stage to those that go on."""
        config, progress = self._config, self._progress
        stage = start.assignment.places[elastic.member].stage
        is_sharded = config.sync.first_mode.decoupled
        if config.sync.mode == AUTO:  # it may have been in another mode
            holders = (start.states[member] for member in start.holders)
            is_sharded = any(own.has_state and own.is_sharded for own in holders)
        if not moves_state(start, stage, is_sharded=is_sharded):
            return
        old, new = (progress.optimizer if self._has_state else None), None
        strategy: DecoupledStrategy | None = None
        if start.worker is not None and (is_sharded or not self._has_state):
            new = self._context.new_optimizer()
            if is_sharded and self.plan.num_pipelines > 1:
                strategy = DecoupledStrategy(
                    self.pipeline,
                    new,
                    config.clip_grad_norm,
                    process_group=None,
                    site=self._site,
                    timeout=config.timeout,
                    buddy=self._context.keeps_copies,
                    for_reshard=True,
                )
                new = strategy.optimizer
        try:
            what = f"stage {stage}"
            group = new_transfer_group(start, elastic.member, start.holders, what, config.timeout)
            reshard(old, new, self._part.module, group, timeout=config.timeout)
        except BaseException:
            if strategy is not None:  # the next epoch makes another one for the same parameters
                strategy.abort()
            raise
        if new is not None:
            progress.optimizer, progress.paused = new, strategy
        if strategy is not None:
            strategy.pause()

    def _divide_layers(self, elastic: ElasticJob, start: EpochStart, steps: int) -> bool:
        """Divide the layers anew if that uses spares, and pays off in the `steps` that are left.

        Return whether they are divided: then the next epoch begins with the new plan. Raises
        PeerError if the epoch has ended; then all have what they had before.
        """
        division, timeout = self._division, self._config.timeout
        if division is None or not start.assignment.spares or elastic.ends_job:
            return False
        if not all(own.can_divide for own in start.states.values()):
            return False
        division.num_failed += 1  # until it has succeeded
        store, members = start.job_store("division", elastic.member, timeout)
        decide = partial(division.decide, start.assignment, steps=steps)
        decided = store.run_on_leader("the division", decide, members, as_type=AfterLoss)
        if store.rank == members.leader:
            what = "are kept" if decided.plan is None else "are divided anew"
            _logger.warning("after step %d the layers %s: %s", self.global_step, what, decided.why)
        if decided.plan is None:
            division.num_failed = 0
            return False
        assignment, part, optimizer = new_assignment(start.assignment, decided), None, None
        if (place := assignment.workers.get(elastic.member)) is not None:
            part = division.extract_stage(decided.plan, place.stage, self._device)
            optimizer = new_optimizer(self._config, part.module)
        held = self._gather_stage(elastic, start)
        self._share_scale(store, members)
        group = new_transfer_group(start, elastic.member, start.members, "layers", timeout)
        module = None if part is None else part.module
        move_layers(held, module, optimizer, group, timeout=timeout)
        elastic.commit_division(start, assignment)
        division.num_failed = 0
        if part is None or optimizer is None:
            elastic.finish()
            self._exit_job(TERMINATED, f"has no layers after step {self.global_step}")
        self._part, self._progress.optimizer, self._has_state = part, optimizer, True
        if self._progress.scaler is not None:
            self._freeze_untrained(optimizer)
        return True

    def _gather_stage(self, elastic: ElasticJob, start: EpochStart) -> HeldLayers | None:
        """Return the stage with its whole optimizer state, on one of the processes that have it."""
        states, timeout = start.states, self._config.timeout
        holders = [member for member in start.holders if states[member].has_state]
        if elastic.member not in holders:
            return None
        module, optimizer = self._part.module, self._progress.optimizer
        is_first = elastic.member == holders[0]
        if any(states[member].is_sharded for member in holders):
            what = f"stage {start.assignment.places[elastic.member].stage} to one process"
            group = new_transfer_group(start, elastic.member, holders, what, timeout)
            whole = new_optimizer(self._config, module) if is_first else None
            reshard(optimizer, whole, module, group, timeout=timeout)
            optimizer = optimizer if whole is None else whole
        return HeldLayers(module, optimizer) if is_first else None

    def _share_optimizer(self, start: EpochStart) -> None:
        """After groups, when the next phase averages gradients: equalise the optimizer's state."""
        is_needed = any(own.has_own_optimizer for own in start.states.values())
        if not (is_needed and self._config.sync.first_mode.lockstep):
            return
        if start.worker is not None and self.plan.num_pipelines > 1:
            broadcast_optimizer_state(self._progress, self._context)
        self._progress.has_own_optimizer = False

    def _disconnect(self) -> None:
        """Drop all that connects this worker to the others of an epoch that has ended."""
        if self._is_newcomer and "_context" not in vars(self):  # it was not connected yet
            if "pipeline" in vars(self):
                self.pipeline.__exit__(RuntimeError, RuntimeError(), None)
            if self._has_membership:
                self._membership.abandon()
            leave_group()
            return
        self._preemption.close()
        # Until it is a worker again, this process is lost if it gets SIGTERM.
        is_main = threading.current_thread() is threading.main_thread()
        is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if is_main and (self._exits_on_sigterm or is_default):
            self._exits_on_sigterm = True
            exit_on_sigterm()
        for gather in self._context.metric_gathers.values():
            gather.close()
        if self._progress.paused is not None:
            self._progress.paused.abort()
            self._progress.paused = None
        self.pipeline.__exit__(RuntimeError, RuntimeError(), None)
        if self._checkpointer is not None:
            self._checkpointer.abandon()
        for parameter in self.model.parameters():
            parameter.grad = None
        self._progress.problem, self._progress.is_updating = "", False
        self._membership.abandon()
        leave_group()

    def _exit_job(self, status: int, what: str) -> NoReturn:
        """Exit this process, while others go on or after they have finished."""
        self._is_open = False
        atexit.unregister(self._at_exit)
        self._samples.close()
        for logger in self._loggers:
            logger.close()
        self._close_files()
        _logger.warning("process %s %s", os.environ.get("RANK", ""), what)
        sys.exit(status)

    def _check_last_step(self) -> None:
        """After a failed fit, refuse to save if stages have not ended after the same step."""
        if self._failure is None:
            return
        ends = [(self.global_step, self._progress.problem)]
        stages = Members(tuple(range(self.plan.num_stages)), self._context.members.epoch)
        if self._context.store.rank in stages.ranks:
            self._num_saves += 1
            name = f"the last step for save {self._num_saves}"
            ends = self._context.store.all_gather_object(name, ends[0], stages)
        why = next((problem for _, problem in ends if problem), "")
        steps = [str(step) for step, _ in ends]
        if not why and len(set(steps)) > 1:
            why = f"the stages ended after steps {', '.join(steps)}"
        if why:
            raise LaunchError(
                f"save() after a failed fit() ({self._failure}): {why}",
                expected="weights and optimizer after the same step everywhere",
                fix="restore() the newest checkpoint in a new Trainer; to stop and save at any "
                "time, send SIGTERM",
            )

    def _at_exit(self) -> None:
        """Close at the end of a successful script, which need not call `close`."""
        has_failed = sys.exc_info()[0] is not None or hasattr(sys, "last_type")
        if not has_failed:
            self.close()
        elif self._is_open:
            self._abandon()

    def _record_run(self, num_steps: int) -> None:
        if self._log is not None and self.worker == LEADER:
            values: dict[str, Value] = {
                "stages": self.plan.num_stages,
                "pipelines": self.plan.num_pipelines,
                "steps": num_steps,
                "schedule": str(self.pipeline.spec),
                "sync": self._config.sync.mode,
                "device": str(self.pipeline.device),
                "torch": str(torch.__version__),
            }
            if self._backends:
                values["backend"] = self._backends
            self._log.write("run", name="trainer", values=values)

    def _exit_preempted(self, status: int) -> NoReturn:
        """Exit after a preemption notice; the state is on disk if there is a run folder."""
        if self.worker == LEADER:
            outcome = "not saved: there is no run folder"
            if self._checkpointer is not None:
                outcome = "saved" if self._checkpointer.wait() else "not saved"
            text = f"interrupted after step {self.global_step}, {outcome}"
            if status != INTERRUPTED:
                why, step = self._preemption.why, self.global_step
                text = f"{why}: the job stops after step {step}, {outcome}"
            if outcome == "saved":
                text += f" in {self._config.run_dir}; to continue, run the same script with "
                text += "trainer.restore() before fit()"
            print(text, file=sys.stderr, flush=True)
        self.close()
        sys.exit(status)

    def _make_loader(self, dataset: Any, order: SampleOrder | None) -> SampleLoader:
        return SampleLoader(
            dataset,
            order,
            self._config.collate_fn,
            seed=self._config.data.seed,
            workers=self._config.data.workers(self._device),
            batch_size=self._global_batch.size,
            num_shards=self._config.data.stream_shards,
        )

    def _evaluator(
        self, what: str, dataset: Dataset[Any] | Iterable[Any], metrics: Mapping[str, Any]
    ) -> Evaluator:
        order = make_order(dataset, shuffle=False)
        if order is None:
            raise LaunchError(
                f"{what} evaluates a {type(dataset).__name__} without a length",
                expected="a dataset of known length",
                fix="pass a part of it as a list: list(itertools.islice(stream, 1000)); or define "
                "__len__ and __getitem__ on it",
            )
        return Evaluator(
            pipeline=self.pipeline,
            samples=self._make_loader(dataset, order),
            metrics=metrics,
            precision=self._config.device.precision,
        )

    def _require_checkpointer(self) -> TrainerCheckpointer:
        if self._checkpointer is None:
            raise no_run_dir("a checkpoint")
        return self._checkpointer


def _missing(name: str) -> LaunchError:
    example = {"optimizer_fn": "pr.adamw(lr=3e-4)", "dataset": "tokenized"}[name]
    return LaunchError(
        f"a Trainer without {name}",
        expected=f"{name}, which has no default",
        fix=f"Trainer(model, {name}={example}, ...)",
    )

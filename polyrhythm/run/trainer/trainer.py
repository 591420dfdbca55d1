"""All of it in one object: a plan, a pipeline that tunes itself, replicas that keep together.

    trainer = pr.Trainer(model, loss_fn, optimizer_fn, dataset, batch_size=64)
    trainer.fit(steps=1000)

The same script runs in one process, under `polyrhythm train --local N`, and under torchrun on many
machines. A step is one global batch, whoever computes it.
"""

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from polyrhythm.errors import LaunchError
from polyrhythm.events import EventLog, Value, worker_log
from polyrhythm.plan.plan import AUTO, Plan
from polyrhythm.processes import TERMINATED
from polyrhythm.run.checkpoint.export import hugging_face_configs
from polyrhythm.run.data.loader import SampleLoader
from polyrhythm.run.data.order import SampleOrder
from polyrhythm.run.data.reader import make_order, make_reader
from polyrhythm.run.emulated_compute import SCENARIO, EmulatedCompute
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.checkpointer import TrainerCheckpointer
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.run.trainer.evaluate import evaluate
from polyrhythm.run.trainer.fit_context import FitContext, TrainProgress
from polyrhythm.run.trainer.fit_loop import FitLoop
from polyrhythm.run.trainer.membership import join_job
from polyrhythm.run.trainer.plan_choice import choose_global_batch, choose_plan, choose_shares
from polyrhythm.run.trainer.preemption import PreemptionHandler
from polyrhythm.run.trainer.rank_assignment import JobProcesses
from polyrhythm.run.trainer.run_dir import lock_run_dir
from polyrhythm.run.trainer.split_spec import SplitSpec, build_model
from polyrhythm.run.trainer.step_loop import StepEnd, WeightedLoss
from polyrhythm.run.trainer.store import LEADER, check_consistent
from polyrhythm.run.trainer.sync_strategy import NoSync
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Bytes, Seconds, Worker

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """What `fit` has done, as this worker saw it."""

    steps: tuple[StepEnd, ...]  # of this worker; losses on the last stages
    seconds: Seconds

    @property
    def losses(self) -> tuple[float, ...]:
        """Of this pipeline's samples, step by step."""
        return tuple(end.loss for end in self.steps if end.loss is not None)


class Trainer:
    """One worker's; made by all processes of the job alike."""

    num_made: ClassVar[int] = 0  # of this process; all of a job make as many
    num_fits: ClassVar[int] = 0

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss_fn: Callable[..., Tensor],
        optimizer_fn: Callable[[Iterable[nn.Parameter]], Optimizer],
        dataset: Dataset[Any],
        *,
        batch_size: int | None = None,
        microbatch_size: int | None = None,
        plan: Plan | Path | str = AUTO,
        schedule: str = AUTO,
        memory_limit: str | Bytes | None = None,
        sync: str = AUTO,
        sync_options: Mapping[str, object] | None = None,
        overlap: bool = False,
        layers: str | None = None,
        prologue: Sequence[str] = (),
        every: Sequence[str] = (),
        epilogue: Sequence[str] = (),
        lr_scheduler_fn: Callable[[Optimizer], LRScheduler] | None = None,
        clip_grad_norm: float | None = None,
        autocast: torch.dtype | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        device: torch.device | str | None = None,
        run: Path | str | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        callbacks: Sequence[Callable[[StepEnd], None]] = (),
        compute: EmulatedCompute | None = None,
        timeout: Seconds = 60.0,
        grace_period: Seconds = 30.0,
    ) -> None:
        """`model` is the whole one, or a function that makes it, alike in every process.

        `loss_fn(output, target)` is the mean loss of a micro-batch, and `dataset[i]` a pair of what
        the model takes (a tensor, several, or several by name) and the target. `optimizer_fn`
        makes the optimizer of some of the parameters, `lr_scheduler_fn` its schedule, in steps. A
        step is `batch_size` samples, of all pipelines together.

        `plan` says who does what: a Plan, its file, or auto. `layers`, `prologue`, `every` and
        `epilogue` name parts of a model that is no Sequential, as in `Pipeline.from_layers`;
        `schedule` and `memory_limit` are as there. `sync` is how replicas keep together:
        `decoupled`, or a policy of `GroupSync` with its `sync_options`, and `overlap`. Auto starts
        decoupled, measures, and moves to `balanced` or to groups that overlap when that pays, and
        back.

        `run` is a folder for logs and checkpoints, of which there is one each `checkpoint_every`
        steps, and one at the end; the newest `keep` stay. All processes must see the same folder.
        `callbacks` are called after every step of this worker. `timeout` bounds every wait for
        another process; a plan that rank 0 makes may take 30 times as long. SIGTERM to any process
        is a notice that it will be taken away: all save and end, within `grace_period` seconds.
        """
        self._config = TrainerConfig(
            loss_fn=loss_fn,
            optimizer_fn=optimizer_fn,
            lr_scheduler_fn=lr_scheduler_fn,
            batch_size=batch_size,
            microbatch_size=microbatch_size,
            plan=plan,
            schedule=schedule,
            memory_limit=memory_limit,
            sync=sync,
            sync_options=sync_options or {},
            overlap=overlap,
            split=SplitSpec(layers=layers, prologue=prologue, every=every, epilogue=epilogue),
            clip_grad_norm=clip_grad_norm,
            autocast=autocast,
            collate_fn=collate_fn,
            shuffle=shuffle,
            seed=seed,
            device=device,
            callbacks=callbacks,
            checkpoint_every=checkpoint_every,
            timeout=timeout,
            grace_period=grace_period,
        )
        if run is None and checkpoint_every is not None:
            raise _no_folder(f"checkpoint_every={checkpoint_every}")
        Trainer.num_made += 1
        self._name = f"polyrhythm/trainer {Trainer.num_made}"  # in the job's store
        self._num_fits, self._is_fitting = 0, False
        config, order = self._config, make_order(dataset, seed=seed, shuffle=shuffle)
        make_reader(dataset, order)  # refuses what cannot be dealt out, before anything is opened
        whole = build_model(model, seed)
        processes = JobProcesses(timeout)
        self.plan = choose_plan(config, whole, dataset, processes, run)
        self._global_batch = choose_global_batch(config, self.plan)
        self._shares = choose_shares(self.plan, self._global_batch)
        config.split.check(whole, self.plan.layers_per_stage)
        self._membership = join_job(self.plan, processes)
        worker, device = self.worker, self._membership.device(config.device)
        given = config.text(None if order is None else order.num_samples)
        check_consistent(f"{self._name}/settings", worker, given, timeout=timeout)
        group = self._membership.pipeline_group(timeout)
        self._lock = None if run is None else lock_run_dir(Path(run), worker, self._name)
        self._log = None if run is None else EventLog(worker_log(Path(run), worker), worker)
        part = config.split.extract_stage(whole, worker.stage, self.plan.layers_per_stage)
        part.module.to(device)
        self._loss = WeightedLoss(loss_fn)
        in_lab = compute is None and SCENARIO in os.environ  # which may make this device slow
        held_back = EmulatedCompute.from_environment(os.environ) if in_lab else compute
        self.pipeline = Pipeline(
            part,
            loss_fn=self._loss,
            microbatch_sizes=[self._global_batch.microbatch_size],
            schedule=config.schedule,
            memory_limit=memory_limit,
            group=group,
            timeout=timeout,
            device=device,
            log=self._log,
            compute=held_back,
            pipeline=worker.pipeline,
        )
        planned = self.plan.pipelines[worker.pipeline].schedule
        if config.schedule == AUTO != planned:
            self.pipeline.spec = ScheduleSpec.parse(planned)  # to begin with
        self._samples = self._samples_of(dataset, order)
        self._checkpointer: TrainerCheckpointer | None = None
        if run is not None:
            self._checkpointer = TrainerCheckpointer.of(
                Path(run), part, worker, group, self.plan, self._name, keep=keep, log=self._log
            )
            self._checkpointer.run_info |= hugging_face_configs(whole)
        number = self.plan.num_pipelines
        name = f"{self._name}/notice"
        self._preemption = PreemptionHandler(
            name, worker, number, grace_period=grace_period, timeout=timeout
        )
        self._context = FitContext(
            config=config,
            worker=worker,
            global_batch=self._global_batch,
            shares=self._shares,
            pipeline=self.pipeline,
            samples=self._samples,
            loss=self._loss,
            log=self._log,
            checkpointer=self._checkpointer,
            preemption=self._preemption,
        )
        self._progress = TrainProgress(optimizer=self._context.new_optimizer())
        self._is_open = True
        atexit.register(self._at_exit)

    @property
    def step(self) -> int:
        """Global ones that are made."""
        return self._progress.step

    @property
    def worker(self) -> Worker:
        return self._membership.worker

    @property
    def model(self) -> nn.Module:
        """This worker's stage, whose parameters are called as in the whole model."""
        return self.pipeline.module

    def fit(self, *, steps: int) -> FitResult:
        """Train until `steps` global ones are made, counted from the beginning of training.

        If the job is told to end meanwhile (SIGTERM), it saves a checkpoint and ends the process.
        """
        if not isinstance(steps, int) or steps < 0:
            raise LaunchError(
                f"fit(steps={steps!r})", expected="how many, in all", fix="give fit(steps=1000)"
            )
        self._check_between_fits("fit()")
        Trainer.num_fits += 1
        self._num_fits += 1
        began = time.perf_counter()
        name = f"{self._name}/fit {self._num_fits}"
        fit_loop = FitLoop(name, self._context, self._progress, steps)
        if steps > self.step:
            self._record_run(steps - self.step)
            self._is_fitting = True
            fit_loop.run()
            self._is_fitting = False
        if fit_loop.is_stopped:
            self._exit_preempted()
        return FitResult(steps=tuple(fit_loop.ends), seconds=time.perf_counter() - began)

    def evaluate(self, dataset: Dataset[Any]) -> float:
        """The mean loss on a dataset, of which each pipeline has a share; called by all workers."""
        self._check_between_fits("evaluate()")
        order = make_order(dataset, shuffle=False)
        if order is None:
            raise LaunchError(
                f"an evaluation on a {type(dataset).__name__} without a length",
                expected="a dataset that ends",
                fix="give it __len__ and __getitem__",
            )
        place, number = self.worker.pipeline, self.plan.num_pipelines
        ends = [order.num_samples * pipeline // number for pipeline in (place, place + 1)]
        self._loss.weight = 1.0
        with self._config.precision(self.pipeline.device):
            load = self._samples_of(dataset, order).load
            return evaluate(
                self.pipeline, load, range(*ends), max(1, self._global_batch.size // number)
            )

    def save(self) -> None:
        """A checkpoint of what was trained until now; it is on disk when this returns."""
        self._check_between_fits("save()")
        checkpointer, progress = self._require_checkpointer(), self._progress
        alone = NoSync(self.pipeline, progress.optimizer, None)
        checkpointer.save(
            self.step, alone, progress.extra(self._context, progress.sampler_state), blocking=True
        )
        checkpointer.wait()

    def restore(self, path: Path | str | None = None) -> int:
        """Go on from a checkpoint, by default the newest of the run; how many steps were made.

        It may come from a job of another plan. Without any, training begins at 0. Raises
        CheckpointError if the given one is damaged, or, where none is given, all there are.
        """
        self._check_between_fits("restore()")
        given, progress = None if path is None else Path(path), self._progress
        found = self._require_checkpointer().restore(given, progress.optimizer)
        if found is not None:
            self.pipeline.num_steps = found.step
            if (place := progress.restore(found)) is not None:
                self._samples.resume_from(place)
        return self.step

    def close(self) -> None:
        """Leave the job, together with all others; what is being saved is on disk then."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self._at_exit)
        self._preemption.close()
        self.pipeline.close()
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._close_files()
        self._membership.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._is_open = False
            atexit.unregister(self._at_exit)
            self._preemption.close()
            self.pipeline.__exit__(kind, error, trace)
            self._close_files()
            self._membership.abandon()

    def _close_files(self) -> None:
        if self._log is not None:
            self._log.close()
        if self._lock is not None:
            self._lock.close()

    def _check_between_fits(self, what: str) -> None:
        """Weights, samples and rates belong together only there."""
        if self._is_fitting:
            raise LaunchError(
                f"{what} while fit() is under way, or after it has failed",
                expected="it between two fits",
                fix="use checkpoint_every; after a failure make a new Trainer, and restore()",
            )

    def _at_exit(self) -> None:
        """A script that ends well need not close it."""
        has_failed = sys.exc_info()[0] is not None or hasattr(sys, "last_type")
        if not has_failed:
            self.close()
        elif self._is_open:
            self._membership.abandon()

    def _record_run(self, num_steps: int) -> None:
        if self._log is not None and self.worker == LEADER:
            values: dict[str, Value] = {
                "stages": self.plan.num_stages,
                "pipelines": self.plan.num_pipelines,
                "steps": num_steps,
                "schedule": str(self.pipeline.spec),
                "sync": self._config.sync,
                "device": str(self.pipeline.device),
                "torch": str(torch.__version__),
            }
            self._log.write("run", name="trainer", values=values)

    def _exit_preempted(self) -> NoReturn:
        """The job was told to end: what was trained is on disk, and nothing is left to do."""
        if self.worker == LEADER:
            kept = "there is no run folder to save it in"
            if self._checkpointer is not None:
                self._checkpointer.wait()
                kept = "saved"
            _logger.warning("%s: ends after step %d, %s", self._preemption.why, self.step, kept)
        self.close()
        sys.exit(TERMINATED)

    def _samples_of(self, dataset: Dataset[Any], order: SampleOrder | None) -> SampleLoader:
        return SampleLoader(
            dataset,
            order,
            self._config.collate_fn,
            needs_inputs=self.pipeline.is_first,
            needs_target=self.pipeline.is_last,
        )

    def _require_checkpointer(self) -> TrainerCheckpointer:
        if self._checkpointer is None:
            raise _no_folder("a checkpoint")
        return self._checkpointer


def _no_folder(what: str) -> LaunchError:
    return LaunchError(
        f"{what} of a job without a run folder",
        expected="a folder that it is kept in",
        fix='give one: Trainer(..., run="runs/mine")',
    )

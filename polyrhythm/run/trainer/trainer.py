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
from polyrhythm.processes import TOLD_TO_END
from polyrhythm.run.checkpoint.export import hugging_face_facts
from polyrhythm.run.compute import SCENARIO, Compute
from polyrhythm.run.data.loading import Samples
from polyrhythm.run.data.order import Order
from polyrhythm.run.data.reading import order_of, reader_of
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.assignment import Assignment, Progress
from polyrhythm.run.trainer.choosing import batches_of, plan_of, shares_of
from polyrhythm.run.trainer.cutting import Cut, build
from polyrhythm.run.trainer.evaluating import evaluate
from polyrhythm.run.trainer.fitting import Fitting
from polyrhythm.run.trainer.folder import claimed
from polyrhythm.run.trainer.keeping import Keeping
from polyrhythm.run.trainer.loop import Loss, StepEnd
from polyrhythm.run.trainer.members import join
from polyrhythm.run.trainer.notice import Notice
from polyrhythm.run.trainer.placing import Processes
from polyrhythm.run.trainer.settings import Settings
from polyrhythm.run.trainer.telling import FIRST, agree
from polyrhythm.run.trainer.together import Alone
from polyrhythm.schedule.recipe import Recipe
from polyrhythm.types import Bytes, Seconds, Worker

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
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
        compute: Compute | None = None,
        deadline: Seconds = 60.0,
        grace: Seconds = 30.0,
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
        `callbacks` are called after every step of this worker. `deadline` bounds every wait for
        another process; a plan that rank 0 makes may take 30 times as long. SIGTERM to any process
        is a notice that it will be taken away: all save and end, within `grace` seconds.
        """
        self._settings = Settings(
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
            cut=Cut(layers=layers, prologue=prologue, every=every, epilogue=epilogue),
            clip_grad_norm=clip_grad_norm,
            autocast=autocast,
            collate_fn=collate_fn,
            shuffle=shuffle,
            seed=seed,
            device=device,
            callbacks=callbacks,
            checkpoint_every=checkpoint_every,
            deadline=deadline,
            grace=grace,
        )
        if run is None and checkpoint_every is not None:
            raise _no_folder(f"checkpoint_every={checkpoint_every}")
        Trainer.num_made += 1
        self._name = f"polyrhythm/trainer {Trainer.num_made}"  # in the job's store
        self._num_fits, self._is_fitting = 0, False
        settings, order = self._settings, order_of(dataset, seed=seed, shuffle=shuffle)
        reader_of(dataset, order)  # refuses what cannot be dealt out, before anything is opened
        whole = build(model, seed)
        processes = Processes(deadline)
        self.plan = plan_of(settings, whole, dataset, processes, run)
        self._batches = batches_of(settings, self.plan)
        self._shares = shares_of(self.plan, self._batches)
        settings.cut.check(whole, self.plan.layers_per_stage)
        self._membership = join(self.plan, processes)
        worker, device = self.worker, self._membership.device(settings.device)
        given = settings.text(None if order is None else order.num_samples)
        agree(f"{self._name}/settings", worker, given, deadline=deadline)
        group = self._membership.pipeline_group(deadline)
        self._lock = None if run is None else claimed(Path(run), worker, self._name)
        self._log = None if run is None else EventLog(worker_log(Path(run), worker), worker)
        part = settings.cut.part(whole, worker.stage, self.plan.layers_per_stage)
        part.module.to(device)
        self._loss = Loss(loss_fn)
        in_lab = compute is None and SCENARIO in os.environ  # which may make this device slow
        held_back = Compute.from_environment(os.environ) if in_lab else compute
        self.pipeline = Pipeline(
            part,
            loss_fn=self._loss,
            microbatch_sizes=[self._batches.microbatch_size],
            schedule=settings.schedule,
            memory_limit=memory_limit,
            group=group,
            deadline=deadline,
            device=device,
            log=self._log,
            compute=held_back,
            pipeline=worker.pipeline,
        )
        planned = self.plan.pipelines[worker.pipeline].schedule
        if settings.schedule == AUTO != planned:
            self.pipeline.recipe = Recipe.parse(planned)  # to begin with
        self._samples = self._samples_of(dataset, order)
        self._keeping: Keeping | None = None
        if run is not None:
            self._keeping = Keeping.of(
                Path(run), part, worker, group, self.plan, self._name, keep=keep, log=self._log
            )
            self._keeping.facts |= hugging_face_facts(whole)
        number = self.plan.num_pipelines
        name = f"{self._name}/notice"
        self._notice = Notice(name, worker, number, grace=grace, deadline=deadline)
        self._own = Assignment(
            settings=settings,
            worker=worker,
            batches=self._batches,
            shares=self._shares,
            pipeline=self.pipeline,
            samples=self._samples,
            loss=self._loss,
            log=self._log,
            keeping=self._keeping,
            notice=self._notice,
        )
        self._progress = Progress(optimizer=self._own.new_optimizer())
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

    def fit(self, *, steps: int) -> Fitted:
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
        fitting = Fitting(name, self._own, self._progress, steps)
        if steps > self.step:
            self._record_run(steps - self.step)
            self._is_fitting = True
            fitting.run()
            self._is_fitting = False
        if fitting.is_stopped:
            self._leave()
        return Fitted(steps=tuple(fitting.ends), seconds=time.perf_counter() - began)

    def evaluate(self, dataset: Dataset[Any]) -> float:
        """The mean loss on a dataset, of which each pipeline has a share; called by all workers."""
        self._check_between_fits("evaluate()")
        order = order_of(dataset, shuffle=False)
        if order is None:
            raise LaunchError(
                f"an evaluation on a {type(dataset).__name__} without a length",
                expected="a dataset that ends",
                fix="give it __len__ and __getitem__",
            )
        place, number = self.worker.pipeline, self.plan.num_pipelines
        ends = [order.num_samples * pipeline // number for pipeline in (place, place + 1)]
        self._loss.weight = 1.0
        with self._settings.precision(self.pipeline.device):
            load = self._samples_of(dataset, order).load
            return evaluate(self.pipeline, load, range(*ends), max(1, self._batches.size // number))

    def save(self) -> None:
        """A checkpoint of what was trained until now; it is on disk when this returns."""
        self._check_between_fits("save()")
        keeping, progress = self._checked_keeping(), self._progress
        alone = Alone(self.pipeline, progress.optimizer, None)
        keeping.save(self.step, alone, progress.extra(self._own, progress.supply), patient=True)
        keeping.wait()

    def restore(self, path: Path | str | None = None) -> int:
        """Go on from a checkpoint, by default the newest of the run; how many steps were made.

        It may come from a job of another plan. Without any, training begins at 0. Raises
        CheckpointError if the given one is damaged, or, where none is given, all there are.
        """
        self._check_between_fits("restore()")
        given, progress = None if path is None else Path(path), self._progress
        found = self._checked_keeping().restore(given, progress.optimizer)
        if found is not None:
            self.pipeline.num_steps = found.step
            if (place := progress.restore(found)) is not None:
                self._samples.go_on(place)
        return self.step

    def close(self) -> None:
        """Leave the job, together with all others; what is being saved is on disk then."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self._at_exit)
        self._notice.close()
        self.pipeline.close()
        if self._keeping is not None:
            self._keeping.close()
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
            self._notice.close()
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
        if self._log is not None and self.worker == FIRST:
            values: dict[str, Value] = {
                "stages": self.plan.num_stages,
                "pipelines": self.plan.num_pipelines,
                "steps": num_steps,
                "schedule": str(self.pipeline.recipe),
                "sync": self._settings.sync,
                "device": str(self.pipeline.device),
                "torch": str(torch.__version__),
            }
            self._log.write("run", name="trainer", values=values)

    def _leave(self) -> NoReturn:
        """The job was told to end: what was trained is on disk, and nothing is left to do."""
        if self.worker == FIRST:
            kept = "there is no run folder to save it in"
            if self._keeping is not None:
                self._keeping.wait()
                kept = "saved"
            _logger.warning("%s: ends after step %d, %s", self._notice.why, self.step, kept)
        self.close()
        sys.exit(TOLD_TO_END)

    def _samples_of(self, dataset: Dataset[Any], order: Order | None) -> Samples:
        return Samples(
            dataset,
            order,
            self._settings.collate_fn,
            needs_inputs=self.pipeline.is_first,
            needs_target=self.pipeline.is_last,
        )

    def _checked_keeping(self) -> Keeping:
        if self._keeping is None:
            raise _no_folder("a checkpoint")
        return self._keeping


def _no_folder(what: str) -> LaunchError:
    return LaunchError(
        f"{what} of a job without a run folder",
        expected="a folder that it is kept in",
        fix='give one: Trainer(..., run="runs/mine")',
    )

"""The Trainer's arguments, checked before any process waits for another."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any, TypeGuard, get_args

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polyrhythm.describe.measure import check_usable
from polyrhythm.errors import LaunchError
from polyrhythm.plan.degrees import Degrees
from polyrhythm.plan.options import Recompute
from polyrhythm.plan.plan import Plan
from polyrhythm.run.data.order import SampleOrder
from polyrhythm.run.data.worker_pool import WorkerOptions
from polyrhythm.run.pipeline.partition import LayerSplit
from polyrhythm.run.trainer.evaluate import EVAL_LOSS, check_metrics
from polyrhythm.run.trainer.metrics import HOOKS, Callback, EarlyStopping, Improvement
from polyrhythm.run.trainer.optimizers import LRSchedule, NamedParameters
from polyrhythm.run.trainer.sampler import GlobalBatch
from polyrhythm.sinks.metrics import Logger, StepInfo
from polyrhythm.sync.modes import SyncConfig
from polyrhythm.types import AUTO, Bytes, Seconds

_BFLOAT16_CAPABILITY, _FLOAT8_CAPABILITY = (8, 0), (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """How samples are ordered and read; a function that builds the model uses the seed too.

    The seed also gives what a dataset and `collate_fn` draw from the global random generators, and
    dropout masks: both follow from a sample's position, not from the number of processes.
    `num_workers` processes read and collate micro-batches ahead, as in torch's DataLoader; each
    shard of an iterable dataset is read by one of them.
    """

    shuffle: bool = True
    seed: int = 0
    seed_dropout: bool = True  # False: each process draws masks from torch's current generator
    num_workers: int = 0
    prefetch_factor: int | None = None  # micro-batches ahead for each of them; None: 2
    pin_memory: bool | None = None  # None: if this stage computes on a GPU
    persistent_workers: bool = False  # between two fits
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: str | None = None  # fork, forkserver, spawn; None: Python's default
    stream_shards: int | None = None  # of an iterable dataset; None: up to 16, by its num_shards

    def __post_init__(self) -> None:
        if not (_is_integer(self.seed) and 0 <= self.seed < 2**31):
            raise _invalid("seed", self.seed, "an integer from 0 to 2**31 - 1")
        if not (_is_integer(self.num_workers) and self.num_workers >= 0):
            raise _invalid("num_workers", self.num_workers, "an integer from 0 on")
        factor = self.prefetch_factor
        if factor is not None and not (_is_integer(factor) and factor >= 1):
            raise _invalid("prefetch_factor", factor, "an integer from 1 on, or None")
        if self.worker_init_fn is not None and not callable(self.worker_init_fn):
            raise _invalid("worker_init_fn", self.worker_init_fn, "a function of the worker's id")
        shards = self.stream_shards
        if shards is not None and not (_is_integer(shards) and shards >= 1):
            raise _invalid("stream_shards", shards, "an integer from 1 on, or None")
        methods = get_all_start_methods()
        if self.multiprocessing_context not in (None, *methods):
            context = self.multiprocessing_context
            raise _invalid("multiprocessing_context", context, f"None, {', '.join(methods)}")
        needs_workers = factor is not None or self.persistent_workers or self.worker_init_fn
        if needs_workers and not self.num_workers:
            raise LaunchError(
                "prefetch_factor, persistent_workers or worker_init_fn with num_workers=0",
                expected="worker processes, to which these apply",
                fix="pass num_workers=4, for example, or omit them",
            )

    def workers(self, device: torch.device) -> WorkerOptions:
        """Return how a stage on `device` reads its data."""
        return WorkerOptions(
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor or 2,
            pin_memory=device.type == "cuda" if self.pin_memory is None else self.pin_memory,
            persistent_workers=self.persistent_workers,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save a checkpoint in the run folder, and how many to keep.

    `keep_best` is the name of a metric: each evaluation that is better than all before is saved,
    and the best one stays. SIGTERM to any process is a preemption notice: all processes save and
    exit within `grace_period`.
    """

    every: int | None = None  # steps; None saves after a preemption notice or Ctrl-C only
    keep_last: int = 3
    keep_best: str | None = None  # "eval_loss", or one of fit's metrics
    best_mode: str | None = None  # whether the best is the "min" or the "max"; None: min of a loss
    grace_period: Seconds = 30.0

    def __post_init__(self) -> None:
        if self.every is not None and not (_is_integer(self.every) and self.every >= 1):
            raise _invalid("every", self.every, "an integer from 1 on, or None")
        if not (_is_integer(self.keep_last) and self.keep_last >= 1):
            raise _invalid("keep_last", self.keep_last, "an integer from 1 on")
        if self.keep_best is not None:
            Improvement(self.keep_best, self.best_mode)  # refuses an unknown mode
        elif self.best_mode is not None:
            raise LaunchError(
                f"best_mode={self.best_mode!r} without keep_best",
                expected="the metric that it is the mode of",
                fix='CheckpointConfig(keep_best="accuracy", best_mode="max")',
            )
        if not _is_above_0(self.grace_period):
            raise _invalid("grace_period", self.grace_period, "seconds above 0")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Where and how a process computes: its device, the memory and the precision it may use.

    `backend` is that of tensors on GPUs: `nccl`, `gloo`, or auto: NCCL inside each region of the
    plan, if every worker there has a GPU of its own, and gloo between regions.
    """

    name: torch.device | str | int | None = None  # None: a GPU of its own, if there is one
    _: KW_ONLY
    memory_limit: str | Bytes | None = None  # of a stage; None: what the device has
    # Run layers again in the backward, for less memory: "auto" as the plan says, "never", "always".
    recompute: Recompute = "auto"
    # Of forward and backward, as in torch.autocast; in float16 the Trainer scales the loss.
    autocast: torch.dtype | None = None
    float8: bool = False  # matrix products of linear layers, by torchao
    backend: str = AUTO

    def __post_init__(self) -> None:
        if self.backend not in (AUTO, "nccl", "gloo"):
            raise _invalid("backend", self.backend, "'auto', 'nccl' or 'gloo'")
        if isinstance(self.name, int):  # as torch takes it
            object.__setattr__(self, "name", f"cuda:{self.name}")
        try:
            torch.device("cpu" if self.name is None else self.name)
        except (RuntimeError, TypeError):
            raise _invalid("device", self.name, "a torch device such as 'cuda:1'") from None
        limit = self.memory_limit
        if isinstance(limit, int) and limit <= 0:
            raise _invalid("memory_limit", limit, "bytes, 1 or more, or a text such as '20GiB'")
        if self.recompute not in get_args(Recompute):
            raise _invalid("recompute", self.recompute, "'auto', 'never' or 'always'")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise LaunchError(
                f"autocast={self.autocast}",
                expected="torch.bfloat16, torch.float16, or None to turn it off",
                fix="use bfloat16, or float16 on a GPU that does not have it",
            )

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the autocast context for forward and backward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast)

    def check_usable(self) -> None:
        """Refuse a device that this machine lacks."""
        if self.name is not None:
            check_usable(torch.device(self.name))

    def check_parameters(self, named: NamedParameters) -> None:
        """Refuse float16 parameters: small gradients are 0 in float16, before they are unscaled."""
        in_half = (name for name, parameter in named if parameter.dtype is torch.float16)
        if self.autocast is torch.float16 and (name := next(in_half, None)) is not None:
            raise LaunchError(
                f"autocast=torch.float16 with {name} in float16: attempting to unscale FP16 "
                "gradients",
                expected="parameters in float32, which autocast converts in the forward",
                fix="omit model.half(), or load the model with dtype=torch.float32",
            )

    def check_capability(self, capability: tuple[int, int], device_name: str) -> None:
        """Refuse a precision that a GPU does not have; `capability`: its compute capability."""
        if self.float8 and capability < _FLOAT8_CAPABILITY:
            raise LaunchError(
                f"float8=True on {device_name} of compute capability "
                f"{'.'.join(map(str, capability))}",
                expected="compute capability 8.9 or more: earlier GPUs have no float8",
                fix="omit float8, and use autocast=torch.bfloat16",
            )
        if self.autocast is torch.bfloat16 and capability < _BFLOAT16_CAPABILITY:
            raise LaunchError(
                f"autocast=torch.bfloat16 on {device_name} of compute capability "
                f"{'.'.join(map(str, capability))}",
                expected="compute capability 8.0 or more: earlier GPUs have no bfloat16",
                fix="use DeviceConfig(autocast=torch.float16): the Trainer scales the loss",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """The arguments of `Trainer.fit`."""

    max_steps: int | None
    max_epochs: int | None
    eval_dataset: Any
    eval_every: int | None
    metrics: Mapping[str, Any]
    callbacks: Sequence[Callback | Callable[[StepInfo], object] | Logger]
    on_nan: str
    progress: bool
    overwrite: bool

    def __post_init__(self) -> None:
        given = {"max_steps": self.max_steps, "max_epochs": self.max_epochs}
        for name, value in given.items():
            if value is not None and not (_is_integer(value) and value >= 0):
                raise LaunchError(
                    f"fit({name}={value!r})",
                    expected="the total, 0 or more",
                    fix="fit(max_steps=1000), or fit(max_epochs=3)",
                )
        if self.max_steps is None and self.max_epochs is None:
            raise LaunchError(
                "fit() without max_steps and max_epochs",
                expected="one of them, or both: then training ends with the first that is reached",
                fix="fit(max_steps=1000), or fit(max_epochs=3)",
            )
        self._check_evaluation()
        expected = "a list of functions that take a StepInfo, of objects with on_step(info) or "
        expected += "other hooks, or of loggers"
        if not isinstance(self.callbacks, Sequence) or not all(map(_is_callback, self.callbacks)):
            raise _invalid("callbacks", self.callbacks, expected)
        if self.on_nan not in ("warn", "skip", "stop"):
            raise _invalid("on_nan", self.on_nan, "'warn', 'skip' or 'stop'")
        if not isinstance(self.progress, bool):
            raise _invalid("progress", self.progress, "True or False")

    def _check_evaluation(self) -> None:
        every = self.eval_every
        if every is not None and not (_is_integer(every) and every >= 1):
            raise _invalid("eval_every", every, "an integer from 1 on, or None")
        check_metrics(self.metrics)
        given = {"eval_every": every is not None, "metrics": bool(self.metrics)}
        for name, is_given in given.items():
            if is_given and self.eval_dataset is None:
                raise _no_eval_dataset(f"fit({name}=...)")
        for callback in self.callbacks if isinstance(self.callbacks, Sequence) else ():
            if isinstance(callback, EarlyStopping):
                self.check_evaluates(callback.metric, f"EarlyStopping({callback.metric!r})")

    def check_evaluates(self, metric: str, what: str) -> None:
        """Refuse `what`, which needs a metric, if evaluations do not have it."""
        if self.eval_dataset is None:
            raise _no_eval_dataset(what)
        known = (EVAL_LOSS, *self.metrics)
        if metric not in known:
            raise LaunchError(
                f"{what}: no evaluation has a metric of that name",
                expected=f"one of {', '.join(known)}",
                fix=f"use one of these, or pass fit(metrics={{{metric!r}: ...}})",
            )

    def num_steps(self, global_batch: GlobalBatch, num_samples: int | None) -> int:
        """Return the total number of steps; `num_samples` of an epoch, None if it is unknown."""
        if self.max_epochs is None:
            assert self.max_steps is not None, "one of them is given"
            return self.max_steps
        if num_samples is None:
            raise LaunchError(
                f"fit(max_epochs={self.max_epochs}) with an iterable dataset",
                expected="a dataset of known length: the end of an epoch is not known in advance",
                fix="pass max_steps, such as the number of samples divided by batch_size; or a "
                "dataset with __len__ and __getitem__",
            )
        left = self.max_epochs * num_samples - global_batch.first_position
        steps = -(-left // global_batch.size)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def must_match(self) -> dict[str, Any]:
        """The arguments that must be equal in all processes."""
        names = ("max_steps", "max_epochs", "eval_every", "overwrite", "on_nan")
        return {name: getattr(self, name) for name in names} | {
            "eval_dataset": "none" if self.eval_dataset is None else "given",
            "metrics": list(self.metrics),
        }

    @property
    def loggers(self) -> list[Logger]:
        return [each for each in self.callbacks if is_logger(each)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The arguments of the Trainer, except for the model and the dataset."""

    loss_fn: Callable[..., Any] | None
    optimizer_fn: Callable[[NamedParameters], Optimizer]
    collate_fn: Callable[[list[Any]], Any] | None
    batch_size: int | None  # samples per step, summed over all pipelines
    microbatch_size: int | None
    plan: Plan | Path | str
    stages: int | None
    pipelines: int | None
    schedule: str
    sync: SyncConfig
    split: LayerSplit
    lr_schedule: LRSchedule | Callable[[Optimizer], LRScheduler] | None
    clip_grad_norm: float | None
    data: DataConfig
    device: DeviceConfig
    run_dir: Path | None
    checkpoint: CheckpointConfig
    timeout: Seconds

    def __post_init__(self) -> None:
        for name in ("batch_size", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and value >= 1):
                raise _invalid(name, value, "an integer from 1 on, or None")
        if self.clip_grad_norm is not None and not _is_above_0(self.clip_grad_norm):
            raise _invalid("clip_grad_norm", self.clip_grad_norm, "a number above 0, or None")
        if not _is_above_0(self.timeout):
            raise _invalid("timeout", self.timeout, "seconds above 0")
        if isinstance(self.optimizer_fn, Optimizer):
            raise LaunchError(
                f"optimizer_fn={type(self.optimizer_fn).__name__}(...), an optimizer",
                expected="a function that makes one, of the parameters of this worker's stage",
                fix="pr.adamw(lr=3e-4), or lambda named: torch.optim.AdamW(named, lr=3e-4)",
            )
        for name in ("loss_fn", "optimizer_fn", "collate_fn", "lr_schedule"):
            value = getattr(self, name)
            if not (value is None or callable(value) or isinstance(value, LRSchedule)):
                raise _invalid(name, value, "a function")
        records = {"split": LayerSplit, "data": DataConfig, "checkpoint": CheckpointConfig}
        for name, kind in records.items():
            if not isinstance(value := getattr(self, name), kind):
                expected = f"a {kind.__name__}"
                fix = f"{name}=pr.{kind.__name__}(...)"
                raise LaunchError(f"{name}={value!r}", expected=expected, fix=fix)
        if not isinstance(self.plan, Plan | Path | str):
            raise _invalid("plan", self.plan, "a Plan, the path of its file, or 'auto'")
        if self.degrees.are_given and self.plan != AUTO:
            raise LaunchError(
                f"{self.degrees} with plan=",
                expected="one of the two: a plan has its own stages and pipelines",
                fix="omit plan=, or omit stages= and pipelines=",
            )
        for name in ("every", "keep_best"):
            if self.run_dir is None and (value := getattr(self.checkpoint, name)) is not None:
                raise no_run_dir(f"CheckpointConfig({name}={value!r})")

    @property
    def degrees(self) -> Degrees:
        return Degrees(stages=self.stages, pipelines=self.pipelines)

    def must_match(self, order: SampleOrder | None) -> dict[str, Any]:
        """Return the arguments that must be equal in all processes."""
        names = ("batch_size", "microbatch_size", "schedule", "clip_grad_norm")
        return {name: getattr(self, name) for name in (*names, "stages", "pipelines")} | {
            "autocast": self.device.autocast,
            "float8": self.device.float8,
            "backend": self.device.backend,
            "recompute": self.device.recompute,
            "sync": self.sync.mode,
            "overlap": self.sync.overlap,
            "sync options": dict(self.sync.options),
            "seed": self.data.seed,
            "shuffle": self.data.shuffle,
            "stream_shards": self.data.stream_shards,
            "seed_dropout": self.data.seed_dropout,
            "checkpoint every": self.checkpoint.every,
            "keep_best": self.checkpoint.keep_best,
            "best_mode": self.checkpoint.best_mode,
            "samples": None if order is None else order.num_samples,
        }


def _is_callback(value: object) -> bool:
    """Whether it is a function, a logger or an object with a hook; a class of those is not."""
    has_hook = any(hasattr(value, name) for name in HOOKS)
    return is_logger(value) or (not isinstance(value, type) if has_hook else callable(value))


def is_logger(value: object) -> TypeGuard[Logger]:
    methods = (getattr(value, name, None) for name in ("log", "close"))
    return all(map(callable, methods)) and not isinstance(value, type)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_above_0(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _invalid(name: str, value: object, expected: str) -> LaunchError:
    return LaunchError(f"{name}={value!r}", expected=expected, fix=f"pass another {name}")


def _no_eval_dataset(what: str) -> LaunchError:
    return LaunchError(
        f"{what} without an eval_dataset",
        expected="a dataset to evaluate",
        fix="fit(..., eval_dataset=held_out, eval_every=100)",
    )


def no_run_dir(what: str) -> LaunchError:
    return LaunchError(
        f"{what} without a run folder",
        expected="a run folder, where checkpoints are saved",
        fix='pass one: Trainer(..., run_dir="runs/mine")',
    )

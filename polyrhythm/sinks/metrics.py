"""The metrics of a training step, and the loggers that write them.

A logger is any object with `log(step, values)` and `close()`. Every process of a job makes the
loggers of the script, and only the first one uses them: so TensorBoard, WandB and MLflow import
their packages, and open a run, when they log for the first time.
"""

import importlib
import importlib.util
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from polyrhythm.errors import LaunchError
from polyrhythm.events import Value
from polyrhythm.sinks.jsonl import AppendedLines, writable
from polyrhythm.types import Bytes, Seconds

METRICS = "metrics.jsonl"  # in the run folder

# Structs, not dataclasses: several are made in each step, and that is five times as fast.


class PipelineStep(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one pipeline in a step."""

    pipeline: int
    num_samples: int
    loss: float | None  # the mean over its labels; None without one
    num_labels: float  # samples if labels are not counted
    seconds: Seconds
    waited: Seconds  # of them, for other pipelines; 0 if the host does not wait (NCCL)

    @property
    def speed(self) -> float:
        """Samples per second of computing."""
        return self.num_samples / max(self.seconds - self.waited, 1e-9)


class WorkerStep(msgspec.Struct, frozen=True, kw_only=True):
    """What this worker knows of its own step."""

    num_samples: int  # of its pipeline
    loss: float | None = None  # of its pipeline; None except on the last stage, or without a label
    num_labels: float = 0.0  # of that mean; samples if labels are not counted
    seconds: Seconds
    end: Seconds  # of the step, in time.monotonic()
    peak_memory: Bytes  # allocated on its GPU; on a CPU, of the process


class StepInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of a global step, as passed to callbacks: on all workers the same, except `own`.

    In lockstep (`decoupled`, `all_reduce`, `balanced`, `static`) they cover all pipelines and are
    known one step later. In other modes pipelines run different steps: then they cover this
    worker's pipeline alone. One process on a CPU knows them at once, as does a pipeline of one
    stage in other modes.
    """

    step: int  # the global step, from 0
    loss: float | None  # the mean over the labels of all pipelines; None without a label
    num_labels: float  # of that mean; samples if labels are not counted
    num_samples: int
    num_tokens: int | None  # elements of integer inputs of two dimensions; None without such inputs
    learning_rate: float  # of the first parameter group
    grad_norm: float  # before clipping, over all stages; nan or inf if it is not finite
    loss_scale: float | None = None  # of float16: a step whose grad_norm is not finite was skipped
    seconds: Seconds  # of the slowest pipeline
    peak_memory: Bytes  # the most of any worker
    pipelines: tuple[PipelineStep, ...]
    own: WorkerStep

    @property
    def samples_per_second(self) -> float:
        return sum(each.num_samples / max(each.seconds, 1e-9) for each in self.pipelines)

    @property
    def tokens_per_second(self) -> float | None:
        if self.num_tokens is None:
            return None
        return self.num_tokens / max(self.num_samples, 1) * self.samples_per_second

    @property
    def is_finite(self) -> bool:
        """Whether the loss, if there is one, and the gradients are finite.

        With a loss scale the loss alone: gradients that are not finite lower the scale.
        """
        is_scaled = self.loss_scale is not None
        return math.isfinite(self.loss or 0.0) and (is_scaled or math.isfinite(self.grad_norm))

    def values(self) -> dict[str, float]:
        """Return what loggers get."""
        values = {
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "grad_norm": self.grad_norm,
            "loss_scale": self.loss_scale,
            "num_samples": self.num_samples,
            "num_labels": self.num_labels,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "peak_memory": self.peak_memory,
        }
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        parts = [
            f"step {self.step}",
            "no loss" if self.loss is None else f"loss {self.loss:.4g}",
            f"lr {self.learning_rate:.3g}",
            f"grad norm {self.grad_norm:.3g}",
            f"{self.samples_per_second:,.4g} samples/s",
        ]
        return "  ".join(parts)


class Logger(Protocol):
    """Writes metrics somewhere; used in the first process of a job alone."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a global step, such as `loss` and `learning_rate`."""

    def close(self) -> None:
        """Write what is left; called when the Trainer is closed."""


class JsonLines(AppendedLines):
    """One JSON object per step and per evaluation; every run folder has a `metrics.jsonl`.

    The file is continued after a restore: of two lines with the same step and names the later one
    counts.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(Path(path), continues=True)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        row: dict[str, Value] = {"step": step}
        row |= {name: writable(value) for name, value in values.items()}
        self.append(row, may_wait=True)


class TensorBoard:
    """Event files for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path | str) -> None:
        _check_installed("tensorboard", self)
        self._folder = str(folder)
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        if self._writer is None:
            writers = importlib.import_module("tensorboard.summary.writer.event_file_writer")
            self._writer = writers.EventFileWriter(self._folder)
        named = [
            summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()
        ]
        summary = summaries.Summary(value=named)
        self._writer.add_event(events.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """A run of Weights & Biases; the options are those of `wandb.init`."""

    def __init__(self, **options: Any) -> None:
        _check_installed("wandb", self)
        self._options = options
        self._run: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = importlib.import_module("wandb").init(**self._options)
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class MLflow:
    """A run of MLflow; the options are those of `mlflow.start_run`."""

    def __init__(self, *, tracking_uri: str | None = None, **options: Any) -> None:
        _check_installed("mlflow", self)
        self._tracking_uri, self._options, self._run_id = tracking_uri, options, ""
        self._mlflow: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._mlflow is None:
            self._mlflow = importlib.import_module("mlflow")
            if self._tracking_uri is not None:
                self._mlflow.set_tracking_uri(self._tracking_uri)
            self._run_id = self._mlflow.start_run(**self._options).info.run_id
        # In the background: a server may take longer than a step.
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._run_id, synchronous=False)

    def close(self) -> None:
        if self._mlflow is not None:
            self._mlflow.flush_async_logging()
            self._mlflow.end_run()


def _check_installed(package: str, logger: object) -> None:
    if importlib.util.find_spec(package) is None:
        raise LaunchError(
            f"{type(logger).__name__} without the package {package}",
            expected=f"{package} in this environment",
            fix=f"pip install {package}, or remove {type(logger).__name__} from callbacks=",
        )

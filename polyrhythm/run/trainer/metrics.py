"""Global metrics of each step, gathered while the next step computes; and the callbacks.

Each worker has a few numbers of its own. In lockstep all workers gather them; in groups, where
pipelines run different steps, the stages of a pipeline do. The gather starts at the end of a step
and is waited for at the end of the next one, so no step waits for it; a GPU has computed the
numbers by then, so the host does not wait for the GPU either. If no worker has a callback, some
steps are gathered at once. In groups, first stages publish the
metrics of their pipelines in the job's store, where the leader reads them for its progress line.
"""

import logging
import math
import resource
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.errors import LaunchError, PeerError, UserError, peer_errors
from polyrhythm.run.comm.comm_thread import CommThread
from polyrhythm.run.comm.epoch import current_epoch
from polyrhythm.run.comm.process_groups import new_gloo_group, set_timeout, step_timeout
from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.run.pipeline.batch import HostCopy, Microbatch
from polyrhythm.run.pipeline.loss import Count
from polyrhythm.sinks.metrics import PipelineStep, StepInfo, WorkerStep
from polyrhythm.types import Bytes, Seconds

_logger = logging.getLogger(__name__)

_WHAT = "the metrics of a step"
_MEMORY_INTERVAL: Seconds = 0.5  # reading the peak of a GPU takes 0.1 ms
_PUBLISH_INTERVAL: Seconds = 0.5
STEPS_TOGETHER = 4  # gathered at once if no callback reads them
_REPORT_INTERVAL: Seconds = 0.25  # without callbacks
_CLOSE_TIMEOUT: Seconds = 5.0


class _Stop:
    def __repr__(self) -> str:
        return "STOP"


STOP: Final = _Stop()  # a callback returns it to end training on all workers


class Callback:
    """What a Trainer calls during `fit`; a subclass, or any object with some of these methods.

    Each may return `STOP`: then training ends on all workers after the same step, at most two steps
    later, or at once after an evaluation. It is enough if one worker's callback does.
    """

    def on_step(self, info: StepInfo) -> object:
        """Called for each step, on every worker."""

    def on_eval(self, step: int, values: Mapping[str, float]) -> object:
        """Called after each evaluation during `fit`, on every worker; `step`: of steps done."""

    def on_checkpoint(self, step: int, path: Path) -> object:
        """Called on every worker when a checkpoint is complete, a few steps after `step`."""


class Improvement:
    """Compares the values of a metric: whether one is better than another."""

    def __init__(self, metric: str, mode: str | None) -> None:
        """`mode`: "min" or "max"; None for the min of a loss."""
        if not isinstance(metric, str) or mode not in ("min", "max", None):
            raise LaunchError(
                f"the mode {mode!r} of metric {metric!r}",
                expected="the name of a metric, and 'min' or 'max'",
                fix="use 'min' for a loss, 'max' for an accuracy",
            )
        if mode is None and not metric.endswith("loss"):
            raise LaunchError(
                f"the best {metric!r} without a mode",
                expected="'max' if more is better, or 'min'",
                fix=f"EarlyStopping({metric!r}, mode='max'), or "
                f"CheckpointConfig(keep_best={metric!r}, best_mode='max')",
            )
        self.metric, self.mode = metric, mode or "min"

    def is_better(self, value: float, best: float | None, min_delta: float = 0.0) -> bool:
        """Whether `value` is better than the `best` so far by more than `min_delta`."""
        if not math.isfinite(value):
            return False
        gain = 0.0 if best is None else (best - value if self.mode == "min" else value - best)
        return best is None or gain > min_delta


class EarlyStopping(Callback):
    """Stops training if a metric has not become better in `patience` evaluations in a row.

    Better means by more than `min_delta`. A value that is not finite is not better.
    """

    def __init__(
        self,
        metric: str = "eval_loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str | None = None,
    ) -> None:
        """`mode`: whether the best is the "min" or the "max"; by default the min of a loss."""
        if not isinstance(patience, int) or patience < 1 or not min_delta >= 0:
            raise LaunchError(
                f"EarlyStopping(patience={patience!r}, min_delta={min_delta!r})",
                expected="a number of evaluations from 1 on, and a difference of 0 or more",
                fix="EarlyStopping(patience=3)",
            )
        self._improvement = Improvement(metric, mode)
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.best: float | None = None
        self.num_worse = 0  # evaluations since the best one

    def on_eval(self, step: int, values: Mapping[str, float]) -> object:
        if self._improvement.is_better(values[self.metric], self.best, self.min_delta):
            self.best, self.num_worse = values[self.metric], 0
            return None
        self.num_worse += 1
        if self.num_worse < self.patience:
            return None
        _logger.info(
            "%s has not improved for %d evaluations: training stops after step %d",
            *(self.metric, self.num_worse, step),
        )
        return STOP


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def call_hooks(callbacks: Iterable[Any], hook: str, *args: Any) -> bool:
    """Call a hook of all callbacks; a plain function is an `on_step`. Return whether to stop."""
    wants_stop = False
    for callback in callbacks:
        is_function = callable(callback) and not any(hasattr(callback, name) for name in HOOKS)
        method = getattr(callback, hook, callback if is_function and hook == "on_step" else None)
        wants_stop |= method is not None and method(*args) is STOP
    return wants_stop


def count_tokens(microbatches: Iterable[Microbatch]) -> int | None:
    """Return the elements of `input_ids`, or of the first input of tokens; None without one."""
    count = 0
    for each in microbatches:
        inputs = (each.kwargs.get("input_ids"), *each.args, *each.kwargs.values())
        tokens = next((value for value in inputs if _is_tokens(value)), None)
        if tokens is None:
            return None
        count += tokens.numel()
    return count


def _is_tokens(value: object) -> bool:
    integers = torch.int64, torch.int32
    return isinstance(value, Tensor) and value.dtype in integers and value.dim() == 2


class PeakMemory:
    """The most memory that this worker has used; read now and then."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._value, self._next_read = device, 0, 0.0

    def read(self, now: Seconds) -> Bytes:
        """`now`: of time.monotonic()."""
        if now >= self._next_read:
            self._next_read = now + _MEMORY_INTERVAL
            if self._device.type == "cuda":
                self._value = torch.cuda.max_memory_allocated(self._device)
            else:
                self._value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self._value


class Measured(msgspec.Struct):
    """The numbers of one worker in one step; all workers have the same fields."""

    step: float
    stage: float
    pipeline: float
    num_samples: float
    num_tokens: float  # nan without tokens, and except on first stages
    seconds: Seconds
    waited: Seconds
    peak_memory: float
    wants_stop: float = 0.0
    loss: float = 0.0  # the mean over `num_labels`, which is 0 except on last stages
    num_labels: float = 0.0
    grad_squares: float = 0.0
    learning_rate: float = 0.0
    loss_scale: float = 0.0  # 0 for none


_numbers = msgspec.structs.astuple
_row = struct.Struct(f"{len(Measured.__struct_fields__)}d")


class MeasuredStep:
    """One step of this worker; its numbers are read later: a GPU may still compute them."""

    def __init__(
        self,
        measured: Measured,
        losses: Sequence[Tensor],
        counts: Sequence[Count],
        grad_squares: Tensor | float,
        learning_rate: Tensor | float,
        loss_scale: Tensor | None,
        *,
        number: int,
        start: Seconds,
        end: Seconds,
    ) -> None:
        """`number` counts its steps; `start` is of time.perf_counter(), `end` of monotonic()."""
        self.measured, self.number, self.start, self.end = measured, number, start, end
        self._num_losses, self._is_read = len(losses), False
        if isinstance(learning_rate, Tensor):  # which the scheduler changes in place
            learning_rate = learning_rate.clone()
        scale = 0.0 if loss_scale is None else loss_scale
        values = (*losses, *(counts if losses else ()), grad_squares, learning_rate, scale)
        self._numbers = HostCopy(values)

    def read(self) -> Measured:
        """Wait for the numbers and return them.

        Kernels of NCCL may wait for a lost worker meanwhile, until their group's timeout ends them:
        with several workers the thread of `MetricGather` calls this, which bounds it.
        """
        if not self._is_read:
            *numbers, squares, rate, scale = self._numbers.read()
            total = weighted = 0.0
            for number in range(self._num_losses):
                if count := numbers[self._num_losses + number]:  # the loss of no label is nan
                    total += count
                    weighted += numbers[number] * count
            self.measured.num_labels = total
            self.measured.loss = weighted / total if total else 0.0
            self.measured.grad_squares, self.measured.learning_rate = squares, rate
            self.measured.loss_scale = scale
            self._is_read = True
        return self.measured

    def own(self) -> WorkerStep:
        found = self.read()
        return WorkerStep(
            num_samples=int(found.num_samples),
            loss=found.loss if found.num_labels else None,
            num_labels=found.num_labels,
            seconds=found.seconds,
            end=self.end,
            peak_memory=int(found.peak_memory),
        )


class MetricGather:
    """Gathers the numbers of some workers in the background; made by all of them together."""

    def __init__(
        self, ranks: Sequence[int], *, timeout: Seconds, store: JobStore | None = None, name: str
    ) -> None:
        """Over gloo, or through `store` if not all workers may reach one another; `name` is unique.

        Nothing else uses the store. `start` bounds the waits for the workers' steps.
        """
        self._timeout, self._store, self._name = timeout, store, name
        self._ranks, self._num_gathers, self._num_done = tuple(ranks), 0, 0
        self._group: dist.ProcessGroup | None = None
        self._is_closed = False
        if store is not None:
            store.check = self._check_open
        else:
            self._group = new_gloo_group(ranks, _WHAT, timeout=timeout)
            set_timeout(self._group, step_timeout(timeout, 0))  # `start` bounds each wait
        self._rank = self._ranks.index(dist.get_rank())
        # One gather at a time. For so few numbers `struct` takes less time than numpy or torch.
        self._num_ranks = len(ranks)
        self._empty = bytes(STEPS_TOGETHER * len(ranks) * _row.size)
        self._rows = bytearray(self._empty)  # a row of each worker, step by step
        self._tensor = torch.frombuffer(self._rows, dtype=torch.float64).view(STEPS_TOGETHER, -1)
        # Waits for the GPU and for the others; at exit it ends a gather that waits. The training
        # thread would wait for the interpreter lock, which other threads want after a step, too.
        groups = [] if self._group is None else [self._group]
        self._thread = CommThread(groups, timeout=timeout)

    def start(self, steps: "Sequence[MeasuredStep]") -> Callable[[], list[list[Measured]]]:
        """Gather some steps, as many in all workers, at most `STEPS_TOGETHER`.

        Return a function that waits for the numbers of all workers, by step; it raises PeerError.
        """
        started = self._thread.start(lambda: self._gather(steps))
        timeout = step_timeout(self._timeout, self._num_gathers)
        self._num_gathers += 1

        def wait() -> list[list[Measured]]:
            try:
                found: list[list[Measured]] = started.future.result(timeout)
            except TimeoutError:
                cause = "it is alive, but has not ended its step"
                raise PeerError(
                    "another worker", action=f"gathering {_WHAT}", waited=timeout, cause=cause
                ) from None
            return found

        return wait

    def close(self) -> None:
        self._is_closed = True
        self._thread.close()

    def _check_open(self) -> None:
        if self._is_closed:
            cause = "closed on this worker"
            raise PeerError("another worker", action=f"gathering {_WHAT}", waited=0.0, cause=cause)

    def _gather(self, steps: "Sequence[MeasuredStep]") -> list[list[Measured]]:
        own = [_row.pack(*_numbers(step.read())) for step in steps]
        if self._store is not None:
            gathered = self._through_store(self._store, b"".join(own))
            by_worker = [list(_row.iter_unpack(each)) for each in gathered]
            return [[Measured(*rows[i]) for rows in by_worker] for i in range(len(steps))]
        assert self._group is not None, "otherwise it has a store"
        # A sum of rows, of which each worker has one: gloo starts it faster than an all-gather.
        self._rows[:] = self._empty
        for number, row in enumerate(own):
            offset = (number * self._num_ranks + self._rank) * _row.size
            self._rows[offset : offset + _row.size] = row
        with peer_errors("another worker", f"gathering {_WHAT}"):
            current_epoch().wait(self._group.allreduce([self._tensor[: len(steps)]]).wait)
        rows = [Measured(*row) for row in _row.iter_unpack(self._rows)]
        size = self._num_ranks
        return [rows[size * i : size * (i + 1)] for i in range(len(steps))]

    def _through_store(self, store: JobStore, own: bytes) -> list[bytes]:
        """Return what all workers pass, by the leader: so each reads two values, and not all."""
        members, number = Members(self._ranks), self._num_done
        rows, all_rows = (f"{self._name}/{what}" for what in ("rows", "all rows"))
        found = store.gather_object(f"{rows} {number}", own, members)
        is_leader = store.rank == members.leader
        if is_leader and number:  # all have read it, or would not have passed their next rows
            store.delete(f"{all_rows} {number - 1}", members)
        found = store.broadcast_object(f"{all_rows} {number}", found, members)
        if not is_leader:
            store.delete(f"{rows} {number}", members)
        self._num_done += 1
        return found


class StepMetrics:
    """The metrics of one worker's steps in one phase: `start` after a step, `finish` one later.

    Nobody reads them at once without callbacks: then some steps are gathered together, and those of
    a quarter of a second reported together, which takes much less time than each for itself, while
    caches are full of tensors.
    """

    def __init__(
        self, gather: MetricGather | None, *, num_together: int, is_late: bool, may_defer: bool
    ) -> None:
        """`gather`: of the workers in lockstep, None for one. `is_late`: `finish` would wait.

        `num_together` steps are gathered at once, in all workers alike; reports of a worker whose
        `may_defer` wait.
        """
        self._gather, self.is_late, self.is_gathered = gather, is_late, gather is not None
        self._num_together = num_together
        self._may_defer, self._next_report, self._was_finite = may_defer, 0.0, True
        self._steps: list[MeasuredStep] = []  # not gathered yet
        self._started: list[MeasuredStep] = []
        self._wait: Callable[[], list[list[Measured]]] | None = None
        self._found: list[tuple[MeasuredStep, list[Measured]]] = []  # not reported
        self.is_stop_wanted = False  # by a callback of any worker in lockstep
        self.is_abandoned = False  # what is reported last lacks the numbers of other workers

    def start(self, step: MeasuredStep) -> None:
        self._steps.append(step)
        if len(self._steps) == self._num_together:
            self._start_gather()

    def finish(self, *, is_last: bool = False) -> bool:
        """Wait for the numbers whose gather has started; return whether to report now.

        `is_last`: for those of all steps, in all workers alike.
        """
        is_due = self._finish()
        if is_last and self._steps:
            self._start_gather()
            is_due |= self._finish()
        return is_due

    def _start_gather(self) -> None:
        self._started, self._steps = self._steps, []
        if self._gather is not None:
            self._wait = self._gather.start(self._started)

    def _finish(self) -> bool:
        if not (steps := self._started):
            return False
        is_finite, was_finite = True, self._was_finite
        gathered = [[step.read()] for step in steps] if self._wait is None else self._wait()
        self._started = []  # not before: after a failure `abandon` reports them
        for step, found in zip(steps, gathered, strict=True):
            self._found.append((step, found))
            is_finite &= math.isfinite(sum([each.loss + each.grad_squares for each in found]))
            self.is_stop_wanted |= any(each.wants_stop for each in found)
        self._was_finite = is_finite
        is_early = steps[-1].end < self._next_report
        return not (self._may_defer and is_finite and was_finite and is_early)

    def abandon(self, last: MeasuredStep | None) -> None:
        """After a failure: report steps that were not gathered with this worker's numbers alone.

        `last`: the last step, if its gather has not started.
        """
        self.is_abandoned = True
        steps = [*self._started, *self._steps, *([] if last is None else [last])]
        self._started, self._steps, self._wait = [], [], None
        self._found += [(step, [step.read()]) for step in steps]

    def pop(self) -> list[tuple[MeasuredStep, StepInfo]]:
        """Return what is not reported yet."""
        found, self._found = self._found, []
        if found:
            self._next_report = found[-1][0].end + _REPORT_INTERVAL
        return [(step, summarize(workers, step.own())) for step, workers in found]


def summarize(workers: Sequence[Measured], own: WorkerStep) -> StepInfo:
    """Combine the numbers of all stages of some pipelines."""
    steps = {each.step for each in workers}
    assert len(steps) == 1, f"workers in lockstep gather the steps {sorted(steps)}"
    by_pipeline: dict[float, list[Measured]] = {}
    for each in workers:
        by_pipeline.setdefault(each.pipeline, []).append(each)
    pipelines = tuple(_pipeline_step(stages) for stages in by_pipeline.values())
    first_stages = [each for each in workers if each.stage == 0]
    num_tokens = sum(each.num_tokens for each in first_stages)
    return StepInfo(
        step=int(workers[0].step),
        **_mean_loss(pipelines),
        num_samples=sum(each.num_samples for each in pipelines),
        num_tokens=None if math.isnan(num_tokens) else int(num_tokens),
        learning_rate=workers[0].learning_rate,
        grad_norm=math.sqrt(sum(each.grad_squares for each in workers) / len(pipelines)),
        loss_scale=workers[0].loss_scale or None,
        seconds=max(each.seconds for each in pipelines),
        peak_memory=int(max(each.peak_memory for each in workers)),
        pipelines=pipelines,
        own=own,
    )


def _pipeline_step(stages: Sequence[Measured]) -> PipelineStep:
    first, last = stages[0], stages[-1]  # in the order of ranks
    return PipelineStep(
        pipeline=int(first.pipeline),
        num_samples=int(first.num_samples),
        loss=last.loss if last.num_labels else None,
        num_labels=last.num_labels,
        seconds=first.seconds,
        waited=first.waited,
    )


def _mean_loss(pipelines: Sequence[PipelineStep]) -> dict[str, Any]:
    labelled = [each for each in pipelines if each.loss is not None]
    total = sum(each.num_labels for each in labelled)
    if len(labelled) == 1:
        return {"loss": labelled[0].loss, "num_labels": total}
    mean = sum((each.loss or 0.0) * each.num_labels for each in labelled)
    return {"loss": mean / total if labelled else None, "num_labels": total}


def combine(latest: Sequence[StepInfo]) -> StepInfo:
    """Combine the latest metrics of single pipelines in groups; the first is this worker's."""
    pipelines = tuple(each for info in latest for each in info.pipelines)
    num_tokens = [info.num_tokens for info in latest if info.num_tokens is not None]
    return msgspec.structs.replace(
        latest[0],
        step=max(info.step for info in latest),
        **_mean_loss(pipelines),
        num_samples=sum(info.num_samples for info in latest),
        num_tokens=sum(num_tokens) if len(num_tokens) == len(latest) else None,
        grad_norm=math.sqrt(sum(info.grad_norm * info.grad_norm for info in latest) / len(latest)),
        seconds=max(info.seconds for info in latest),
        peak_memory=max(info.peak_memory for info in latest),
        pipelines=pipelines,
    )


class GroupMetrics:
    """In groups, on first stages: publishes the metrics of this pipeline twice a second.

    The leader reads those of the others, and whether one of them wants to stop.
    """

    def __init__(self, name: str, store: JobStore, first_stages: Members) -> None:
        """`store`: of this object alone; its thread uses it."""
        self._name, self._store, self._first_stages = name, store, first_stages
        self._stop_name = f"{name}, stop"
        self._is_leader = store.rank == first_stages.leader
        self._latest: StepInfo | None = None
        self._others: dict[int, StepInfo] = {}  # by rank, on the leader
        self.why_stop = ""  # a pipeline wants to stop
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="metrics", daemon=True)
        self._thread.start()

    def update(self, info: StepInfo) -> None:
        self._latest = info

    def request_stop(self, why: str) -> None:
        self.why_stop = self.why_stop or why

    def combined(self, lost: Iterable[int]) -> StepInfo | None:
        """On the leader: the latest metrics of all pipelines, without the lost ones."""
        gone = set(lost)
        found = [info for info in (self._latest, *self._others.values()) if info is not None]
        left = [info for info in found if info.pipelines[0].pipeline not in gone]
        return combine(left) if left else None

    def stop(self) -> None:
        """End the thread; all call it before `delete`."""
        self._closing.set()
        self._thread.join(_CLOSE_TIMEOUT)

    def announce_stop(self) -> None:
        """Publish that this pipeline wants to stop, if it does; in the thread, or after `stop`."""
        if self.why_stop:
            self._store.set_once(self._stop_name, self.why_stop, self._first_stages)

    def read_stop(self) -> str:
        """On the leader: return why any pipeline wants to stop; in the thread, or after `stop`."""
        self.request_stop(self._store.peek(self._stop_name, self._first_stages) or "")
        return self.why_stop

    def delete(self) -> None:
        """Delete what this worker has published, which nobody reads any more."""
        with peer_errors("the job's store", f"deleting {_WHAT}"):
            self._store.delete(self._name, self._first_stages)
            if self._is_leader:
                self._store.delete_once(self._stop_name, self._first_stages)

    def _exchange(self) -> None:
        published, has_announced = None, False
        try:
            while not self._closing.wait(_PUBLISH_INTERVAL):
                info = self._latest
                if info is not None and info is not published and not self._is_leader:
                    self._publish(info)
                    published = info
                if self.why_stop and not has_announced:
                    self.announce_stop()
                    has_announced = True
                if self._is_leader:
                    self._read_others()
                    self.read_stop()
        except (RuntimeError, UserError):  # the store is lost: training fails by itself
            pass

    def _publish(self, info: StepInfo) -> None:
        self._store.publish(self._name, info, self._first_stages, as_type=StepInfo)

    def _read_others(self) -> None:
        for rank in self._first_stages.ranks[1:]:
            if self._store.is_published(self._name, rank, self._first_stages):
                read: Callable[..., StepInfo] = self._store.receive
                self._others[rank] = read(self._name, rank, self._first_stages, as_type=StepInfo)

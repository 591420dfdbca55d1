"""The steps of one worker: acquire samples, run the pipeline, update, synchronise, record.

In an evaluation each pipeline computes the loss of its share of a dataset, without training.
"""

import struct
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.data.loader import LoadedBatch
from polyrhythm.run.data.prefetch import PredictedRanges, resolved_ranges
from polyrhythm.run.pipeline.batch import EndOfDataError
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.sampler import BatchSampler, BatchSlice
from polyrhythm.run.trainer.sync_strategy import NoSync
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.sync.dispatch import Ranges
from polyrhythm.sync.replay import StepTiming
from polyrhythm.types import Seconds

_MIN_COMPUTE: Seconds = 1e-6  # clock differences may yield 0 or less


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The result of one step of a worker, as passed to callbacks."""

    step: int  # the global step, from 0
    num_samples: int  # this pipeline's share of the step
    loss: float | None  # their mean loss; None except on the last stage
    seconds: Seconds


class WeightedLoss:
    """The user's loss, multiplied by `weight`."""

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self._loss_fn, self.weight = loss_fn, 1.0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = self._loss_fn(*args, **kwargs)
        return loss if self.weight == 1.0 else loss * self.weight


@dataclass(slots=True, kw_only=True)
class StepLoop:
    pipeline: Pipeline
    strategy: NoSync
    sampler: BatchSampler
    load: Callable[[Ranges, PredictedRanges], LoadedBatch]  # ranges now, and probably next
    loss: WeightedLoss
    lr_scheduler: LRScheduler | None
    precision: Callable[[torch.device], AbstractContextManager[object]]
    log: EventLog | None
    callbacks: tuple[Callable[[StepEnd], None], ...]
    save_if_due: Callable[[int], None]  # called with the number of global steps done
    may_start_step: Callable[[], bool]  # called on the first stage before each step
    on_step_timing: Callable[[StepTiming], None]  # called on the first stage after each step
    is_over: bool = False

    def run(self, max_steps: int | None = None) -> list[StepEnd]:
        """Run up to `max_steps` steps; stop early when the samples run out."""
        ends = list[StepEnd]()
        while (max_steps is None or len(ends) < max_steps) and (end := self._step()) is not None:
            ends.append(end)
        return ends

    def _step(self) -> StepEnd | None:
        start, losses = time.perf_counter(), list[Tensor]()
        with self.precision(self.pipeline.device):
            batch_slice = (
                self._run_first_stage(losses)
                if self.pipeline.is_first
                else self._run_later_stage(losses)
            )
        if batch_slice is None:
            self.is_over = True
            return None
        self.strategy.update(self.sampler.acknowledge)
        self.advance_lr_scheduler(batch_slice.step + 1)
        loss = None
        if losses:
            weighted = zip(losses, self.pipeline.sizes, strict=True)
            total = sum(each.item() * size for each, size in weighted)
            loss = total / batch_slice.num_samples / batch_slice.weight
        end = StepEnd(
            step=batch_slice.step,
            num_samples=batch_slice.num_samples,
            loss=loss,
            seconds=time.perf_counter() - start,
        )
        if self.pipeline.is_first:
            self.on_step_timing(self._step_timing(end.seconds))
        self._record(end, start)
        self.save_if_due(batch_slice.step + 1)
        for callback in self.callbacks:
            callback(end)
        return end

    def _step_timing(self, seconds: Seconds) -> StepTiming:
        averaged = self.strategy.pop_timings()
        return StepTiming(
            compute=max(seconds - averaged.waited, _MIN_COMPUTE),
            waited=averaged.waited,
            averaging=averaged.exchange,
            num_microbatches=len(self.pipeline.sizes),
            num_members=averaged.num_members,
        )

    def _run_first_stage(self, losses: list[Tensor]) -> BatchSlice | None:
        """Run a batch on the first stage, which may also be the last."""
        pipeline = self.pipeline
        batch_slice = self.sampler.next() if self.may_start_step() else None
        if batch_slice is None:
            pipeline.end_batches()
            return None
        next_ranges = self.sampler.peek()
        self.loss.weight = batch_slice.weight
        batch = self.load(batch_slice.ranges, next_ranges)
        arguments, keywords = as_arguments(batch.inputs)
        pipeline.step(
            *arguments,
            target=batch.target,
            losses=losses,
            return_outputs=False,
            metadata=encode_slice(batch_slice, resolved_ranges(next_ranges)),
            **keywords,
        )
        return batch_slice

    def _run_later_stage(self, losses: list[Tensor]) -> BatchSlice | None:
        """Run a batch on a later stage, which receives its slice in the batch header."""

        def target(metadata: tuple[int, ...]) -> Any:
            batch_slice, next_ranges = decode_slice(metadata)
            self.loss.weight = batch_slice.weight
            return self.load(batch_slice.ranges, next_ranges).target

        try:
            self.pipeline.step(
                target=target if self.pipeline.is_last else None,
                losses=losses,
                return_outputs=False,
            )
        except EndOfDataError:
            return None
        return decode_slice(self.pipeline.metadata)[0]

    def advance_lr_scheduler(self, step: int) -> None:
        """Advance to the global step; this pipeline may compute only some of the steps."""
        if self.lr_scheduler is not None:
            for _ in range(self.lr_scheduler.last_epoch, step):
                self.lr_scheduler.step()

    def lr_state(self) -> dict[str, Any] | None:
        """Return the state of the learning rate scheduler."""
        return None if self.lr_scheduler is None else self.lr_scheduler.state_dict()

    def _record(self, end: StepEnd, start: Seconds) -> None:
        if self.log is not None:
            values: dict[str, float | int] = {"global_step": end.step, "samples": end.num_samples}
            if end.loss is not None:
                values["loss"] = end.loss
            step = self.pipeline.num_steps - 1  # the number that action events carry
            self.log.write("step", start=self.log.at(start), step=step, values=values)


def evaluate(
    pipeline: Pipeline,
    load: Callable[[Ranges], LoadedBatch],
    share: range,  # this pipeline's samples
    batch_size: int,
) -> float:
    """Return the mean loss over all pipelines' shares; every worker calls it and gets it."""
    was_training = pipeline.module.training
    pipeline.module.eval()
    try:
        totals = _own_share(pipeline, load, share, batch_size)
    finally:
        pipeline.module.train(was_training)
    if dist.is_initialized():
        with peer_errors("another worker", "evaluating"):
            dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def _own_share(
    pipeline: Pipeline, load: Callable[[Ranges], LoadedBatch], share: range, batch_size: int
) -> Tensor:
    """Return the sum of losses and the number of samples; zeros except on the last stage."""
    totals = torch.zeros(2, dtype=torch.float64)

    def count(losses: list[Tensor]) -> None:
        for loss, size in zip(losses, pipeline.sizes if losses else (), strict=True):
            totals.add_(torch.tensor([loss.item() * size, size], dtype=torch.float64))

    def target(metadata: tuple[int, ...]) -> Any:
        return load(((metadata[0], metadata[1]),)).target

    for start in range(share.start, share.stop, batch_size) if pipeline.is_first else ():
        bounds, losses = (start, min(start + batch_size, share.stop)), list[Tensor]()
        batch = load((bounds,))
        arguments, keywords = as_arguments(batch.inputs)
        pipeline.eval(
            *arguments,
            target=batch.target,
            losses=losses,
            return_outputs=False,
            metadata=bounds,
            **keywords,
        )
        count(losses)
    if pipeline.is_first:
        pipeline.end_batches()
        return totals
    while True:
        losses = []
        try:
            pipeline.eval(
                target=target if pipeline.is_last else None, losses=losses, return_outputs=False
            )
        except EndOfDataError:
            return totals
        count(losses)


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn a dataset's inputs (one tensor, several, or several by name) into arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def encode_slice(batch_slice: BatchSlice, next_ranges: Ranges) -> tuple[int, ...]:
    """Encode a slice, and the next ranges if known, as integers for the batch header."""
    (weight,) = struct.unpack("<q", struct.pack("<d", batch_slice.weight))
    bounds = (bound for pair in (*batch_slice.ranges, *next_ranges) for bound in pair)
    return (batch_slice.step, weight, len(batch_slice.ranges), *bounds)


def decode_slice(metadata: tuple[int, ...]) -> tuple[BatchSlice, Ranges]:
    step, packed_weight, num_ranges, *bounds = metadata
    (weight,) = struct.unpack("<d", struct.pack("<q", packed_weight))
    ranges = tuple(zip(bounds[::2], bounds[1::2], strict=True))
    return BatchSlice(step, ranges[:num_ranges], weight), ranges[num_ranges:]

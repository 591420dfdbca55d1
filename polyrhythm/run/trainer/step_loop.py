"""The steps of one worker: take samples, run the pipeline, update and keep together, record."""

import struct
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from polyrhythm.events import EventLog
from polyrhythm.run.data.loader import LoadedBatch
from polyrhythm.run.data.prefetch import PredictedRanges, resolved_ranges
from polyrhythm.run.pipeline.batch import EndOfDataError
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.sampler import BatchSampler, BatchSlice
from polyrhythm.run.trainer.sync_strategy import NoSync
from polyrhythm.sync.dispatch import Ranges
from polyrhythm.sync.replay import StepTiming
from polyrhythm.types import Seconds

_SHORTEST: Seconds = 1e-6  # computing takes some time, whatever clocks say


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """What callbacks hear after each step of a worker."""

    step: int  # the global one, from 0
    num_samples: int  # of this pipeline in it
    loss: float | None  # their mean loss; on the last stage
    seconds: Seconds


class WeightedLoss:
    """The user's loss, counted by `weight`."""

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
    load: Callable[
        [Ranges, PredictedRanges], LoadedBatch
    ]  # some positions, and then perhaps others
    loss: WeightedLoss
    lr_scheduler: LRScheduler | None
    precision: Callable[[torch.device], AbstractContextManager[object]]
    log: EventLog | None
    callbacks: tuple[Callable[[StepEnd], None], ...]
    save_if_due: Callable[[int], None]  # called with how many global steps are made
    may_start_step: Callable[[], bool]  # asked on the first stage, before each step
    on_step_timing: Callable[[StepTiming], None]  # told there what each step took
    is_over: bool = False

    def run(self, max_steps: int | None = None) -> list[StepEnd]:
        """So many steps of this worker, or until it is over, which it is without samples."""
        ends = list[StepEnd]()
        while (max_steps is None or len(ends) < max_steps) and (end := self._step()) is not None:
            ends.append(end)
        return ends

    def _step(self) -> StepEnd | None:
        began, losses = time.perf_counter(), list[Tensor]()
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
            seconds=time.perf_counter() - began,
        )
        if self.pipeline.is_first:
            self.on_step_timing(self._step_timing(end.seconds))
        self._record(end, began)
        self.save_if_due(batch_slice.step + 1)
        for callback in self.callbacks:
            callback(end)
        return end

    def _step_timing(self, seconds: Seconds) -> StepTiming:
        averaged = self.strategy.averaged()
        return StepTiming(
            compute=max(seconds - averaged.waited, _SHORTEST),
            waited=averaged.waited,
            averaging=averaged.exchange,
            num_microbatches=len(self.pipeline.sizes),
            num_members=averaged.num_members,
        )

    def _run_first_stage(self, losses: list[Tensor]) -> BatchSlice | None:
        """A batch on the first stage, which may be the last one, too."""
        pipeline, batch_slice = (
            self.pipeline,
            self.sampler.next() if self.may_start_step() else None,
        )
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
        """A batch on another stage, which hears of it from the first one."""

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
        """Learning rates follow global steps, of which this pipeline may make some or all."""
        if self.lr_scheduler is not None:
            for _ in range(self.lr_scheduler.last_epoch, step):
                self.lr_scheduler.step()

    def lr_state(self) -> dict[str, Any] | None:
        """The state of their schedule, to go on from."""
        return None if self.lr_scheduler is None else self.lr_scheduler.state_dict()

    def _record(self, end: StepEnd, began: Seconds) -> None:
        if self.log is not None:
            values: dict[str, float | int] = {"global_step": end.step, "samples": end.num_samples}
            if end.loss is not None:
                values["loss"] = end.loss
            step = self.pipeline.num_steps - 1  # as its actions are counted
            self.log.write("step", start=self.log.at(began), step=step, values=values)


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called with what a dataset gives: a tensor, several, or several by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def encode_slice(batch_slice: BatchSlice, next_ranges: Ranges) -> tuple[int, ...]:
    """As whole numbers, for the other stages; with the samples that will come next, if known."""
    (weight,) = struct.unpack("<q", struct.pack("<d", batch_slice.weight))
    ends = (end for ends in (*batch_slice.ranges, *next_ranges) for end in ends)
    return (batch_slice.step, weight, len(batch_slice.ranges), *ends)


def decode_slice(metadata: tuple[int, ...]) -> tuple[BatchSlice, Ranges]:
    step, weight, number, *ends = metadata
    (fraction,) = struct.unpack("<d", struct.pack("<q", weight))
    ranges = tuple(zip(ends[::2], ends[1::2], strict=True))
    return BatchSlice(step, ranges[:number], fraction), ranges[number:]

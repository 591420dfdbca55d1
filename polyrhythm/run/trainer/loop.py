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
from polyrhythm.run.data.loading import Batch
from polyrhythm.run.data.prefetch import Guess, known
from polyrhythm.run.pipeline.batch import NoMoreBatchesError
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.dealing import Dealer, Dealt
from polyrhythm.run.trainer.together import Alone
from polyrhythm.sync.dispenser import Ranges
from polyrhythm.sync.foreseen import Took
from polyrhythm.types import Seconds

_SHORTEST: Seconds = 1e-6  # computing takes some time, whatever clocks say


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """What callbacks hear after each step of a worker."""

    step: int  # the global one, from 0
    num_samples: int  # of this pipeline in it
    loss: float | None  # their mean loss; on the last stage
    seconds: Seconds


class Loss:
    """The user's loss, counted by `weight`."""

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self._loss_fn, self.weight = loss_fn, 1.0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = self._loss_fn(*args, **kwargs)
        return loss if self.weight == 1.0 else loss * self.weight


@dataclass(slots=True, kw_only=True)
class Loop:
    pipeline: Pipeline
    together: Alone
    dealer: Dealer
    load: Callable[[Ranges, Guess], Batch]  # some positions, and then perhaps others
    loss: Loss
    lr_scheduler: LRScheduler | None
    precision: Callable[[torch.device], AbstractContextManager[object]]
    log: EventLog | None
    callbacks: tuple[Callable[[StepEnd], None], ...]
    keep: Callable[[int], None]  # called with how many global steps are made
    may_begin: Callable[[], bool]  # asked on the first stage, before each step
    took: Callable[[Took], None]  # told there what each step took
    is_over: bool = False

    def run(self, most: int | None = None) -> list[StepEnd]:
        """So many steps of this worker, or until it is over, which it is without samples."""
        ends = list[StepEnd]()
        while (most is None or len(ends) < most) and (end := self._step()) is not None:
            ends.append(end)
        return ends

    def _step(self) -> StepEnd | None:
        began, losses = time.perf_counter(), list[Tensor]()
        with self.precision(self.pipeline.device):
            dealt = self._first(losses) if self.pipeline.is_first else self._later(losses)
        if dealt is None:
            self.is_over = True
            return None
        self.together.update(self.dealer.used)
        self.set_rates(dealt.step + 1)
        loss = None
        if losses:
            weighted = zip(losses, self.pipeline.sizes, strict=True)
            total = sum(each.item() * size for each, size in weighted)
            loss = total / dealt.num_samples / dealt.weight
        end = StepEnd(
            step=dealt.step,
            num_samples=dealt.num_samples,
            loss=loss,
            seconds=time.perf_counter() - began,
        )
        if self.pipeline.is_first:
            self.took(self._took(end.seconds))
        self._record(end, began)
        self.keep(dealt.step + 1)
        for callback in self.callbacks:
            callback(end)
        return end

    def _took(self, seconds: Seconds) -> Took:
        averaged = self.together.averaged()
        return Took(
            compute=max(seconds - averaged.waited, _SHORTEST),
            waited=averaged.waited,
            averaging=averaged.exchange,
            num_microbatches=len(self.pipeline.sizes),
            num_members=averaged.num_members,
        )

    def _first(self, losses: list[Tensor]) -> Dealt | None:
        """A batch on the first stage, which may be the last one, too."""
        pipeline, dealt = self.pipeline, self.dealer.next() if self.may_begin() else None
        if dealt is None:
            pipeline.end_batches()
            return None
        then = self.dealer.peek()
        self.loss.weight = dealt.weight
        batch = self.load(dealt.ranges, then)
        arguments, keywords = as_arguments(batch.inputs)
        pipeline.step(
            *arguments,
            target=batch.target,
            losses=losses,
            return_outputs=False,
            note=noted(dealt, known(then)),
            **keywords,
        )
        return dealt

    def _later(self, losses: list[Tensor]) -> Dealt | None:
        """A batch on another stage, which hears of it from the first one."""

        def target(note: tuple[int, ...]) -> Any:
            dealt, then = heard(note)
            self.loss.weight = dealt.weight
            return self.load(dealt.ranges, then).target

        try:
            self.pipeline.step(
                target=target if self.pipeline.is_last else None,
                losses=losses,
                return_outputs=False,
            )
        except NoMoreBatchesError:
            return None
        return heard(self.pipeline.note)[0]

    def set_rates(self, step: int) -> None:
        """Learning rates follow global steps, of which this pipeline may make some or all."""
        if self.lr_scheduler is not None:
            for _ in range(self.lr_scheduler.last_epoch, step):
                self.lr_scheduler.step()

    def rates(self) -> dict[str, Any] | None:
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


def noted(dealt: Dealt, then: Ranges) -> tuple[int, ...]:
    """As whole numbers, for the other stages; with the samples that will come next, if known."""
    (weight,) = struct.unpack("<q", struct.pack("<d", dealt.weight))
    ends = (end for ends in (*dealt.ranges, *then) for end in ends)
    return (dealt.step, weight, len(dealt.ranges), *ends)


def heard(note: tuple[int, ...]) -> tuple[Dealt, Ranges]:
    step, weight, number, *ends = note
    (fraction,) = struct.unpack("<d", struct.pack("<q", weight))
    ranges = tuple(zip(ends[::2], ends[1::2], strict=True))
    return Dealt(step, ranges[:number], fraction), ranges[number:]

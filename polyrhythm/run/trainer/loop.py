"""The steps of one worker: take samples, run the pipeline, update and keep together, record."""

import struct
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from polyrhythm.events import EventLog
from polyrhythm.run.data.loading import Batch
from polyrhythm.run.pipeline.batch import NoMoreBatchesError
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.dealing import Dealer, Dealt
from polyrhythm.run.trainer.together import Alone
from polyrhythm.sync.dispenser import Ranges
from polyrhythm.types import Seconds


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
    load: Callable[[Ranges], Batch]
    loss: Loss
    lr_scheduler: LRScheduler | None
    precision: Callable[[torch.device], AbstractContextManager[object]]
    log: EventLog | None
    callbacks: tuple[Callable[[StepEnd], None], ...]
    keep: Callable[[int], None]  # called with how many global steps are made
    ends: list[StepEnd] = field(default_factory=list)

    def run(self) -> list[StepEnd]:
        """Until there are no more samples; the steps that this worker has made."""
        while self._step():
            pass
        return self.ends

    def _step(self) -> bool:
        began, losses = time.perf_counter(), list[Tensor]()
        with self.precision(self.pipeline.device):
            dealt = self._first(losses) if self.pipeline.is_first else self._later(losses)
        if dealt is None:
            return False
        self.together.update(self.dealer.used)
        self._set_rates(dealt.step + 1)
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
        self.ends.append(end)
        self._record(end, began)
        for callback in self.callbacks:
            callback(end)
        self.keep(dealt.step + 1)
        return True

    def _first(self, losses: list[Tensor]) -> Dealt | None:
        """A batch on the first stage, which may be the last one, too."""
        pipeline, dealt = self.pipeline, self.dealer.next()
        if dealt is None:
            pipeline.end_batches()
            return None
        self.loss.weight = dealt.weight
        batch = self.load(dealt.ranges)
        arguments, keywords = as_arguments(batch.inputs)
        pipeline.step(
            *arguments,
            target=batch.target,
            losses=losses,
            return_outputs=False,
            note=noted(dealt),
            **keywords,
        )
        return dealt

    def _later(self, losses: list[Tensor]) -> Dealt | None:
        """A batch on another stage, which hears of it from the first one."""

        def target(note: tuple[int, ...]) -> Any:
            dealt = heard(note)
            self.loss.weight = dealt.weight
            return self.load(dealt.ranges).target

        try:
            self.pipeline.step(
                target=target if self.pipeline.is_last else None,
                losses=losses,
                return_outputs=False,
            )
        except NoMoreBatchesError:
            return None
        return heard(self.pipeline.note)

    def _set_rates(self, step: int) -> None:
        """Learning rates follow global steps, of which this pipeline may make some or all."""
        if self.lr_scheduler is not None:
            for _ in range(self.lr_scheduler.last_epoch, step):
                self.lr_scheduler.step()

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


def noted(dealt: Dealt) -> tuple[int, ...]:
    """As whole numbers, for the other stages."""
    (weight,) = struct.unpack("<q", struct.pack("<d", dealt.weight))
    return (dealt.step, weight, *(end for ends in dealt.ranges for end in ends))


def heard(note: tuple[int, ...]) -> Dealt:
    step, weight, *ends = note
    (fraction,) = struct.unpack("<d", struct.pack("<q", weight))
    return Dealt(step, tuple(zip(ends[::2], ends[1::2], strict=True)), fraction)

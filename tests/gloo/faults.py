"""Faults of one process of a Trainer's job: it is killed or stopped at a point of the protocol."""

import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.run.averaging.rounds import Averager
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.reduce_scatter import GlooCollectives
from polyrhythm.run.coordinator.epoch_client import EpochClient
from polyrhythm.run.trainer import checkpointer, trainer
from polyrhythm.run.trainer.elastic import ElasticJob
from polyrhythm.run.trainer.evaluate import Evaluator

_SEND_TIME = 0.1  # for a thread to send what is queued

Fault = Callable[[DistContext], Any]  # called in each process; may return a callback of `fit`


def end_this_process(how: signal.Signals) -> None:
    os.kill(os.getpid(), how)
    time.sleep(1.0)  # the signal may take effect later


def write_warnings(folder: Path) -> Fault:
    """Write the warnings of each process to a file; there is no fault."""

    def fault(ctx: DistContext) -> Any:
        handler = logging.FileHandler(folder / f"warnings{ctx.rank}.log")
        logging.getLogger("polyrhythm").addHandler(handler)

    return fault


def after_step(step: int, *ranks: int, how: signal.Signals = signal.SIGKILL) -> Fault:
    """End processes when they have the metrics of a step."""

    def fault(ctx: DistContext) -> Any:
        def callback(info: Any) -> None:
            if info.step == step:
                end_this_process(how)

        return callback if ctx.rank in ranks else None

    return fault


def after_own_steps(number: int, *ranks: int, how: signal.Signals = signal.SIGKILL) -> Fault:
    """End processes when they have the metrics of so many own steps: in groups these differ."""

    def fault(ctx: DistContext) -> Any:
        numbers = count(1)

        def callback(info: Any) -> None:
            if next(numbers) == number:
                end_this_process(how)

        return callback if ctx.rank in ranks else None

    return fault


def at_call(where: Any, name: str, number: int, *ranks: int, when: str = "before") -> Fault:
    """End processes in call `number` (from 0) of a method, before it, after it, or in its middle.

    In the middle is a moment after it was called, in another thread.
    """

    def fault(ctx: DistContext) -> None:
        if ctx.rank not in ranks:
            return
        original, num_calls = getattr(where, name), 0

        def patched(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls != number + 1:
                return original(*args, **kwargs)
            if when != "before":
                original(*args, **kwargs)
                time.sleep(_SEND_TIME * (when == "sent"))
            return end_this_process(signal.SIGKILL)

        setattr(where, name, patched)

    return fault


def out_of_memory(number: int, *ranks: int) -> Fault:
    """Let a forward find no memory: in call `number` (from 0) of a kind of layer."""

    def fault(ctx: DistContext) -> None:
        forward, numbers = nn.Tanh.forward, count()

        def patched(self: nn.Tanh, x: Tensor) -> Tensor:
            if ctx.rank in ranks and next(numbers) == number:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return forward(self, x)

        nn.Tanh.forward = patched

    return fault


def not_finite(number: int, *ranks: int) -> Fault:
    """Make activations, and so weights, nan: from call `number` (from 0) of a kind of layer on."""

    def fault(ctx: DistContext) -> None:
        forward, numbers = nn.Tanh.forward, count()

        def patched(self: nn.Tanh, x: Tensor) -> Tensor:
            is_bad = ctx.rank in ranks and next(numbers) >= number
            return forward(self, x) * (float("nan") if is_bad else 1.0)

        nn.Tanh.forward = patched

    return fault


before_vote = partial(at_call, EpochClient, "commit", 5)
after_vote = partial(at_call, EpochClient, "_submit", 7, when="sent")
after_commit = partial(at_call, EpochClient, "commit", 5, when="after")
during_exchange = partial(at_call, Averager, "_exchange", 5)
after_done = partial(at_call, Averager, "_exchange", 5, when="after")
during_reduce_scatter = partial(at_call, GlooCollectives, "reduce_scatter", 5)
during_all_gather = partial(at_call, GlooCollectives, "all_gather", 5)
during_evaluation = partial(at_call, Evaluator, "run", 1)
during_checkpoint = partial(at_call, checkpointer.Checkpointer, "_write", 1)
while_exchanging = partial(at_call, ElasticJob, "_exchange_states", 1)
while_joining = partial(at_call, trainer, "join_epoch", 1)
after_joining = partial(at_call, trainer, "join_epoch", 1, when="after")


def both(*faults: Fault) -> Fault:
    """Combine faults of different processes."""

    def fault(ctx: DistContext) -> Any:
        callbacks = [each(ctx) for each in faults]
        return next((each for each in callbacks if each is not None), None)

    return fault

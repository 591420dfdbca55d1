"""One process on the same batches, with nothing emulated: what the losses should be."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import torch

from benchmarks.endtoend.side import Assignment
from benchmarks.endtoend.task import SEED, model, optimizer, rates, texts
from benchmarks.words import word_of_each
from polyrhythm.processes import Child
from polyrhythm.run.data.loader import SampleLoader
from polyrhythm.run.data.reader import make_order
from polyrhythm.run.demo.gpt import next_byte_loss
from polyrhythm.types import Seconds

_PATIENCE: Seconds = 180.0
_NICE = 10  # the others keep time, and it need not


class Alone:
    """Trains in the background, in a fork, while its block lasts."""

    def __init__(self, told: Assignment) -> None:
        self._told = told

    def __enter__(self) -> Self:
        self._pipe, theirs = multiprocessing.Pipe()
        self._child = Child(lambda: _train(self._told, theirs))
        theirs.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.end()
        self._pipe.close()

    def losses(self) -> tuple[list[float], float]:
        """Of every step's batch, and of what is held out at the end."""
        (found,) = word_of_each([self._pipe], [self._child], "training alone", _PATIENCE)
        of_steps, held_out = found
        return of_steps, held_out


def _train(told: Assignment, boss: Connection) -> None:
    os.nice(_NICE)
    torch.set_num_threads(1)
    text, held_out = texts(told.num_held_out)
    module = model(told.num_layers)
    chosen = optimizer(module.parameters())
    rate, losses = rates(told.num_steps)(chosen), list[float]()
    samples = SampleLoader(text, make_order(text, seed=SEED, shuffle=True))
    for step in range(told.num_steps):
        batch = samples.load(((step * told.batch, (step + 1) * told.batch),))
        loss = next_byte_loss(module(batch.inputs), batch.target)
        loss.backward()  # type: ignore[no-untyped-call]
        chosen.step()
        chosen.zero_grad()
        rate.step()
        losses.append(loss.item())
    tests = SampleLoader(held_out, make_order(held_out, shuffle=False)).load(((0, len(held_out)),))
    with torch.no_grad():
        boss.send((losses, next_byte_loss(module(tests.inputs), tests.target).item()))

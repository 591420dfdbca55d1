"""The four hosts of the pipeline benchmark, driven from outside: one step at a time."""

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.pipeline.networks import HOSTS, Network, bursts
from benchmarks.pipeline.worker import Answer, Load, Order, work
from benchmarks.words import next_words
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.errors import LabError
from polyrhythm.lab.lab import Lab
from polyrhythm.types import Seconds

_PATIENCE: Seconds = 90.0  # for one step of the slowest side on the slowest network


class Stages:
    """A process per host, while a `with` block lasts."""

    def __init__(self, lab: Lab, load: Load, output_folder: Path) -> None:
        self._lab, self._load, self._folder = lab, load, output_folder
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        master = self._lab.address(HOSTS[0])
        for rank, host in enumerate(HOSTS):
            ours, theirs = multiprocessing.Pipe()
            self._pipes.append(ours)
            output = self._folder / f"{host}.log"
            place = (rank, len(HOSTS), master)
            self._lab.spawn(host, work, *place, self._load, theirs, output=output)
            theirs.close()
        self._answers(iter(()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            if error is None:
                pipe.send(None)
        if error is None:
            self._lab.wait(self._lab.children, timeout=10.0)
        for pipe in self._pipes:
            pipe.close()

    def set_network(self, network: Network, forward: Seconds) -> None:
        for change in network.changes(forward, self._load.message_bytes):
            self._lab.change(change)

    def step(self, order: Order, *, network: Network, seed: int) -> list[Answer]:
        """One step, an answer per stage; a bursty network is the same for the same `seed`."""
        changes: Iterator[LinkChange] = iter(())
        if network.bursty:
            drawn = bursts(order.forward, self._load.message_bytes, until=_PATIENCE, seed=seed)
            changes = iter(sorted(drawn, key=lambda change: change.at))
        for pipe in self._pipes:
            pipe.send(order)
        return self._answers(changes)

    def _answers(self, changes: Iterator[LinkChange]) -> list[Answer]:
        """Wait for all stages, and meanwhile change links at their times."""
        began = time.monotonic()
        answers: dict[int, Answer] = {}
        upcoming = next(changes, None)
        while len(answers) < len(self._pipes):
            now = time.monotonic() - began
            while upcoming is not None and upcoming.at <= now:
                self._lab.change(upcoming)
                upcoming = next(changes, None)
            if now > _PATIENCE:
                raise LabError(
                    f"a step took more than {_PATIENCE:g} s",
                    expected="one within it, on two idle cores",
                    fix="run the benchmark while the machine has nothing else to do",
                )
            wait = _PATIENCE if upcoming is None else upcoming.at - now
            silent = [rank for rank in range(len(self._pipes)) if rank not in answers]
            speakers = self._pipes, self._lab.children, silent
            answers.update(next_words(*speakers, "a step", min(wait, 1.0)))
        return [answers[rank] for rank in range(len(self._pipes))]

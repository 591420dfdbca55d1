"""The processes of a job, on the hosts of a lab or here, and who drives them: begin, turns, end."""

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.endtoend.side import Assignment, Done, Ended, Seat
from benchmarks.words import next_words, word_of_each
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.errors import LabError
from polyrhythm.lab.lab import Lab
from polyrhythm.processes import Child, end_all
from polyrhythm.types import Seconds

Work = Callable[[Assignment, Seat, Connection], None]
_LOOPBACK = "127.0.0.1"
_HEAD_START: Seconds = 0.1  # from the word to begin until all do
_LOOK: Seconds = 0.5  # at the clock, at least that often


@dataclass(slots=True, kw_only=True)
class Heard:
    """What the processes of a job have said since it began."""

    began: Seconds
    steps: list[Ended] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)

    @property
    def seconds(self) -> Seconds:
        """From the first step's beginning until the last one of everybody was over."""
        first = min(done.first for done in self.done)
        return max(done.moment for done in self.done) - first

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.num_samples / self.seconds

    @property
    def num_samples(self) -> int:
        return sum(end.num_samples for end in self.steps)


class Here:
    """This machine in place of a lab: its own network, and nothing emulated."""

    def spawn(
        self, host: str, function: Callable[..., object], *args: object, output: Path
    ) -> Child:
        return Child(partial(function, *args), output=output)

    def address(self, host: str) -> str:
        return _LOOPBACK

    def free_port(self) -> int:
        with socket.create_server((_LOOPBACK, 0)) as probe:
            port: int = probe.getsockname()[1]
        return port


class Crew:
    """Of one side; inside its block they run, and afterwards all are gone."""

    def __init__(
        self, hosts: Lab | Here, work: Work, told: Assignment, *, output: Path, port: int
    ) -> None:
        """`port` is where they meet, and names their logs in `output`: each crew has its own."""
        self._hosts, self._work, self._told = hosts, work, told
        self._output, self._port = output, port
        self._pipes: list[Connection] = []
        self._children: list[Child] = []
        self._heard = Heard(began=0.0)

    def __enter__(self) -> Self:
        try:
            for seat in self._seats():
                ours, theirs = multiprocessing.Pipe()
                self._pipes.append(ours)
                output = self._output / f"{self._port} {seat.rank}.log"
                work = self._work, self._told, seat, theirs
                self._children.append(self._hosts.spawn(seat.device, *work, output=output))
                theirs.close()
            word_of_each(self._pipes, self._children, "preparing", self._told.timeout)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def begin(self) -> None:
        """The first turn, or all there is to do."""
        self._heard = Heard(began=time.monotonic() + _HEAD_START)
        self._tell(self._heard.began)

    def go_on(self) -> None:
        """The next turn."""
        self._tell("go on")

    def follow(
        self,
        patience: Seconds,
        *,
        links: Iterable[LinkChange] = (),
        on_step: Callable[[Heard], None] = lambda _: None,
    ) -> Heard:
        """Until the turn or the job is over, while links change as on the job's clock.

        LabError if a process fails, or no step has ended for `patience`.
        """
        changes = iter(links)
        upcoming = next(changes, None)
        silent, last_word = set(range(len(self._pipes))), time.monotonic()
        while silent:
            now = time.monotonic() - self._heard.began
            upcoming = self._change_links(upcoming, changes, now)
            wait = _LOOK if upcoming is None else min(_LOOK, max(0.0, upcoming.at - now))
            words = next_words(self._pipes, self._children, silent, "training", wait)
            if any(isinstance(word, Ended) for word in words.values()):
                last_word = time.monotonic()
            if time.monotonic() - last_word > patience:
                raise LabError(
                    f"no step ended within {patience:g} s",
                    expected="one within it, on two idle cores",
                    fix="run the benchmark while the machine has nothing else to do",
                )
            for rank, word in words.items():
                self._take(rank, word, silent, on_step)
        return self._heard

    def _take(
        self, rank: int, word: Any, silent: set[int], on_step: Callable[[Heard], None]
    ) -> None:
        if isinstance(word, Ended):
            self._heard.steps.append(word)
            on_step(self._heard)
            return
        if isinstance(word, Done):
            self._heard.done.append(word)
        silent.discard(rank)  # its turn is over, or its job

    def _change_links(
        self, upcoming: LinkChange | None, changes: Iterator[LinkChange], now: Seconds
    ) -> LinkChange | None:
        while upcoming is not None and upcoming.at <= now:
            assert isinstance(self._hosts, Lab), "there are links to change"
            self._hosts.change(upcoming)
            upcoming = next(changes, None)
        return upcoming

    def _seats(self) -> list[Seat]:
        """In the order of ranks, which is that of the plan."""
        plan = self._told.plan
        devices = [device for pipeline in plan.pipelines for device in pipeline.devices]
        master, in_lab = self._hosts.address(devices[0]), isinstance(self._hosts, Lab)
        return [
            Seat(rank=rank, device=device, master=master, port=self._port, in_lab=in_lab)
            for rank, device in enumerate(devices)
        ]

    def _tell(self, word: object) -> None:
        for pipe in self._pipes:
            pipe.send(word)

    def _end(self) -> None:
        end_all(self._children)
        for pipe in self._pipes:
            pipe.close()

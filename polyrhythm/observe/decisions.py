"""What a scheduler decided: how its groups ended and why, who died or left, and when.

Times are seconds after the first worker had joined; the scheduler's clock is no clock of the day.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from polyrhythm.observe.groups import most_frequent
from polyrhythm.sync.protocol import Abort, Command, Commit, Dead, Event, Join, Leave, Skip
from polyrhythm.tables import print_line
from polyrhythm.types import Seconds, Worker

_HOW_LONG = re.compile(r" within \S+ s$")  # differs from one to the next, and says little
MAX_NAMED = 12  # who are named when they have left; those who died are named all

_Gone = tuple[Worker, Seconds]


@dataclass(slots=True, kw_only=True)
class Decisions:
    num_decisions: int = 0
    num_averaged: int = 0
    given_up: Counter[str] = field(default_factory=Counter)  # groups, by reason
    alone: Counter[str] = field(default_factory=Counter)  # steps without an average, by worker
    died: list[_Gone] = field(default_factory=list)
    left: list[_Gone] = field(default_factory=list)
    _ended: set[int] = field(default_factory=set)  # groups
    _skipped: dict[Worker, Skip] = field(default_factory=dict)
    _incarnations: dict[Worker, int] = field(default_factory=dict)  # of those who are here
    _began: Seconds | None = None

    @classmethod
    def of(cls, log: Iterable[tuple[Event, Sequence[Command]]]) -> "Decisions":
        decisions = cls()
        for event, commands in log:
            decisions.num_decisions += 1
            decisions._on_event(event)
            for command in commands:
                decisions._count(command)
        return decisions

    def show(self, console: Console, setup: str) -> None:
        """`setup` says what the scheduler was made of."""
        groups = f"{self.num_averaged:,} averaged, {self.given_up.total():,} given up"
        if self.given_up:
            groups += f": {most_frequent(self.given_up)}"
        rows = [("scheduler", f"{setup}: {self.num_decisions:,} decisions"), ("groups", groups)]
        if self.alone:
            missed = f"{self.alone.total():,} steps without the average that was due"
            rows.append(("alone", f"{missed}: {most_frequent(self.alone)}"))
        if self.died:
            rows.append(("died", _each(self.died)))
        if self.left:
            rows.append(
                ("left", _each(self.left) if len(self.left) <= MAX_NAMED else _all(self.left))
            )
        for name, shown in rows:
            print_line(console, f"{name:<11}{shown}")

    def _on_event(self, event: Event) -> None:
        if self._began is None:
            self._began = event.now
        after = event.now - self._began
        if isinstance(event, Join):
            incarnation = self._incarnations.get(event.worker, -1)
            if 0 <= incarnation < event.incarnation:  # it has died and nobody noticed
                self.died.append((event.worker, after))
            if incarnation < event.incarnation:
                self._incarnations[event.worker] = event.incarnation
                self._skipped.pop(event.worker, None)
        elif isinstance(event, Dead | Leave) and self._is_here(event.worker, event.incarnation):
            del self._incarnations[event.worker]
            (self.died if isinstance(event, Dead) else self.left).append((event.worker, after))

    def _is_here(self, worker: Worker, incarnation: int) -> bool:
        return self._incarnations.get(worker) == incarnation

    def _count(self, command: Command) -> None:
        """Once, though a worker that asks again is told again."""
        if isinstance(command, Commit | Abort) and command.gid not in self._ended:
            self._ended.add(command.gid)
            if isinstance(command, Commit):
                self.num_averaged += 1
            else:
                self.given_up[_HOW_LONG.sub(" in time", command.reason)] += 1
        elif isinstance(command, Skip) and self._skipped.get(command.worker) != command:
            self._skipped[command.worker] = command
            if command.failed:
                self.alone[str(command.worker)] += 1


def _each(gone: Sequence[_Gone]) -> str:
    return ", ".join(f"{worker} after {after:.1f} s" for worker, after in gone)


def _all(gone: Sequence[_Gone]) -> str:
    (first, from_), (last, until) = gone[0], gone[-1]
    return f"{len(gone):,} workers, from {first} after {from_:.1f} s to {last} after {until:.1f} s"

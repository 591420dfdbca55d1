"""Summarize a scheduler's decision log: group outcomes with reasons, workers that died or left.

Times are seconds after the first worker joined; the scheduler's clock is not wall-clock time.
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

_TIMEOUT_TEXT = re.compile(r" within \S+ s$")  # cut off, so that equal reasons are counted together
MAX_NAMED = 12  # workers that left and are listed by name; those that died are all listed

_Loss = tuple[Worker, Seconds]


@dataclass(slots=True, kw_only=True)
class Decisions:
    num_decisions: int = 0
    num_averaged: int = 0
    aborted: Counter[str] = field(default_factory=Counter)  # groups, by reason
    unaveraged: Counter[str] = field(default_factory=Counter)  # steps without an average, by worker
    died: list[_Loss] = field(default_factory=list)
    left: list[_Loss] = field(default_factory=list)
    _ended: set[int] = field(default_factory=set)  # groups
    _skipped: dict[Worker, Skip] = field(default_factory=dict)
    _incarnations: dict[Worker, int] = field(default_factory=dict)  # of present workers
    _start: Seconds | None = None

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
        """Print the counts; `setup` describes the scheduler."""
        groups = f"{self.num_averaged:,} averaged, {self.aborted.total():,} aborted"
        if self.aborted:
            groups += f": {most_frequent(self.aborted)}"
        rows = [("scheduler", f"{setup}: {self.num_decisions:,} decisions"), ("groups", groups)]
        if self.unaveraged:
            missed = f"{self.unaveraged.total():,} steps without the average that was due"
            rows.append(("missed", f"{missed}: {most_frequent(self.unaveraged)}"))
        if self.died:
            rows.append(("died", _list_all(self.died)))
        if self.left:
            to_text = _list_all if len(self.left) <= MAX_NAMED else _summarize
            rows.append(("left", to_text(self.left)))
        for name, shown in rows:
            print_line(console, f"{name:<11}{shown}")

    def _on_event(self, event: Event) -> None:
        if self._start is None:
            self._start = event.now
        after = event.now - self._start
        if isinstance(event, Join):
            incarnation = self._incarnations.get(event.worker, -1)
            if 0 <= incarnation < event.incarnation:  # died without a Dead event
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
        """Count a decision once, although the scheduler may resend its command."""
        if isinstance(command, Commit | Abort) and command.gid not in self._ended:
            self._ended.add(command.gid)
            if isinstance(command, Commit):
                self.num_averaged += 1
            else:
                self.aborted[_TIMEOUT_TEXT.sub(" in time", command.reason)] += 1
        elif isinstance(command, Skip) and self._skipped.get(command.worker) != command:
            self._skipped[command.worker] = command
            if command.failed:
                self.unaveraged[str(command.worker)] += 1


def _list_all(losses: Sequence[_Loss]) -> str:
    return ", ".join(f"{worker} after {after:.1f} s" for worker, after in losses)


def _summarize(losses: Sequence[_Loss]) -> str:
    (first, start), (last, end) = losses[0], losses[-1]
    return f"{len(losses):,} workers, from {first} after {start:.1f} s to {last} after {end:.1f} s"

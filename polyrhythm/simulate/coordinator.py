"""The coordinator in virtual time: the runtime's scheduler, with a latency to and from each worker.

What workers say arrives later, in the order of time; so do its answers. Its log, if it keeps one,
is that of a real coordinator.
"""

from collections.abc import Callable, Mapping
from typing import Any

from polyrhythm.errors import PolicyError
from polyrhythm.simulate.clock import Clock
from polyrhythm.sync.decision_log import DecisionLog
from polyrhythm.sync.messages import (
    Abort,
    Assign,
    Command,
    Commit,
    Event,
    Heal,
    Refuse,
    Skip,
    Timer,
)
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

Hear = Callable[[Worker, Assign | Commit | Abort | Skip | Heal], None]


class Coordinator:
    def __init__(
        self,
        setup: Setup,
        clock: Clock,
        latency: Mapping[Worker, tuple[Seconds, Seconds]],  # to it, and from it
        hear: Hear,
        log: DecisionLog | None = None,
    ) -> None:
        self.scheduler = setup.scheduler()
        self._clock, self._latency, self._hear, self._log = clock, latency, hear, log
        self._timer: Seconds = float("inf")  # the earliest that is on the clock

    def tell(self, worker: Worker, kind: Callable[..., Event], *given: Any) -> None:
        """A worker says something; it arrives a latency later."""
        there, _ = self._latency[worker]
        self._clock.at(self._clock.now + there, self._told, kind, worker, *given)

    def _told(self, kind: Callable[..., Event], *given: Any) -> None:
        self._step(kind(*given, now=self._clock.now))

    def _step(self, event: Event) -> None:
        commands = self.scheduler.step(event)
        if self._log is not None:
            self._log.add(event, commands)
        for command in commands:
            self._answer(command)
        timer = self.scheduler.next_timer()
        if timer < self._timer:
            self._timer = timer
            self._clock.at(timer, self._ring, timer, priority=1)

    def _answer(self, command: Command) -> None:
        if isinstance(command, Refuse):
            raise PolicyError(
                f"the scheduler refuses {command.worker}: {command.why}",
                expected="simulated workers that keep to the protocol",
                fix="report it, with the job that was simulated",
            )
        now, latency = self._clock.now, self._latency
        if isinstance(command, Assign | Commit | Abort):
            for member in command.members:
                self._clock.at(now + latency[member][1], self._hear, member, command)
        else:
            self._clock.at(now + latency[command.worker][1], self._hear, command.worker, command)

    def _ring(self, timer: Seconds) -> None:
        """A timer that was put off since is looked at again when it is due."""
        if timer != self._timer:
            return
        self._timer = float("inf")
        due = self.scheduler.next_timer()
        if due <= self._clock.now:
            self._step(Timer(now=self._clock.now))
        elif due < float("inf"):
            self._timer = due
            self._clock.at(due, self._ring, due, priority=1)

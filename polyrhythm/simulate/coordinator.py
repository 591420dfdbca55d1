"""The coordinator in virtual time: the runtime's scheduler, with a latency to and from each worker.

What workers say arrives later, in the order of time; so do its answers. Its log, if it keeps one,
is that of a real coordinator.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from polyrhythm.errors import PolicyError
from polyrhythm.simulate.clock import TRIES, Clock
from polyrhythm.sync.decision_log import DecisionLog
from polyrhythm.sync.messages import (
    Abort,
    Assign,
    Command,
    Commit,
    Dealt,
    Event,
    Heal,
    Refuse,
    Skip,
    Tallied,
    Timer,
)
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

_Said = TypeVar("_Said", bound=tuple[Any, ...])
Hear = Callable[[Worker, Assign | Commit | Abort | Skip | Heal], None]


class Coordinator:
    def __init__(
        self,
        setup: Setup,
        clock: Clock,
        hear: Hear,
        log: DecisionLog | None = None,
    ) -> None:
        self.scheduler = setup.scheduler()
        self._clock, self._hear, self._log = clock, hear, log
        self._there: dict[Worker, Seconds] = {}
        self._back: dict[Worker, Seconds] = {}
        self._timer: Seconds = float("inf")  # the earliest that is on the clock

    def set_latency(self, latency: Mapping[Worker, tuple[Seconds, Seconds]]) -> None:
        """Of a word of each worker to it, and from it, from now on."""
        self._there = {worker: there for worker, (there, _) in latency.items()}
        self._back = {worker: back for worker, (_, back) in latency.items()}

    def words(self, workers: Sequence[Worker]) -> Seconds:
        """Until all of them have its answer to what all of them say now."""
        there = max(self._there[worker] for worker in workers)
        return there + max(self._back[worker] for worker in workers)

    def tell(self, worker: Worker, kind: Callable[..., Event], *given: Any) -> None:
        """A worker says something; it arrives a latency later."""
        self._clock.at(self._clock.now + self._there[worker], self._told, kind, worker, *given)

    def tell_all(self, kind: Callable[..., Event], said: Sequence[tuple[Any, ...]]) -> None:
        """Several workers say the same at once; each says who it is first."""
        for latency, together in _by_latency(said, self._there).items():
            self._clock.at(self._clock.now + latency, self._told_all, kind, together)

    def _told_all(self, kind: Callable[..., Event], said: Sequence[tuple[Any, ...]]) -> None:
        for given in said:
            self._step(kind(*given, now=self._clock.now))

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
            self._clock.at(timer, self._ring, timer, priority=TRIES)

    def _answer(self, command: Command) -> None:
        if isinstance(command, Refuse):
            raise PolicyError(
                f"the scheduler refuses {command.worker}: {command.why}",
                expected="simulated workers that keep to the protocol",
                fix="report it, with the job that was simulated",
            )
        assert not isinstance(command, Dealt | Tallied), "simulated workers ask for no positions"
        if isinstance(command, Assign | Commit | Abort):
            members = [(member,) for member in command.members]
            for latency, together in _by_latency(members, self._back).items():
                self._clock.at(self._clock.now + latency, self._heard, together, command)
        else:
            latency = self._back[command.worker]
            self._clock.at(self._clock.now + latency, self._hear, command.worker, command)

    def _heard(self, members: Sequence[tuple[Worker]], command: Assign | Commit | Abort) -> None:
        for (member,) in members:
            self._hear(member, command)

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
            self._clock.at(due, self._ring, due, priority=TRIES)


def _by_latency(
    said: Sequence[_Said], latency: Mapping[Worker, Seconds]
) -> dict[Seconds, list[_Said]]:
    """What arrives together, by when."""
    found: dict[Seconds, list[_Said]] = {}
    for one in said:
        found.setdefault(latency[one[0]], []).append(one)
    return found

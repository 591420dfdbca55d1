"""The coordinator in virtual time: the runtime's scheduler, with a latency to and from each worker.

Messages of workers arrive after a latency, in the order of time; so do the answers. Its optional
log has the format of a real coordinator's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from polyrhythm.errors import PolicyError
from polyrhythm.simulate.clock import PRIORITY_RETRY, Clock
from polyrhythm.sync.decision_log import DecisionLog
from polyrhythm.sync.protocol import (
    Abort,
    Acquired,
    Assign,
    Command,
    Commit,
    CopyFrom,
    Event,
    Refuse,
    SampleProgress,
    Skip,
    Timer,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

_MessageT = TypeVar("_MessageT", bound=tuple[Any, ...])
CommandHandler = Callable[[Worker, Assign | Commit | Abort | Skip | CopyFrom], None]


class SimulatedCoordinator:
    def __init__(
        self,
        setup: Setup,
        clock: Clock,
        on_command: CommandHandler,
        log: DecisionLog[Scheduler] | None = None,
    ) -> None:
        self.scheduler = setup.scheduler() if log is None else log.machine
        self._clock, self._on_command, self._log = clock, on_command, log
        self._latency_to: dict[Worker, Seconds] = {}
        self._latency_from: dict[Worker, Seconds] = {}
        self._timer: Seconds = float("inf")  # the earliest timer on the clock

    def set_latency(self, latency: Mapping[Worker, tuple[Seconds, Seconds]]) -> None:
        """Set the latency of messages from each worker to the coordinator, and back."""
        self._latency_to = {worker: to for worker, (to, _) in latency.items()}
        self._latency_from = {worker: back for worker, (_, back) in latency.items()}

    def max_round_trip(self, workers: Sequence[Worker]) -> Seconds:
        """Time until all workers have the answer to messages that all of them send now."""
        to = max(self._latency_to[worker] for worker in workers)
        return to + max(self._latency_from[worker] for worker in workers)

    def send(self, worker: Worker, kind: Callable[..., Event], *args: Any) -> None:
        """Send a message of a worker; it arrives a latency later."""
        at = self._clock.now + self._latency_to[worker]
        self._clock.at(at, self._on_messages, kind, [(worker, *args)])

    def send_all(self, kind: Callable[..., Event], messages: Sequence[tuple[Any, ...]]) -> None:
        """Send messages of one kind of several workers; the first argument is the worker."""
        for latency, batch in _by_latency(messages, self._latency_to).items():
            self._clock.at(self._clock.now + latency, self._on_messages, kind, batch)

    def _on_messages(self, kind: Callable[..., Event], messages: Sequence[tuple[Any, ...]]) -> None:
        for args in messages:
            self._step(kind(*args, now=self._clock.now))

    def _step(self, event: Event) -> None:
        commands = self.scheduler.step(event)
        if self._log is not None:
            self._log.add(event, commands)
        for command in commands:
            self._answer(command)
        timer = self.scheduler.next_timer()
        if timer < self._timer:
            self._timer = timer
            self._clock.at(timer, self._on_timer, timer, priority=PRIORITY_RETRY)

    def _answer(self, command: Command) -> None:
        if isinstance(command, Refuse):
            raise PolicyError(
                f"the scheduler refuses {command.worker}: {command.why}",
                expected="simulated workers that follow the protocol",
                fix="report it as a bug, with the simulated job",
            )
        assert not isinstance(command, Acquired | SampleProgress), (
            "simulated workers request no samples"
        )
        if isinstance(command, Assign | Commit | Abort):
            members = [(member,) for member in command.members]
            for latency, batch in _by_latency(members, self._latency_from).items():
                self._clock.at(self._clock.now + latency, self._deliver, batch, command)
        else:
            latency = self._latency_from[command.worker]
            self._clock.at(self._clock.now + latency, self._on_command, command.worker, command)

    def _deliver(self, members: Sequence[tuple[Worker]], command: Assign | Commit | Abort) -> None:
        for (member,) in members:
            self._on_command(member, command)

    def _on_timer(self, timer: Seconds) -> None:
        """Send a Timer if one is due; set the clock again for a timer that was postponed."""
        if timer != self._timer:
            return
        self._timer = float("inf")
        due = self.scheduler.next_timer()
        if due <= self._clock.now:
            self._step(Timer(now=self._clock.now))
        elif due < float("inf"):
            self._timer = due
            self._clock.at(due, self._on_timer, due, priority=PRIORITY_RETRY)


def _by_latency(
    messages: Sequence[_MessageT], latency: Mapping[Worker, Seconds]
) -> dict[Seconds, list[_MessageT]]:
    """Group messages that arrive together, by latency."""
    batches: dict[Seconds, list[_MessageT]] = {}
    for message in messages:
        batches.setdefault(latency[message[0]], []).append(message)
    return batches

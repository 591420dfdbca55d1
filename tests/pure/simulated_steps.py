"""Workers that train under a scheduler in virtual time, for tests of memory and of logs."""

import heapq
import itertools
import random
from collections.abc import Callable

from polyrhythm.sync.protocol import (
    Acknowledge,
    Acquire,
    Assign,
    Command,
    Commit,
    Done,
    Event,
    Join,
    Ready,
    Request,
    Skip,
    Timer,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Worker


def ignore(event: Event, commands: list[Command]) -> None:
    pass


class SimulatedSteps:
    """Workers of random speed, which acquire samples; messages arrive at random times."""

    def __init__(
        self, setup: Setup, on_decision: Callable[[Event, list[Command]], None] = ignore
    ) -> None:
        self.scheduler: Scheduler = setup.scheduler()
        self._on_decision, self._random = on_decision, random.Random(5)
        self._asks_ahead = setup.mode.asks_ahead
        self._events: list[tuple[float, int, Event]] = []
        self._order, self.num_steps = itertools.count(), dict.fromkeys(setup.workers, 0)
        for number, worker in enumerate(setup.workers):
            self._push(Join, worker, "node", 0, now=float(number) / 1e3)
            self._start_step(worker, 1.0)

    def run(self, num_steps: int) -> None:
        """Run until all workers together have made this many more steps."""
        end = sum(self.num_steps.values()) + num_steps
        while sum(self.num_steps.values()) < end:
            now, timer = self._events[0][0], self.scheduler.next_timer()
            event = Timer(timer) if timer <= now else heapq.heappop(self._events)[2]
            commands = self.scheduler.step(event)
            self._on_decision(event, commands)
            for command in commands:
                self._on_command(command, event.now)

    def _push(self, event_type: type, *values: object, now: float) -> None:
        event = event_type(*values, now=round(now, 6))  # as a coordinator does
        heapq.heappush(self._events, (event.now, next(self._order), event))

    def _start_step(self, worker: Worker, now: float) -> None:
        clock = self.num_steps[worker]
        if self._asks_ahead:
            self._push(Request, worker, clock + 1, now=now)
        self._push(Acquire, worker, clock, 4, now=now)
        end = now + self._random.uniform(0.5, 2.0)
        self._push(Acknowledge, worker, clock, now=end)
        self._push(Ready, worker, clock + 1, now=end)

    def _on_command(self, command: object, now: float) -> None:
        ended: list[Worker] = []
        if isinstance(command, Assign):
            for worker in command.members:
                delay = self._random.uniform(0.01, 0.3)
                self._push(Done, worker, command.gid, True, now=now + delay)
        elif isinstance(command, Commit):
            ends = zip(command.members, command.end_clocks, strict=True)
            ended = [worker for worker, clock in ends if clock >= 0]
        elif isinstance(command, Skip):
            ended = [command.worker]
        for worker in ended:
            self.num_steps[worker] += 1
            self._start_step(worker, now)

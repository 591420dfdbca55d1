"""The memory of a scheduler does not grow with the number of steps."""

import gc
import heapq
import itertools
import random
import tracemalloc

import pytest

from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.sync.protocol import (
    Acknowledge,
    Acquire,
    Assign,
    Commit,
    Done,
    Event,
    Join,
    Ready,
    Request,
    Skip,
    Timer,
)
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Worker
from tests.grids import long_except

MAX_BYTES_PER_STEP = 16
WORKERS = [Worker(0, pipeline) for pipeline in range(3)]


class SimulatedSteps:
    """Workers of random speed, with messages that arrive at random times, in virtual time."""

    def __init__(self, policy: str) -> None:
        state = SamplerState(limit=10**9)
        setup = Setup(policy=policy, num_stages=1, num_pipelines=3, sampler_state=state)
        self._scheduler, self._random = setup.scheduler(), random.Random(5)
        self._events: list[tuple[float, int, Event]] = []
        self._order, self.num_steps = itertools.count(), dict.fromkeys(WORKERS, 0)
        for worker in WORKERS:
            self._scheduler.step(Join(worker, "node", 0))
            self._start_step(worker, 0.0)

    def run(self, num_steps: int) -> None:
        """Run until all workers together have made this many more steps."""
        end = sum(self.num_steps.values()) + num_steps
        while sum(self.num_steps.values()) < end:
            now, timer = self._events[0][0], self._scheduler.next_timer()
            event = Timer(timer) if timer <= now else heapq.heappop(self._events)[2]
            for command in self._scheduler.step(event):
                self._on_command(command, event.now)

    def _push(self, event_type: type, *values: object, now: float) -> None:
        event = event_type(*values, now=now)
        heapq.heappush(self._events, (now, next(self._order), event))

    def _start_step(self, worker: Worker, now: float) -> None:
        clock = self.num_steps[worker]
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


@pytest.mark.parametrize("policy", long_except(["age", "adaptive", "pairwise", "random"], 1))
def test_memory_of_a_scheduler_does_not_grow_with_steps(policy: str) -> None:
    steps, num_steps = SimulatedSteps(policy), 500
    steps.run(num_steps)
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        steps.run(num_steps)
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert growth <= MAX_BYTES_PER_STEP * num_steps

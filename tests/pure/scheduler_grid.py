"""A grid of stages and pipelines in virtual time under a scheduler, for tests.

Each worker runs 1F1B without flush over its batches (stage s of M runs M - s forwards ahead), makes
a local update after each backward, sends Ready and waits for the reply. Messages take a random time
and keep their order per sender. An average needs all members of its group; if one is dead, the
others block in it until Abort. At some clocks a worker requests a global average before it
continues. Workers leave when they have finished.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from polyrhythm.sync.policy import Policy
from polyrhythm.sync.protocol import (
    Abort,
    Assign,
    AverageAll,
    Command,
    Commit,
    CopyFrom,
    Dead,
    Done,
    Event,
    Join,
    Leave,
    Ready,
    Refuse,
    Request,
    Skip,
    Timer,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Action, Op, Seconds, Worker

HEARTBEAT = 30.0  # until a death is detected


def one_f_one_b(num_ahead: int, batches: range) -> list[Action]:
    ahead = [Action(Op.F, batch) for batch in batches[:num_ahead]]
    for batch in batches:
        ahead.append(Action(Op.B, batch))
        if batch + num_ahead in batches:
            ahead.append(Action(Op.F, batch + num_ahead))
    return ahead


@dataclass
class SimulatedWorker:
    program: list[Action]
    incarnation: int = 0
    clock: int = 0
    is_alive: bool = True
    is_computing: bool = False
    waits_since: Seconds | None = None  # since Ready or AverageAll was sent
    averages_all: bool = False  # the last message was AverageAll
    average_all_clock: int = -1  # the clock at which it did last
    requested_clock: int = 0  # the clock of its last Request
    last_arrival: Seconds = 0.0  # when its last message arrived
    gids: list[int] = field(default_factory=list)  # in the order of Assign
    open: int | None = None


@dataclass
class Grid:
    scheduler: Scheduler
    num_stages: int
    num_pipelines: int
    num_steps: int
    compute: Callable[[Worker, Action], Seconds]
    seed: int = 0
    averaging: Seconds = 0.1
    latency: Seconds = 0.01
    in_flight: int | None = None  # forwards ahead; None for 1F1B's
    average_all_at: frozenset[int] = frozenset()  # clocks
    asks_ahead: bool = False
    chance_to_fail: float = 0.0
    at_event: dict[int, Callable[["Grid"], None]] = field(default_factory=dict)

    now: Seconds = 0.0
    log: list[tuple[Event, list[Command]]] = field(default_factory=list)
    waits: list[Seconds] = field(default_factory=list)  # from Ready to Assign or Skip
    committed: list[tuple[Worker, ...]] = field(default_factory=list)
    global_averages: list[tuple[Worker, ...]] = field(default_factory=list)  # those committed
    copies: list[CopyFrom] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._heap: list[tuple[Seconds, int, Callable[[], None]]] = []
        self._count = 0
        self._finished: set[tuple[int, int, Action]] = set()  # stage, pipeline, action
        self._reached: dict[int, set[Worker]] = {}  # who has come to a group, by gid
        self._assigned: dict[int, Assign] = {}
        self._asks_ahead = [
            self.asks_ahead and type(policy).on_request is not Policy.on_request
            for policy in self.scheduler.policies
        ]
        batches = range(self.num_steps)
        self.workers = {
            Worker(stage, pipeline): SimulatedWorker(one_f_one_b(self._ahead(stage), batches))
            for stage in range(self.num_stages)
            for pipeline in range(self.num_pipelines)
        }

    def run(self, most_events: int = 20_000) -> "Grid":
        """Run until no event is left."""
        for worker in self.workers:
            self.send(worker, lambda now, w=worker: Join(w, f"node{w.pipeline // 2}", 0, 0, now))
            self._schedule(0.1, lambda w=worker: self._go_on(w))
        while len(self.log) < most_events:
            timer = self.scheduler.next_timer()
            if not self._heap and timer == math.inf:
                return self
            if not self._heap or timer <= self._heap[0][0]:
                self.now = max(timer, self.now)
                self.deliver(Timer(self.now))
            else:
                self.now, _, happen = heapq.heappop(self._heap)
                happen()
        raise AssertionError("the simulation does not end")

    def unfinished(self, pipelines: Iterable[int] | None = None) -> list[Worker]:
        wanted = range(self.num_pipelines) if pipelines is None else pipelines
        return [w for w, state in self.workers.items() if state.program and w.pipeline in wanted]

    def deliver(self, event: Event) -> None:
        """Pass one event to the scheduler and send its commands."""
        commands = self.scheduler.step(event)
        self.log.append((event, commands))
        for command in commands:
            self._apply(command)
        if len(self.log) in self.at_event:
            self.at_event[len(self.log)](self)

    def send(self, worker: Worker, event_at: Callable[[Seconds], Event]) -> None:
        """Send a worker's message, which arrives after its earlier ones."""
        state = self.workers[worker]
        arrives = self.now + self.chance.uniform(0, self.latency)
        state.last_arrival = max(arrives, state.last_arrival + 1e-9)
        self._schedule(state.last_arrival - self.now, lambda: self.deliver(event_at(self.now)))

    def kill(self, worker: Worker) -> None:
        state = self.workers[worker]
        if state.is_alive and state.program:
            state.is_alive = False
            dead = Dead(worker, state.incarnation)
            self._schedule(
                HEARTBEAT, lambda: self.deliver(Dead(worker, dead.incarnation, self.now))
            )

    def revive(self, worker: Worker) -> None:
        """Let the worker rejoin; its pipeline restarts with the remaining batches."""
        state = self.workers[worker]
        pipeline = [w for w in self.workers if w.pipeline == worker.pipeline]
        first = max(self.workers[w].clock for w in pipeline)
        for w in pipeline:
            other = self.workers[w]
            other.program = one_f_one_b(self._ahead(w.stage), range(first, self.num_steps))
            other.clock, other.is_computing, other.waits_since = first, False, None
            other.requested_clock = first
            other.averages_all = False
        state.is_alive, state.incarnation, state.open = True, state.incarnation + 1, None
        incarnation = state.incarnation
        self.send(worker, lambda now: Join(worker, "node", 0, incarnation, now))
        for w in pipeline:
            self._schedule(1.0, lambda w=w: self._go_on(w))

    def _ahead(self, stage: int) -> int:
        return self.in_flight or self.num_stages - stage

    def _schedule(self, seconds: Seconds, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, happen))

    def _go_on(self, worker: Worker) -> None:
        """Start the next action if its inputs are available."""
        state = self.workers[worker]
        if not state.is_alive or state.is_computing or state.waits_since is not None:
            return
        if state.clock in self.average_all_at and state.average_all_clock < state.clock:
            self._average_all(worker)
            return
        if not state.program:
            self.send(worker, lambda now: Leave(worker, state.incarnation, now))
            state.is_computing = True  # gone
            return
        if self.asks_ahead and state.requested_clock <= state.clock:
            clock = state.requested_clock = state.clock + 1
            self.send(worker, lambda now: Request(worker, clock, state.incarnation, now))
        action, (stage, pipeline) = state.program[0], worker
        neighbour = stage - 1 if action.op is Op.F else stage + 1
        has_input = (neighbour, pipeline, action) in self._finished
        if not has_input and 0 <= neighbour < self.num_stages:
            return
        state.is_computing = True
        program = state.program
        self._schedule(self.compute(worker, action), lambda: self._finish(worker, action, program))

    def _average_all(self, worker: Worker) -> None:
        state = self.workers[worker]
        clock = state.average_all_clock = state.clock
        state.averages_all, state.waits_since = True, self.now
        self.send(worker, lambda now: AverageAll(worker, clock, state.incarnation, now))

    def _finish(self, worker: Worker, action: Action, program: list[Action]) -> None:
        state = self.workers[worker]
        if not state.is_alive or state.program is not program:
            return
        state.is_computing = False
        program.pop(0)
        self._finished.add((*worker, action))
        if action.op is Op.B:
            state.clock += 1
            state.waits_since = self.now
            clock, incarnation = state.clock, state.incarnation
            self.send(worker, lambda now: Ready(worker, clock, incarnation, now))
            if state.open is not None:  # assigned ahead
                self._reach_group(worker, state.open)
        for other in (worker, *self._neighbours(worker)):
            self._go_on(other)

    def _neighbours(self, worker: Worker) -> Sequence[Worker]:
        around = (worker.stage - 1, worker.stage + 1)
        return [Worker(s, worker.pipeline) for s in around if 0 <= s < self.num_stages]

    def _apply(self, command: Command) -> None:
        assert not isinstance(command, Refuse), command
        if isinstance(command, Assign):
            if command.why == "average_all":
                self._check_average_all(command)
            self._assigned[command.gid] = command
            self._reached[command.gid] = set()
            for worker in command.members:
                state = self.workers[worker]
                assert state.open is None, f"{worker} is in two open groups"
                assert not state.gids or state.gids[-1] < command.gid
                state.open = command.gid
                state.gids.append(command.gid)
                self._answered(worker)
                delay = self.chance.uniform(0, self.latency)
                self._schedule(delay, lambda w=worker: self._reach_group(w, command.gid))
        elif isinstance(command, Skip):
            self._answered(command.worker)
            if self.workers[command.worker].clock == command.clock:
                self._release(command.worker)
        elif isinstance(command, CopyFrom):
            self.copies.append(command)
            assert command.source.stage == command.worker.stage
        else:
            self._close(command)

    def _check_average_all(self, command: Assign) -> None:
        """Check that a global average has all its participants and only those that requested it."""
        stage = self.scheduler.membership.stages[command.members[0].stage]
        event, _ = self.log[-1]
        new = event.worker.pipeline if isinstance(event, Join) else None  # it was lost before
        active = [m.worker for m in stage if m.has_joined and m.worker.pipeline != new]
        assert list(command.members) == active
        revived = {w.pipeline for w, state in self.workers.items() if state.incarnation}
        for worker in command.members:  # a pipeline that starts anew forgets that it gathered
            assert self.workers[worker].averages_all or worker.pipeline in revived

    def _answered(self, worker: Worker) -> None:
        state = self.workers[worker]
        if state.waits_since is not None and not state.averages_all:
            self.waits.append(self.now - state.waits_since)

    def _close(self, command: Commit | Abort) -> None:
        for worker in command.members:
            state = self.workers[worker]
            if state.open == command.gid:
                state.open = None
        assigned = self._assigned.pop(command.gid, None)
        if assigned is None:
            return  # told again
        assert assigned.members == command.members
        if isinstance(command, Commit):
            self.committed.append(command.members)
            if assigned.why == "average_all":
                self.global_averages.append(command.members)
            for worker, clock in zip(command.members, command.end_clocks, strict=True):
                if clock == self.workers[worker].clock:  # else it only answered
                    self._release(worker)

    def _release(self, worker: Worker) -> None:
        state = self.workers[worker]
        state.waits_since, state.averages_all = None, False
        self._schedule(self.chance.uniform(0, self.latency), lambda: self._go_on(worker))

    def _reach_group(self, worker: Worker, gid: int) -> None:
        """Let a ready member arrive at its group; average when all have arrived."""
        state, assigned = self.workers[worker], self._assigned.get(gid)
        if assigned is None or not state.is_alive or state.open != gid:
            return
        if state.waits_since is None and self._asks_ahead[worker.stage]:
            return  # it has asked for this group, for the end of its step; else it is passive
        self._reached[gid].add(worker)
        if len(self._reached[gid]) == len(assigned.members):
            for member in assigned.members:
                incarnation = self.workers[member].incarnation
                self._schedule(
                    self.averaging, lambda m=member, n=incarnation: self._average(m, gid, n)
                )

    def _average(self, worker: Worker, gid: int, incarnation: int) -> None:
        state = self.workers[worker]
        if state.is_alive and state.incarnation == incarnation:
            ok = self.chance.random() >= self.chance_to_fail
            self.send(worker, lambda now: Done(worker, gid, ok, incarnation, now))

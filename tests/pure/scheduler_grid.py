"""A grid of stages and pipelines in virtual time, driven by a scheduler.

Each worker runs 1F1B without flush over its batches (stage s of M runs M - s forwards ahead), makes
a local update after each backward, sends Ready and waits for the answer. Messages take a random
time and keep their order per sender. An average needs all members of its group; if one is dead, the
others block in it until an Abort. At some clocks a worker sends AverageAll before it continues.
Workers leave when they have finished.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from polyrhythm.sync.members import Limits
from polyrhythm.sync.modes import SyncMode, make_policies
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

HEARTBEAT = 30.0  # time until a death is noticed


def one_f_one_b(num_ahead: int, batches: range) -> list[Action]:
    actions = [Action(Op.F, batch) for batch in batches[:num_ahead]]
    for batch in batches:
        actions.append(Action(Op.B, batch))
        if batch + num_ahead in batches:
            actions.append(Action(Op.F, batch + num_ahead))
    return actions


@dataclass
class SimulatedWorker:
    program: list[Action]
    incarnation: int = 0
    clock: int = 0
    is_alive: bool = True
    is_computing: bool = False
    waits_since: Seconds | None = None  # when it sent Ready or AverageAll
    averages_all: bool = False  # it waits for a global average
    average_all_clock: int = -1  # of its last AverageAll
    requested_clock: int = 0  # of its last Request
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
    takes_requests: bool = False
    failure_probability: float = 0.0
    at_event: dict[int, Callable[["Grid"], None]] = field(default_factory=dict)

    now: Seconds = 0.0
    log: list[tuple[Event, list[Command]]] = field(default_factory=list)
    waits: list[Seconds] = field(default_factory=list)  # from Ready to Assign or Skip
    committed: list[tuple[Worker, ...]] = field(default_factory=list)
    global_averages: list[tuple[Worker, ...]] = field(default_factory=list)  # committed ones
    copies: list[CopyFrom] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._heap: list[tuple[Seconds, int, Callable[[], None]]] = []
        self._count = 0
        self._finished: set[tuple[int, int, Action]] = set()  # stage, pipeline, action
        self._reached: dict[int, set[Worker]] = {}  # members that have reached a group, by gid
        self._assigned: dict[int, Assign] = {}
        self._takes_requests = [
            self.takes_requests and type(policy).on_request is not Policy.on_request
            for policy in self.scheduler.policies
        ]
        batches = range(self.num_steps)
        self.workers = {
            Worker(stage, pipeline): SimulatedWorker(one_f_one_b(self._ahead(stage), batches))
            for stage in range(self.num_stages)
            for pipeline in range(self.num_pipelines)
        }

    def run(self, max_events: int = 20_000) -> "Grid":
        """Run until no event is left."""
        for worker in self.workers:
            self.send(worker, lambda now, w=worker: Join(w, f"node{w.pipeline // 2}", 0, 0, now))
            self._schedule(0.1, lambda w=worker: self._continue(w))
        while len(self.log) < max_events:
            timer = self.scheduler.next_timer()
            if not self._heap and timer == math.inf:
                return self
            if not self._heap or timer <= self._heap[0][0]:
                self.now = max(timer, self.now)
                self.deliver(Timer(self.now))
            else:
                self.now, _, callback = heapq.heappop(self._heap)
                callback()
        raise AssertionError(f"not finished after {max_events} events")

    def unfinished(self, pipelines: Iterable[int] | None = None) -> list[Worker]:
        wanted = range(self.num_pipelines) if pipelines is None else pipelines
        return [w for w, state in self.workers.items() if state.program and w.pipeline in wanted]

    def deliver(self, event: Event) -> None:
        """Deliver one event to the scheduler and apply its commands."""
        commands = self.scheduler.step(event)
        self.log.append((event, commands))
        for command in commands:
            self._apply(command)
        if len(self.log) in self.at_event:
            self.at_event[len(self.log)](self)

    def send(self, worker: Worker, event_at: Callable[[Seconds], Event]) -> None:
        """Send a message of a worker; it arrives after its earlier messages."""
        state = self.workers[worker]
        arrival = self.now + self.rng.uniform(0, self.latency)
        state.last_arrival = max(arrival, state.last_arrival + 1e-9)
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
        """Let the worker join again; its pipeline restarts with the remaining batches."""
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
            self._schedule(1.0, lambda w=w: self._continue(w))

    def _ahead(self, stage: int) -> int:
        return self.in_flight or self.num_stages - stage

    def _schedule(self, seconds: Seconds, callback: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, callback))

    def _continue(self, worker: Worker) -> None:
        """Start the worker's next action, if its input is there."""
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
        if self.takes_requests and state.requested_clock <= state.clock:
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
            self._continue(other)

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
                delay = self.rng.uniform(0, self.latency)
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
        """Check that the members are all active workers, and that each sent AverageAll."""
        stage = self.scheduler.membership.stages[command.members[0].stage]
        event, _ = self.log[-1]
        new = event.worker.pipeline if isinstance(event, Join) else None  # it was lost before
        active = [m.worker for m in stage if m.has_joined and m.worker.pipeline != new]
        assert list(command.members) == active
        revived = {w.pipeline for w, state in self.workers.items() if state.incarnation}
        for worker in command.members:  # a revived pipeline forgets its AverageAll
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
            return  # a repeated command
        assert assigned.members == command.members
        if isinstance(command, Commit):
            self.committed.append(command.members)
            if assigned.why == "average_all":
                self.global_averages.append(command.members)
            for worker, clock in zip(command.members, command.end_clocks, strict=True):
                if clock == self.workers[worker].clock:  # else it was passive
                    self._release(worker)

    def _release(self, worker: Worker) -> None:
        state = self.workers[worker]
        state.waits_since, state.averages_all = None, False
        self._schedule(self.rng.uniform(0, self.latency), lambda: self._continue(worker))

    def _reach_group(self, worker: Worker, gid: int) -> None:
        """Let a ready member reach its group, which averages when all members have reached it."""
        state, assigned = self.workers[worker], self._assigned.get(gid)
        if assigned is None or not state.is_alive or state.open != gid:
            return
        if state.waits_since is None and self._takes_requests[worker.stage]:
            return  # it has requested this group for the end of its step; else it is passive
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
            ok = self.rng.random() >= self.failure_probability
            self.send(worker, lambda now: Done(worker, gid, ok, incarnation, now))


LEASE, MAX_WINDOW, CEILING = 20.0, 3.0, 10.0
seeds = st.integers(0, 10**6)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 5))  # stages, pipelines
OPTIONS: dict[str, dict[str, object]] = {
    "adaptive": {"last_groups": 3, "max_window": MAX_WINDOW},
    "age": {"max_age": 1, "max_window": MAX_WINDOW},
    "random": {"group_size": 2},
    "smart": {"group_size": 2},
    "ssp": {"staleness": 2},
}


def random_times(seed: int) -> Callable[[Worker, Action], Seconds]:
    rng = random.Random(seed)
    return lambda worker, action: rng.choice([0.1, 1.0, 1.0, 1.0, 8.0])


def grid_of(name: str, shape: tuple[int, int], seed: int, **more: object) -> Grid:
    num_stages, num_pipelines = shape
    options = OPTIONS.get(name, {}) if num_pipelines > 1 or name == "ssp" else {}
    if name == "partial_reduce":
        options = {"group_size": min(2, num_pipelines), "timeout": MAX_WINDOW}
    policies = make_policies(
        name, num_stages=num_stages, num_pipelines=num_pipelines, lease=LEASE, options=options
    )
    mode = SyncMode.named(name)  # waits as in a real job
    limits = mode.limits(num_stages, Limits(ceiling=CEILING))
    scheduler = Scheduler(policies, num_pipelines, waits_for_all=mode.waits_for_all, limits=limits)
    return Grid(scheduler, *shape, 6, random_times(seed), seed, **more)

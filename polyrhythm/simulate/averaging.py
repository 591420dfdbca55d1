"""Averaging of simulated workers: what `run/averaging/rounds.py` does, without tensors.

A worker whose step has ended sends Ready. Assigned to a group, it starts the exchange when it is
ready, or at once under a policy whose workers answer while they compute. When all members have
started, reduce-scatter and all-gather follow; then all send Done, and Commit ends the step of the
members that wait for it. With `overlap` a worker continues at once, and waits at the end of its
next step if the average is not done by then.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from polyrhythm.simulate.clock import PRIORITY_RETRY, RETRY_INTERVAL, Clock
from polyrhythm.simulate.coordinator import SimulatedCoordinator
from polyrhythm.simulate.engine.engine import NO_WAIT, BucketArrivals, Engine
from polyrhythm.simulate.network import SimulatedNetwork
from polyrhythm.sync.protocol import Abort, Assign, Commit, CopyFrom, Done, Ready, Request, Skip
from polyrhythm.sync.setup import Setup
from polyrhythm.types import BytesPerSecond, Seconds, Worker

if TYPE_CHECKING:
    from polyrhythm.simulate.parameter_server import SimulatedParameterServer


class Observer(Protocol):
    """Callbacks for all changes of models, in the order of time."""

    def on_step_start(self, worker: Worker, now: Seconds) -> None:
        """The worker starts a step: a forward with its weights of now."""

    def on_step(self, worker: Worker, now: Seconds) -> None:
        """The worker has finished a local update."""

    def on_average(self, gid: int, members: Sequence[Worker], now: Seconds) -> None:
        """The members start to average their weights of now; none has the result yet."""

    def on_applied(self, worker: Worker, gid: int, now: Seconds) -> None:
        """The worker applies the average of a group."""

    def on_copied(self, worker: Worker, source: Worker, now: Seconds) -> None:
        """A worker that joins late has copied the weights of `source`."""

    def on_server_transfer(self, worker: Worker, is_push: bool, now: Seconds) -> None:
        """A push of the worker has reached the parameter server, or a pull the worker."""


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """Averaging state of one worker."""

    worker: Worker
    device: int
    run: int
    size: float  # bytes that it averages
    parameters: float = 0.0  # bytes
    clock: int = 0  # of its last Ready
    incarnation: int = 0
    steps: int = 0
    pending: int | None = None  # clock of a Ready that has no answer yet
    wants_report: bool = False  # to report again, once it has an answer
    queued_groups: deque[int] = field(default_factory=deque)  # groups that it has not started


@dataclass(slots=True, eq=False)
class _Exchange:
    assign: Assign
    members: list[SimulatedWorker]
    num_started: int = 0  # members
    start: Seconds = 0.0
    owner: int | None = None  # of its active flows
    is_all_gather: bool = False
    is_aborted: bool = False


class SimulatedAveraging:
    """Averages of all workers; calls `on_step_done` when a worker may start its next step."""

    def __init__(
        self,
        members: Sequence[SimulatedWorker],
        clock: Clock,
        engine: Engine,
        network: SimulatedNetwork,
        coordinator: SimulatedCoordinator,
        on_step_done: Callable[[SimulatedWorker, BucketArrivals], None],
        *,
        setup: Setup,
        overlap: bool,
        decoupled: Callable[[Sequence[SimulatedWorker]], BucketArrivals] | None = None,
        server: "SimulatedParameterServer | None" = None,  # if workers do not average
        observers: Sequence[Observer] = (),
        finished: list[tuple[Assign, Seconds, Seconds]] | None = None,
    ) -> None:
        """`decoupled` returns when the all-gather of a committed average arrives.

        Averages are appended to `finished` with their start and end, for a log.
        """
        self.members = {member.worker: member for member in members}
        self.sizes: Counter[int] = Counter()  # number of averages by members
        self.spread: list[int] = []  # of each group: steps between its first and last member
        self.coordinator = coordinator
        self._clock, self._engine, self._network = clock, engine, network
        self._on_step_done = on_step_done
        self._mode, self._every = setup.mode, setup.steps_between
        self._overlap, self._decoupled = overlap, decoupled
        self._server, self.observers, self._finished = server, observers, finished
        self._exchanges: dict[int, _Exchange] = {}
        self._by_owner: dict[int, _Exchange] = {}

    def step_began(self, member: SimulatedWorker) -> None:
        for observer in self.observers:
            observer.on_step_start(member.worker, self._clock.now)
        if self._mode.asks_ahead and not (member.steps + 1) % self._every:
            self.coordinator.send(member.worker, Request, member.clock + 1, member.incarnation)

    def step_ended(self, member: SimulatedWorker) -> None:
        member.steps += 1
        for observer in self.observers:
            observer.on_step(member.worker, self._clock.now)
        if member.steps % self._every:
            self._on_step_done(member, NO_WAIT)
        elif member.pending is not None:
            member.wants_report = True
        else:
            self._report(member)
            if self._overlap:
                self._on_step_done(member, NO_WAIT)

    def _report(self, member: SimulatedWorker) -> None:
        if self._server is None:
            self._send_ready(member)
        else:
            self._server.push(member, self._send_ready)

    def _send_ready(self, member: SimulatedWorker) -> None:
        member.clock += 1
        member.pending = member.clock
        self.coordinator.send(member.worker, Ready, member.clock, member.incarnation)
        self._start(member)

    def on_command(
        self, worker: Worker, command: Assign | Commit | Abort | Skip | CopyFrom
    ) -> None:
        member = self.members[worker]
        if isinstance(command, Assign):
            if command.incarnations[command.members.index(worker)] == member.incarnation:
                if command.gid not in self._exchanges:
                    members = [self.members[other] for other in command.members]
                    self._exchanges[command.gid] = _Exchange(command, members)
                member.queued_groups.append(command.gid)
                self._start(member)
        elif isinstance(command, Commit):
            self._on_commit(member, command)
        elif isinstance(command, Skip):
            self._end_report(member, command.clock, NO_WAIT)
            self.sizes[1] += 1
        elif isinstance(command, Abort):
            self._abort(member, command.gid)

    def flows_ended(self, owner: int) -> None:
        """The last byte of a phase has left; it arrives a latency later."""
        exchange = self._by_owner.pop(owner)
        exchange.owner = None
        self._engine.free_owner(owner)
        latency = self._network.max_round_trip([member.device for member in exchange.members])
        self._clock.at(self._clock.now + latency, self._phase_done, exchange)

    def reset(self, member: SimulatedWorker) -> None:
        """Start a new incarnation of a lost worker; the scheduler aborts its groups."""
        member.incarnation += 1
        member.pending, member.wants_report = None, False
        member.queued_groups.clear()

    def max_rate(self) -> dict[tuple[int, int], BytesPerSecond]:
        """Largest send rate of each member of an active exchange, by flow owner and device."""
        rates = {}
        for owner, exchange in self._by_owner.items():
            devices, size = [m.device for m in exchange.members], exchange.members[0].size
            gathers = exchange.is_all_gather
            phase = self._network.phase_transfers(devices, size, is_all_gather=gathers)
            for source, max_rate in zip(phase.sources, phase.max_rate, strict=False):
                rates[owner, source] = max_rate
        return rates

    def _start(self, member: SimulatedWorker) -> None:
        is_ready = member.pending is not None or self._mode.answers_while_computing
        while is_ready and member.queued_groups:
            exchange = self._exchanges.get(member.queued_groups.popleft())
            if exchange is not None:  # else it is aborted, and the Abort has not arrived yet
                self._count_ready(exchange)
                is_ready = False  # one exchange at a time

    def _count_ready(self, exchange: _Exchange) -> None:
        exchange.num_started += 1
        if exchange.num_started == len(exchange.members) and not exchange.is_aborted:
            exchange.start, assign = self._clock.now, exchange.assign
            for observer in self.observers:
                observer.on_average(assign.gid, assign.members, self._clock.now)
            self._exchange(exchange)

    def _exchange(self, exchange: _Exchange) -> None:
        """Start both phases, or the reduce-scatter if the all-gather is hidden."""
        devices, size = [m.device for m in exchange.members], exchange.members[0].size
        for a, b, sent in self._network.sent(devices, size):
            self._engine.state.sent[a, b] += sent
        if self._engine.averages_share:
            self._send_phase(exchange, devices)
            return
        # No other flow affects it: one event for all phases.
        phase = self._network.max_round_trip(devices) + self._network.phase_time(devices, size)
        num_phases = 1 if self._decoupled is not None else 2
        exchange.is_all_gather = True
        self._clock.at(self._clock.now + num_phases * phase, self._phase_done, exchange)

    def _send_phase(self, exchange: _Exchange, devices: Sequence[int]) -> None:
        engine, now, size = self._engine, self._clock.now, exchange.members[0].size
        owner = exchange.owner = engine.new_owner()
        self._by_owner[owner] = exchange
        phase = self._network.phase_transfers(devices, size, is_all_gather=exchange.is_all_gather)
        if not phase.targets:
            engine.flows_to_many(
                now, phase.sources, phase.size, phase.max_rate, phase.weight, owner
            )
        for source, target in zip(phase.sources, phase.targets, strict=False):
            engine.flow_to_one(now, source, target, phase.size, owner)

    def _phase_done(self, exchange: _Exchange) -> None:
        if exchange.is_aborted:
            return
        if not exchange.is_all_gather and self._decoupled is None:
            exchange.is_all_gather = True
            self._send_phase(exchange, [member.device for member in exchange.members])
            return
        assign = exchange.assign
        messages = [
            (member.worker, assign.gid, True, incarnation)
            for member, incarnation in zip(exchange.members, assign.incarnations, strict=True)
            if member.incarnation == incarnation
        ]
        self.coordinator.send_all(Done, messages)

    def _on_commit(self, member: SimulatedWorker, commit: Commit) -> None:
        exchange = self._exchanges.get(commit.gid)
        if exchange is None:
            return
        index = commit.members.index(member.worker)
        is_current = member.incarnation == exchange.assign.incarnations[index]
        for observer in self.observers if is_current else ():
            observer.on_applied(member.worker, commit.gid, self._clock.now)
        exchange.num_started -= 1
        if exchange.num_started == 0:
            self._exchanges.pop(commit.gid)
            clocks = [other.clock for other in exchange.members]
            self.sizes[len(clocks)] += 1
            self.spread.append(max(clocks) - min(clocks))
            if self._finished is not None:
                self._finished.append((exchange.assign, exchange.start, self._clock.now))
        if is_current:
            self._continue(member, member.incarnation, commit.end_clocks[index], exchange.members)

    def _continue(
        self,
        member: SimulatedWorker,
        incarnation: int,
        clock: int,
        members: Sequence[SimulatedWorker],
    ) -> None:
        """End the worker's step once the all-gather for its next forward can be sent."""
        buckets = NO_WAIT if self._decoupled is None else self._decoupled(members)
        if buckets.last < float("inf"):
            self._end_report(member, clock, buckets)
        elif member.incarnation == incarnation:  # a link is lost
            retry_at, args = self._clock.now + RETRY_INTERVAL, (member, incarnation, clock, members)
            self._clock.at(retry_at, self._continue, *args, priority=PRIORITY_RETRY)

    def _abort(self, member: SimulatedWorker, gid: int) -> None:
        if gid in member.queued_groups:
            member.queued_groups.remove(gid)
        exchange = self._exchanges.pop(gid, None)
        if exchange is None:
            return
        exchange.is_aborted = True
        if exchange.owner is not None:
            del self._by_owner[exchange.owner]
            self._engine.drop_flows(self._clock.now, exchange.owner)

    def _end_report(self, member: SimulatedWorker, clock: int, buckets: BucketArrivals) -> None:
        if clock != member.pending:
            return
        member.pending = None
        if self._server is not None:
            self._server.pull(member, lambda member: self._on_step_done(member, NO_WAIT))
        elif not self._overlap:
            self._on_step_done(member, buckets)
        elif member.wants_report:
            member.wants_report = False
            self._report(member)
            self._on_step_done(member, NO_WAIT)

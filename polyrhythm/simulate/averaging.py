"""How virtual workers average: what `run/average/averager.py` does, without tensors.

A worker whose step has ended says Ready. Assigned to a group, it begins to exchange when it is
ready, or at once under a policy whose workers answer while they compute. When all have begun, two
halves of the buffer travel; then all say Done, and Commit sends those on whose step ends with it.
With `overlap` a worker goes on at once, and waits at its next step's end if that was too soon.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from polyrhythm.simulate.clock import PRIORITY_RETRY, RETRY_INTERVAL, Clock
from polyrhythm.simulate.coordinator import SimulatedCoordinator
from polyrhythm.simulate.engine.engine import NO_WAIT, BucketArrivals, Engine
from polyrhythm.simulate.network import SimulatedNetwork
from polyrhythm.sync.protocol import Abort, Assign, Commit, CopyFrom, Done, Ready, Request, Skip
from polyrhythm.types import BytesPerSecond, Seconds, Worker


class Observer(Protocol):
    """Is told what happens to models, in the order of time."""

    def on_begin(self, worker: Worker, now: Seconds) -> None:
        """It begins a step: a forward, with the weights that it has now."""

    def on_step(self, worker: Worker, now: Seconds) -> None:
        """It has made a local update."""

    def on_average(
        self, gid: int, members: Sequence[Worker], weights: Sequence[float], now: Seconds
    ) -> None:
        """These exchange what they have now; nobody has it yet."""

    def on_applied(self, worker: Worker, gid: int, now: Seconds) -> None:
        """It takes in the average of a group."""

    def on_copied(self, worker: Worker, source: Worker, now: Seconds) -> None:
        """One that joins late has copied the weights of another one."""

    def on_served(self, worker: Worker, is_push: bool, now: Seconds) -> None:
        """A parameter server has what it pushed, or it has what it pulled."""


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """One worker, as averaging sees it."""

    worker: Worker
    device: int
    run: int
    size: float  # of what it averages
    parameters: float = 0.0  # bytes
    clock: int = 0  # what it has reported
    incarnation: int = 0
    steps: int = 0
    pending: int | None = None  # the report whose end it has not been told
    wants_report: bool = False  # to report again, once it has
    queued_groups: deque[int] = field(default_factory=deque)  # groups that it has yet to begin


@dataclass(slots=True, eq=False)
class _Exchange:
    assign: Assign
    members: list[SimulatedWorker]
    num_begun: int = 0
    began: Seconds = 0.0
    owner: int | None = None  # of its flows, while they are under way
    is_all_gather: bool = False
    is_aborted: bool = False


class ModelServer(Protocol):
    """Has the model, if workers do not average with one another; calls `then` when it is there."""

    def push(self, member: SimulatedWorker, then: Callable[[SimulatedWorker], None]) -> None:
        """Before it says Ready."""

    def pull(self, member: SimulatedWorker, then: Callable[[SimulatedWorker], None]) -> None:
        """Once it may go on."""


class SimulatedAveraging:
    """`on_step_done` is called when a worker may begin its next step, with what its forward waits for."""

    def __init__(
        self,
        members: Sequence[SimulatedWorker],
        clock: Clock,
        engine: Engine,
        network: SimulatedNetwork,
        coordinator: SimulatedCoordinator,
        on_step_done: Callable[[SimulatedWorker, BucketArrivals], None],
        *,
        every: int,
        overlap: bool,
        answers_while_computing: bool,
        asks_ahead: bool,
        decoupled: Callable[[Sequence[SimulatedWorker]], BucketArrivals] | None = None,
        server: ModelServer | None = None,
        observers: Sequence[Observer] = (),
        finished: list[tuple[Assign, Seconds, Seconds]] | None = None,
    ) -> None:
        """`decoupled` says when the second half of an average that is certain now is there.

        `finished` is a list to add averages to, with when they began and ended, for a log.
        """
        self.members = {member.worker: member for member in members}
        self.sizes: Counter[int] = Counter()  # of groups that averaged, by members
        self.spread: list[int] = []  # steps between the first and the last of each group
        self.coordinator = coordinator
        self._clock, self._engine, self._network, self._on_step_done = (
            clock,
            engine,
            network,
            on_step_done,
        )
        self._every, self._overlap, self._decoupled = every, overlap, decoupled
        self._answers_while_computing, self._asks_ahead = answers_while_computing, asks_ahead
        self._server, self.observers, self._finished = server, observers, finished
        self._exchanges: dict[int, _Exchange] = {}
        self._by_owner: dict[int, _Exchange] = {}

    def step_began(self, member: SimulatedWorker) -> None:
        for observer in self.observers:
            observer.on_begin(member.worker, self._clock.now)
        if self._asks_ahead and not (member.steps + 1) % self._every:
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
        self._begin(member)

    def on_command(
        self, worker: Worker, command: Assign | Commit | Abort | Skip | CopyFrom
    ) -> None:
        member = self.members[worker]
        if isinstance(command, Assign):
            if command.incarnations[command.members.index(worker)] == member.incarnation:
                self._on_assign(member, command)
        elif isinstance(command, Commit):
            self._on_commit(member, command)
        elif isinstance(command, Skip):
            self._end_report(member, command.clock, NO_WAIT)
            self.sizes[1] += 1
        elif isinstance(command, Abort):
            self._abort(member, command.gid)

    def flows_ended(self, owner: int) -> None:
        """The last byte of a half has left; it is there a latency later."""
        exchange = self._by_owner.pop(owner)
        exchange.owner = None
        self._engine.free_owner(owner)
        latency = self._network.max_round_trip([member.device for member in exchange.members])
        self._clock.at(self._clock.now + latency, self._phase_done, exchange)

    def reset(self, member: SimulatedWorker) -> None:
        """It is gone; what it was in is given up by the scheduler. It may have another life."""
        member.incarnation += 1
        member.pending, member.wants_report = None, False
        member.queued_groups.clear()

    def max_rate(self) -> dict[tuple[int, int], BytesPerSecond]:
        """How fast each member of an exchange under way can send, by owner of flows and device."""
        found = {}
        for owner, exchange in self._by_owner.items():
            devices, size = [m.device for m in exchange.members], exchange.members[0].size
            phase = self._network.phase_transfers(
                devices, size, is_all_gather=exchange.is_all_gather
            )
            for source, max_rate in zip(phase.sources, phase.max_rate, strict=False):
                found[owner, source] = max_rate
        return found

    def _on_assign(self, member: SimulatedWorker, assign: Assign) -> None:
        if assign.gid not in self._exchanges:
            members = [self.members[worker] for worker in assign.members]
            self._exchanges[assign.gid] = _Exchange(assign, members)
        member.queued_groups.append(assign.gid)
        self._begin(member)

    def _begin(self, member: SimulatedWorker) -> None:
        is_ready = member.pending is not None or self._answers_while_computing
        while is_ready and member.queued_groups:
            exchange = self._exchanges.get(member.queued_groups.popleft())
            if exchange is not None:  # else it is given up, and it has not heard so yet
                self._count_ready(exchange)
                is_ready = False  # one after the other

    def _count_ready(self, exchange: _Exchange) -> None:
        exchange.num_begun += 1
        if exchange.num_begun == len(exchange.members) and not exchange.is_aborted:
            exchange.began, assign = self._clock.now, exchange.assign
            for observer in self.observers:
                observer.on_average(assign.gid, assign.members, assign.weights, self._clock.now)
            self._exchange(exchange)

    def _exchange(self, exchange: _Exchange) -> None:
        """Both halves, or the first if the second hides."""
        devices, size = [m.device for m in exchange.members], exchange.members[0].size
        for a, b, sent in self._network.sent(devices, size):
            self._engine.state.sent[a, b] += sent
        if self._engine.averages_share:
            self._send_phase(exchange, devices)
            return
        # Nothing else matters to it: no event for each half.
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
        place = commit.members.index(member.worker)
        is_current = member.incarnation == exchange.assign.incarnations[place]
        for observer in self.observers if is_current else ():
            observer.on_applied(member.worker, commit.gid, self._clock.now)
        exchange.num_begun -= 1
        if exchange.num_begun == 0:
            self._exchanges.pop(commit.gid)
            clocks = [other.clock for other in exchange.members]
            self.sizes[len(clocks)] += 1
            self.spread.append(max(clocks) - min(clocks))
            if self._finished is not None:
                self._finished.append((exchange.assign, exchange.began, self._clock.now))
        if is_current:
            self._continue(member, member.incarnation, commit.end_clocks[place], exchange.members)

    def _continue(
        self,
        member: SimulatedWorker,
        incarnation: int,
        clock: int,
        members: Sequence[SimulatedWorker],
    ) -> None:
        """When what its next forward needs is on its way."""
        buckets = NO_WAIT if self._decoupled is None else self._decoupled(members)
        if buckets.last < float("inf"):
            self._end_report(member, clock, buckets)
        elif member.incarnation == incarnation:  # over a link that is lost
            again, given = self._clock.now + RETRY_INTERVAL, (member, incarnation, clock, members)
            self._clock.at(again, self._continue, *given, priority=PRIORITY_RETRY)

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

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

from polyrhythm.simulate.clock import AGAIN, TRIES, Clock
from polyrhythm.simulate.coordinator import Coordinator
from polyrhythm.simulate.engine.engine import THERE, Arriving, Engine
from polyrhythm.simulate.network import Network
from polyrhythm.sync.messages import Abort, Assign, Commit, Done, Heal, Ready, Request, Skip
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

    def on_healed(self, worker: Worker, source: Worker, now: Seconds) -> None:
        """One that joins late has copied the weights of another one."""

    def on_served(self, worker: Worker, is_push: bool, now: Seconds) -> None:
        """A parameter server has what it pushed, or it has what it pulled."""


@dataclass(slots=True, eq=False)
class Member:
    """One worker, as averaging sees it."""

    worker: Worker
    device: int
    run: int
    size: float  # of what it averages
    parameters: float = 0.0  # bytes
    clock: int = 0  # what it has reported
    life: int = 0
    steps: int = 0
    pending: int | None = None  # the report whose end it has not been told
    wants: bool = False  # to report again, once it has
    line: deque[int] = field(default_factory=deque)  # groups that it has yet to begin


@dataclass(slots=True, eq=False)
class _Exchange:
    assign: Assign
    members: list[Member]
    num_begun: int = 0
    began: Seconds = 0.0
    owner: int | None = None  # of its flows, while they are under way
    second: bool = False
    is_given_up: bool = False


class Server(Protocol):
    """Has the model, if workers do not average with one another; calls `then` when it is there."""

    def push(self, member: Member, then: Callable[[Member], None]) -> None:
        """Before it says Ready."""

    def pull(self, member: Member, then: Callable[[Member], None]) -> None:
        """Once it may go on."""


class Averaging:
    """`over` is called when a worker may begin its next step, with what its forward waits for."""

    def __init__(
        self,
        members: Sequence[Member],
        clock: Clock,
        engine: Engine,
        network: Network,
        coordinator: Coordinator,
        over: Callable[[Member, Arriving], None],
        *,
        every: int,
        overlap: bool,
        answers_meanwhile: bool,
        asks_ahead: bool,
        decoupled: Callable[[Sequence[Member]], Arriving] | None = None,
        server: Server | None = None,
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
        self._clock, self._engine, self._network, self._over = clock, engine, network, over
        self._every, self._overlap, self._decoupled = every, overlap, decoupled
        self._answers_meanwhile, self._asks_ahead = answers_meanwhile, asks_ahead
        self._server, self.observers, self._finished = server, observers, finished
        self._exchanges: dict[int, _Exchange] = {}
        self._by_owner: dict[int, _Exchange] = {}

    def step_began(self, member: Member) -> None:
        for observer in self.observers:
            observer.on_begin(member.worker, self._clock.now)
        if self._asks_ahead and not (member.steps + 1) % self._every:
            self.coordinator.tell(member.worker, Request, member.clock + 1, member.life)

    def step_ended(self, member: Member) -> None:
        member.steps += 1
        for observer in self.observers:
            observer.on_step(member.worker, self._clock.now)
        if member.steps % self._every:
            self._over(member, THERE)
        elif member.pending is not None:
            member.wants = True
        else:
            self._report(member)
            if self._overlap:
                self._over(member, THERE)

    def _report(self, member: Member) -> None:
        if self._server is None:
            self._say_ready(member)
        else:
            self._server.push(member, self._say_ready)

    def _say_ready(self, member: Member) -> None:
        member.clock += 1
        member.pending = member.clock
        self.coordinator.tell(member.worker, Ready, member.clock, member.life)
        self._begin(member)

    def hear(self, worker: Worker, command: Assign | Commit | Abort | Skip | Heal) -> None:
        member = self.members[worker]
        if isinstance(command, Assign):
            if command.lives[command.members.index(worker)] == member.life:
                self._assigned(member, command)
        elif isinstance(command, Commit):
            self._committed(member, command)
        elif isinstance(command, Skip):
            self._ended(member, command.clock, THERE)
            self.sizes[1] += 1
        elif isinstance(command, Abort):
            self._give_up(member, command.gid)

    def flows_ended(self, owner: int) -> None:
        """The last byte of a half has left; it is there a latency later."""
        exchange = self._by_owner.pop(owner)
        exchange.owner = None
        self._engine.free_owner(owner)
        latency = self._network.both_ways([member.device for member in exchange.members])
        self._clock.at(self._clock.now + latency, self._half_done, exchange)

    def forget(self, member: Member) -> None:
        """It is gone; what it was in is given up by the scheduler. It may have another life."""
        member.life += 1
        member.pending, member.wants = None, False
        member.line.clear()

    def most(self) -> dict[tuple[int, int], BytesPerSecond]:
        """How fast each member of an exchange under way can send, by owner of flows and device."""
        found = {}
        for owner, exchange in self._by_owner.items():
            devices, size = [m.device for m in exchange.members], exchange.members[0].size
            half = self._network.half(devices, size, second=exchange.second)
            for source, most in zip(half.sources, half.most, strict=False):
                found[owner, source] = most
        return found

    def _assigned(self, member: Member, assign: Assign) -> None:
        if assign.gid not in self._exchanges:
            members = [self.members[worker] for worker in assign.members]
            self._exchanges[assign.gid] = _Exchange(assign, members)
        member.line.append(assign.gid)
        self._begin(member)

    def _begin(self, member: Member) -> None:
        is_ready = member.pending is not None or self._answers_meanwhile
        while is_ready and member.line:
            exchange = self._exchanges.get(member.line.popleft())
            if exchange is not None:  # else it is given up, and it has not heard so yet
                self._join_in(exchange)
                is_ready = False  # one after the other

    def _join_in(self, exchange: _Exchange) -> None:
        exchange.num_begun += 1
        if exchange.num_begun == len(exchange.members) and not exchange.is_given_up:
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
            self._send_half(exchange, devices)
            return
        # Nothing else matters to it: no event for each half.
        half = self._network.both_ways(devices) + self._network.half_time(devices, size)
        halves = 1 if self._decoupled is not None else 2
        exchange.second = True
        self._clock.at(self._clock.now + halves * half, self._half_done, exchange)

    def _send_half(self, exchange: _Exchange, devices: Sequence[int]) -> None:
        engine, now, size = self._engine, self._clock.now, exchange.members[0].size
        owner = exchange.owner = engine.new_owner()
        self._by_owner[owner] = exchange
        half = self._network.half(devices, size, second=exchange.second)
        if not half.targets:
            engine.flows_to_many(now, half.sources, half.size, half.most, half.weight, owner)
        for source, target in zip(half.sources, half.targets, strict=False):
            engine.flow_to_one(now, source, target, half.size, owner)

    def _half_done(self, exchange: _Exchange) -> None:
        if exchange.is_given_up:
            return
        if not exchange.second and self._decoupled is None:
            exchange.second = True
            self._send_half(exchange, [member.device for member in exchange.members])
            return
        assign = exchange.assign
        said = [
            (member.worker, assign.gid, True, life)
            for member, life in zip(exchange.members, assign.lives, strict=True)
            if member.life == life
        ]
        self.coordinator.tell_all(Done, said)

    def _committed(self, member: Member, commit: Commit) -> None:
        exchange = self._exchanges.get(commit.gid)
        if exchange is None:
            return
        place = commit.members.index(member.worker)
        is_here = member.life == exchange.assign.lives[place]
        for observer in self.observers if is_here else ():
            observer.on_applied(member.worker, commit.gid, self._clock.now)
        exchange.num_begun -= 1
        if exchange.num_begun == 0:
            self._exchanges.pop(commit.gid)
            clocks = [other.clock for other in exchange.members]
            self.sizes[len(clocks)] += 1
            self.spread.append(max(clocks) - min(clocks))
            if self._finished is not None:
                self._finished.append((exchange.assign, exchange.began, self._clock.now))
        if is_here:
            self._go_on(member, member.life, commit.ends[place], exchange.members)

    def _go_on(self, member: Member, life: int, clock: int, members: Sequence[Member]) -> None:
        """When what its next forward needs is on its way."""
        buckets = THERE if self._decoupled is None else self._decoupled(members)
        if buckets.last < float("inf"):
            self._ended(member, clock, buckets)
        elif member.life == life:  # over a link that is lost
            again, given = self._clock.now + AGAIN, (member, life, clock, members)
            self._clock.at(again, self._go_on, *given, priority=TRIES)

    def _give_up(self, member: Member, gid: int) -> None:
        if gid in member.line:
            member.line.remove(gid)
        exchange = self._exchanges.pop(gid, None)
        if exchange is None:
            return
        exchange.is_given_up = True
        if exchange.owner is not None:
            del self._by_owner[exchange.owner]
            self._engine.drop_flows(self._clock.now, exchange.owner)

    def _ended(self, member: Member, clock: int, buckets: Arriving) -> None:
        if clock != member.pending:
            return
        member.pending = None
        if self._server is not None:
            self._server.pull(member, lambda member: self._over(member, THERE))
        elif not self._overlap:
            self._over(member, buckets)
        elif member.wants:
            member.wants = False
            self._report(member)
            self._over(member, THERE)

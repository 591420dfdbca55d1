"""A parameter server in virtual time: push, wait for the scheduler, pull.

It models `run/averaging/parameter_server.py`. Pushes and pulls of all workers share the server's
connection. A push is announced, requested, sent and acknowledged; a pull is requested and sent. The
scheduler decides how far a worker may run ahead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polyrhythm.simulate.averaging import Observer, SimulatedWorker
from polyrhythm.simulate.clock import Clock
from polyrhythm.simulate.engine.engine import Engine
from polyrhythm.simulate.network import SimulatedNetwork


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    member: SimulatedWorker
    incarnation: int  # of the member at the start
    is_push: bool
    source: int
    target: int
    then: Callable[[SimulatedWorker], None]


class SimulatedParameterServer:
    """The parameter server on `device`, which holds the model."""

    def __init__(
        self,
        device: int,
        clock: Clock,
        engine: Engine,
        network: SimulatedNetwork,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._device, self._clock, self._engine, self._network = device, clock, engine, network
        self._observers = observers
        self._active: dict[int, _Transfer] = {}  # by owner of flows

    def push(self, member: SimulatedWorker, then: Callable[[SimulatedWorker], None]) -> None:
        """Send the worker's update, before its Ready; call `then` when it has arrived."""
        self._start(_Transfer(member, member.incarnation, True, member.device, self._device, then))

    def pull(self, member: SimulatedWorker, then: Callable[[SimulatedWorker], None]) -> None:
        """Send the model to the worker, once it may continue; call `then` when it has arrived."""
        self._start(_Transfer(member, member.incarnation, False, self._device, member.device, then))

    def flows_ended(self, owner: int) -> None:
        transfer = self._active.pop(owner)
        self._engine.free_owner(owner)
        latency = self._network.latency(transfer.source, transfer.target)
        if transfer.is_push:
            latency += self._network.latency(transfer.target, transfer.source)
        self._clock.at(self._clock.now + latency, self._arrived, transfer)

    def _start(self, transfer: _Transfer) -> None:
        if transfer.source == transfer.target or transfer.member.size <= 0:
            self._arrived(transfer)
            return
        latency = self._network.latency(transfer.member.device, self._device)
        if transfer.is_push:
            latency += self._network.latency(self._device, transfer.member.device)
        self._clock.at(self._clock.now + latency, self._send, transfer)

    def _send(self, transfer: _Transfer) -> None:
        if transfer.member.incarnation != transfer.incarnation:
            return
        owner, size = self._engine.new_owner(), transfer.member.size
        self._active[owner] = transfer
        source, target, regions = transfer.source, transfer.target, self._network.regions
        self._engine.state.sent[regions[source], regions[target]] += size
        endpoints = self._network.endpoints(source, target)
        self._engine.flow_to_one(self._clock.now, *endpoints, size, owner)

    def _arrived(self, transfer: _Transfer) -> None:
        member = transfer.member
        if member.incarnation != transfer.incarnation:
            return
        for observer in self._observers:
            observer.on_server_transfer(member.worker, transfer.is_push, self._clock.now)
        transfer.then(member)

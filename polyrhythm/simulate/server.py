"""A parameter server in virtual time: push, hear that one may go on, pull (`run/average`'s server).

Pushes and pulls of all workers share the server's connection. A push is announced, awaited, sent
and acknowledged; a pull is asked for. How far a worker may run ahead, the scheduler says.
"""

from typing import Any

from polyrhythm.simulate.averaging import Averaging, Member
from polyrhythm.simulate.engine.engine import THERE, Arriving


class ServedAveraging(Averaging):
    def __init__(self, *given: Any, server: int, **named: Any) -> None:
        """`server` is the device that holds the model."""
        super().__init__(*given, **named)
        self._server = server
        self._transfers: dict[int, tuple[Member, int, bool]] = {}  # by owner; whether it is a push

    def flows_ended(self, owner: int) -> None:
        member, life, is_push = self._transfers.pop(owner)
        self._engine.free_owner(owner)
        source, target = self._way(member, is_push)
        latency = self._network.latency(source, target)
        if is_push:
            latency += self._network.latency(target, source)
        self._clock.at(self._clock.now + latency, self._arrived, member, life, is_push)

    def _report(self, member: Member) -> None:
        self._transfer(member, is_push=True)

    def _ended(self, member: Member, clock: int, buckets: Arriving) -> None:
        if clock == member.pending:
            member.pending = None
            self._transfer(member, is_push=False)

    def _transfer(self, member: Member, *, is_push: bool) -> None:
        source, target = self._way(member, is_push)
        if source == target or member.size <= 0:
            self._arrived(member, member.life, is_push)
            return
        latency = self._network.latency(member.device, self._server)
        if is_push:
            latency += self._network.latency(self._server, member.device)
        self._clock.at(self._clock.now + latency, self._send, member, member.life, is_push)

    def _send(self, member: Member, life: int, is_push: bool) -> None:
        if member.life != life:
            return
        source, target = self._way(member, is_push)
        owner = self._engine.new_owner()
        self._transfers[owner] = member, member.life, is_push
        regions = self._network.regions
        self._engine.state.sent[regions[source], regions[target]] += member.size
        ends = self._network.ends(source, target)
        self._engine.flow_to_one(self._clock.now, *ends, member.size, owner)

    def _arrived(self, member: Member, life: int, is_push: bool) -> None:
        if member.life != life:
            return
        for observer in self.observers:
            observer.on_served(member.worker, is_push, self._clock.now)
        if is_push:
            self._say_ready(member)
        else:
            self._over(member, THERE)

    def _way(self, member: Member, is_push: bool) -> tuple[int, int]:
        return (member.device, self._server) if is_push else (self._server, member.device)

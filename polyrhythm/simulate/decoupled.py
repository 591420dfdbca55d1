"""Halves that hide: DeAR's all-reduce, and the second half of a group's average, bucket by bucket.

The gradients of a stage's last layers are there first, so its last bucket travels while the rest of
the backward runs; buckets leave one after the other, with receives posted ahead. When all have been
summed up and the optimizer has made its step, buckets are gathered in the order in which the next
forward needs them, and that waits for each only when it comes to it.
"""

from collections.abc import Callable, Sequence

from polyrhythm.simulate.averaging import Member, Observer
from polyrhythm.simulate.clock import TRIES, Clock
from polyrhythm.simulate.engine.engine import Arriving, Engine
from polyrhythm.simulate.network import Network
from polyrhythm.types import Seconds

AGAIN: Seconds = 1.0  # until one tries again to send over a link that is lost


def gathered(now: Seconds, busy: Seconds, latency: Seconds, num_buckets: int) -> Arriving:
    """When the buckets of a second half that begins now are there, one after the other."""
    first = now + latency + busy / num_buckets
    return Arriving(first, now + latency + busy, 1 / num_buckets)


def scattered(
    backwards: Sequence[tuple[Seconds, Seconds]], busy: Seconds, latency: Seconds, num_buckets: int
) -> Seconds:
    """When the last bucket of a first half is summed up everywhere.

    From when the last backward of each member began and ended; the last layers come first.
    """
    free = 0.0
    for j in range(num_buckets):
        there = max(began + (end - began) * (j + 1) / num_buckets for began, end in backwards)
        free = max(free, there) + busy / num_buckets
    return free + latency


class DecoupledAllReduce:
    """All replicas of each stage, without a coordinator: `pr.DistributedOptimizer`."""

    def __init__(
        self,
        clock: Clock,
        engine: Engine,
        network: Network,
        over: Callable[[Member, Arriving], None],
        num_buckets: int,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._observers, self._num_averages = observers, 0
        self._clock, self._engine, self._network, self._over = clock, engine, network, over
        self._num_buckets = num_buckets
        self._here: dict[int, list[Member]] = {}  # by stage
        self._ended: dict[int, list[Member]] = {}

    def welcome(self, member: Member) -> None:
        """It takes part from now on."""
        self._here.setdefault(member.worker.stage, []).append(member)
        self._ended.setdefault(member.worker.stage, [])

    def forget(self, member: Member) -> None:
        """It is gone: the others do without it."""
        stage = member.worker.stage
        if member in self._here.get(stage, ()):
            self._here[stage].remove(member)
            if member in self._ended[stage]:
                self._ended[stage].remove(member)
            self._meet(stage)

    def step_ended(self, member: Member) -> None:
        for observer in self._observers:
            observer.on_step(member.worker, self._clock.now)
        self._ended[member.worker.stage].append(member)
        self._meet(member.worker.stage)

    def _meet(self, stage: int) -> None:
        ended, members = self._ended[stage], list(self._here[stage])
        if not members or len(ended) < len(members):
            return
        self._ended[stage] = []
        self._exchange(members, [member.life for member in members])

    def _exchange(self, members: Sequence[Member], lives: Sequence[int]) -> None:
        members = _alive(members, lives)
        if not members:
            return
        devices, lives = [m.device for m in members], [m.life for m in members]
        busy = self._network.half_time(devices, members[0].size) if len(members) > 1 else 0.0
        if busy == float("inf"):  # over a link that is lost
            again = self._clock.now + AGAIN
            self._clock.at(again, self._exchange, members, lives, priority=TRIES)
            return
        latency = self._network.both_ways(devices) / 2
        backwards = [self._engine.last_action(member.run) for member in members]
        summed = scattered(backwards, busy, latency, self._num_buckets)
        for a, b, sent in self._network.sent(devices, members[0].size):
            self._engine.state.sent[a, b] += sent
        self._clock.at(summed, self._go_on, members, lives, busy, latency)

    def _go_on(
        self, members: Sequence[Member], lives: Sequence[int], busy: Seconds, latency: Seconds
    ) -> None:
        members = _alive(members, lives)
        if members:
            self._tell(members)
        for member in members:
            self._over(member, gathered(self._clock.now, busy, latency, self._num_buckets))

    def _tell(self, members: Sequence[Member]) -> None:
        self._num_averages += 1
        workers, weights = [m.worker for m in members], [1 / len(members)] * len(members)
        for observer in self._observers:
            observer.on_average(self._num_averages, workers, weights, self._clock.now)
            for worker in workers:
                observer.on_applied(worker, self._num_averages, self._clock.now)


def _alive(members: Sequence[Member], lives: Sequence[int]) -> list[Member]:
    """Those who have not been lost since."""
    return [member for member, life in zip(members, lives, strict=True) if member.life == life]

"""Halves that hide: DeAR's all-reduce, and the second half of a group's average, bucket by bucket.

The gradients of a stage's last layers are there first, so its last bucket travels while the rest of
the backward runs; buckets leave one after the other, with receives posted ahead. When all have been
summed up and the optimizer has made its step, buckets are gathered in the order in which the next
forward needs them, and that waits for each only when it comes to it.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from polyrhythm.simulate.averaging import Member, Observer
from polyrhythm.simulate.clock import AGAIN, TRIES, Clock
from polyrhythm.simulate.engine.engine import Arriving, Engine
from polyrhythm.simulate.network import Network
from polyrhythm.types import Seconds


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
    """All replicas of each stage, without a coordinator: `pr.DistributedOptimizer`.

    Nobody may be lost: training would end. Halves keep the speed that links have when they begin.
    """

    def __init__(
        self,
        members: Sequence[Member],
        clock: Clock,
        engine: Engine,
        network: Network,
        over: Callable[[Member, Arriving], None],
        num_buckets: int,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._clock, self._engine, self._network, self._over = clock, engine, network, over
        self._num_buckets, self._observers, self._num_averages = num_buckets, observers, 0
        self._shared = shared_bytes(members)
        self._here: dict[int, list[Member]] = {}  # by stage
        for member in members:
            self._here.setdefault(member.worker.stage, []).append(member)
        self._ended: dict[int, list[Member]] = {stage: [] for stage in self._here}

    def step_ended(self, member: Member) -> None:
        for observer in self._observers:
            observer.on_step(member.worker, self._clock.now)
        self._ended[member.worker.stage].append(member)
        self._meet(member.worker.stage)

    def leave(self, member: Member) -> None:
        """It has made all its steps."""
        self._here[member.worker.stage].remove(member)
        self._meet(member.worker.stage)

    def _meet(self, stage: int) -> None:
        ended, members = self._ended[stage], list(self._here[stage])
        if members and len(ended) == len(members):
            self._ended[stage] = []
            backwards = [self._engine.last_action(member.run) for member in members]
            self._exchange(members, backwards)

    def _exchange(
        self, members: Sequence[Member], backwards: Sequence[tuple[Seconds, Seconds]]
    ) -> None:
        devices, size = [m.device for m in members], members[0].size
        busy = self._network.half_time(devices, size) * self._shared(members)
        if busy == float("inf"):  # over a link that is lost: nothing hides any more
            again = self._clock.now + AGAIN
            late = [(again, again)] * len(members)
            self._clock.at(again, self._exchange, members, late, priority=TRIES)
            return
        latency = self._network.both_ways(devices) / 2
        summed = scattered(backwards, busy, latency, self._num_buckets)
        for a, b, sent in self._network.sent(devices, size):
            self._engine.state.sent[a, b] += sent
        self._clock.at(summed, self._go_on, members, busy, latency)

    def _go_on(self, members: Sequence[Member], busy: Seconds, latency: Seconds) -> None:
        self._num_averages += 1
        workers, weights = [m.worker for m in members], [1 / len(members)] * len(members)
        for observer in self._observers:
            observer.on_average(self._num_averages, workers, weights, self._clock.now)
            for worker in workers:
                observer.on_applied(worker, self._num_averages, self._clock.now)
        for member in members:
            self._over(member, gathered(self._clock.now, busy, latency, self._num_buckets))


def shared_bytes(members: Sequence[Member]) -> Callable[[Sequence[Member]], float]:
    """How many times as much their devices send at once, of those of some, as of one stage alone.

    A device with several stages averages all of them at the same time, over one connection.
    """
    total: Counter[int] = Counter()
    for member in members:
        total[member.device] += member.size  # type: ignore[assignment]

    def times(some: Sequence[Member]) -> float:
        return max(total[member.device] / member.size if member.size else 1.0 for member in some)

    return times

"""Halves that hide: DeAR's all-reduce, and the second half of a group's average, bucket by bucket.

The gradients of a stage's last layers are there first, so its last bucket travels while the rest of
the backward runs; buckets leave one after the other, with receives posted ahead. When all have been
summed up and the optimizer has made its step, buckets are gathered in the order in which the next
forward needs them, and that waits for each only when it comes to it.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from polyrhythm.simulate.averaging import Observer, SimulatedWorker
from polyrhythm.simulate.clock import PRIORITY_RETRY, RETRY_INTERVAL, Clock
from polyrhythm.simulate.engine.engine import BucketArrivals, Engine
from polyrhythm.simulate.network import SimulatedNetwork
from polyrhythm.types import Seconds


def all_gather_arrivals(
    now: Seconds, busy: Seconds, latency: Seconds, num_buckets: int
) -> BucketArrivals:
    """When the buckets of a second half that begins now are there, one after the other."""
    first = now + latency + busy / num_buckets
    return BucketArrivals(first, now + latency + busy, 1 / num_buckets)


def reduce_scatter_end(
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
        members: Sequence[SimulatedWorker],
        clock: Clock,
        engine: Engine,
        network: SimulatedNetwork,
        on_step_done: Callable[[SimulatedWorker, BucketArrivals], None],
        num_buckets: int,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._clock, self._engine, self._network, self._on_step_done = (
            clock,
            engine,
            network,
            on_step_done,
        )
        self._num_buckets, self._observers, self._num_averages = num_buckets, observers, 0
        self._traffic_factor = traffic_factor(members)
        self._members: dict[int, list[SimulatedWorker]] = {}  # by stage
        for member in members:
            self._members.setdefault(member.worker.stage, []).append(member)
        self._ended: dict[int, list[SimulatedWorker]] = {stage: [] for stage in self._members}

    def step_ended(self, member: SimulatedWorker) -> None:
        for observer in self._observers:
            observer.on_step(member.worker, self._clock.now)
        self._ended[member.worker.stage].append(member)
        self._exchange_if_all_ended(member.worker.stage)

    def leave(self, member: SimulatedWorker) -> None:
        """It has made all its steps."""
        self._members[member.worker.stage].remove(member)
        self._exchange_if_all_ended(member.worker.stage)

    def _exchange_if_all_ended(self, stage: int) -> None:
        ended, members = self._ended[stage], list(self._members[stage])
        if members and len(ended) == len(members):
            self._ended[stage] = []
            backwards = [self._engine.last_action(member.run) for member in members]
            self._exchange(members, backwards)

    def _exchange(
        self, members: Sequence[SimulatedWorker], backwards: Sequence[tuple[Seconds, Seconds]]
    ) -> None:
        devices, size = [m.device for m in members], members[0].size
        busy = self._network.phase_time(devices, size) * self._traffic_factor(members)
        if busy == float("inf"):  # over a link that is lost: nothing hides any more
            again = self._clock.now + RETRY_INTERVAL
            late = [(again, again)] * len(members)
            self._clock.at(again, self._exchange, members, late, priority=PRIORITY_RETRY)
            return
        latency = self._network.max_round_trip(devices) / 2
        summed = reduce_scatter_end(backwards, busy, latency, self._num_buckets)
        for a, b, sent in self._network.sent(devices, size):
            self._engine.state.sent[a, b] += sent
        self._clock.at(summed, self._finish, members, busy, latency)

    def _finish(self, members: Sequence[SimulatedWorker], busy: Seconds, latency: Seconds) -> None:
        self._num_averages += 1
        workers, weights = [m.worker for m in members], [1 / len(members)] * len(members)
        for observer in self._observers:
            observer.on_average(self._num_averages, workers, weights, self._clock.now)
            for worker in workers:
                observer.on_applied(worker, self._num_averages, self._clock.now)
        for member in members:
            self._on_step_done(
                member, all_gather_arrivals(self._clock.now, busy, latency, self._num_buckets)
            )


def traffic_factor(
    members: Sequence[SimulatedWorker],
) -> Callable[[Sequence[SimulatedWorker]], float]:
    """How many times as much their devices send at once, of those of some, as of one stage alone.

    A device with several stages averages all of them at the same time, over one connection.
    """
    total: Counter[int] = Counter()
    for member in members:
        total[member.device] += member.size  # type: ignore[assignment]

    def times(some: Sequence[SimulatedWorker]) -> float:
        return max(total[member.device] / member.size if member.size else 1.0 for member in some)

    return times

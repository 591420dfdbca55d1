"""Hidden communication: DeAR's all-reduce, and the all-gather of a group's average, by buckets.

The gradients of a stage's last layers are ready first, so its last bucket is sent while the rest of
backward runs; buckets are sent one after another, with receives posted ahead. When all are reduced
and the optimizer has made its step, buckets are gathered in the order in which the next forward
needs them; the forward waits for each bucket just before it needs it.
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
    """Arrival times of the buckets of an all-gather that starts now."""
    first = now + latency + busy / num_buckets
    return BucketArrivals(first, now + latency + busy, 1 / num_buckets)


def reduce_scatter_end(
    backwards: Sequence[tuple[Seconds, Seconds]], busy: Seconds, latency: Seconds, num_buckets: int
) -> Seconds:
    """Time at which the last bucket of a reduce-scatter is reduced everywhere.

    `backwards` are start and end of each member's last backward; the last layers come first.
    """
    free = 0.0
    for j in range(num_buckets):
        ready = max(start + (end - start) * (j + 1) / num_buckets for start, end in backwards)
        free = max(free, ready) + busy / num_buckets
    return free + latency


class DecoupledAllReduce:
    """Averages all replicas of each stage without a coordinator: `pr.DistributedOptimizer`.

    Workers are fixed: a loss ends the epoch. A phase keeps the link speeds of its start.
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
        self._clock, self._engine, self._network = clock, engine, network
        self._on_step_done = on_step_done
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
        """Remove a worker that has finished all its steps."""
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
        if busy == float("inf"):  # a link is lost: at the retry, nothing is hidden any more
            retry_at = self._clock.now + RETRY_INTERVAL
            backwards = [(retry_at, retry_at)] * len(members)
            self._clock.at(retry_at, self._exchange, members, backwards, priority=PRIORITY_RETRY)
            return
        latency = self._network.max_round_trip(devices) / 2
        reduced = reduce_scatter_end(backwards, busy, latency, self._num_buckets)
        for a, b, sent in self._network.sent(devices, size):
            self._engine.state.sent[a, b] += sent
        self._clock.at(reduced, self._finish, members, busy, latency)

    def _finish(self, members: Sequence[SimulatedWorker], busy: Seconds, latency: Seconds) -> None:
        self._num_averages += 1
        workers = [m.worker for m in members]
        for observer in self._observers:
            observer.on_average(self._num_averages, workers, self._clock.now)
            for worker in workers:
                observer.on_applied(worker, self._num_averages, self._clock.now)
        for member in members:
            self._on_step_done(
                member, all_gather_arrivals(self._clock.now, busy, latency, self._num_buckets)
            )


def traffic_factor(
    members: Sequence[SimulatedWorker],
) -> Callable[[Sequence[SimulatedWorker]], float]:
    """A function: how many times as much devices send at once, compared to one stage alone.

    A device with several stages averages all of them at the same time, over one connection.
    """
    total: Counter[int] = Counter()
    for member in members:
        total[member.device] += member.size  # type: ignore[assignment]

    def factor(group: Sequence[SimulatedWorker]) -> float:
        return max(total[member.device] / member.size if member.size else 1.0 for member in group)

    return factor

"""How often a cache of process groups would hold the group that is needed.

A process group costs sockets and threads, so each worker keeps only those it used last. A group is
a hit only if all its members still keep it. The groups are those of the policy `age`, run in
virtual time with workers of unequal speed.
"""

import heapq
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator

from polyrhythm.describe.scenario import Scenario
from polyrhythm.describe.slowness import Slowness, load_traces
from polyrhythm.sync.policies.age import Age
from polyrhythm.types import Group, Seconds, Worker

Members = tuple[Worker, ...]

# In steps of a worker that nothing slows.
_FORWARD, _BACKWARD = 1 / 3, 2 / 3
_JITTER = 0.03  # of each: no device takes the same time twice
_AVERAGING = 0.02


class GroupCache:
    """The `size` groups that each worker used last."""

    def __init__(self, size: float) -> None:
        self._size = size
        self._kept: defaultdict[Worker, OrderedDict[Members, None]] = defaultdict(OrderedDict)

    def use(self, members: Members) -> bool:
        """Return whether all members kept the group; afterwards they do."""
        is_hit = all(members in self._kept[worker] for worker in members)
        for worker in members:
            kept = self._kept[worker]
            kept[members] = None
            kept.move_to_end(members)
            if len(kept) > self._size:
                kept.popitem(last=False)
        return is_hit


def hit_rate(groups: Iterable[Members], size: float) -> float:
    cache = GroupCache(size)
    hits = [cache.use(members) for members in groups]
    return sum(hits) / len(hits)


def groups_of_age(scenario: Scenario, num_workers: int, duration: Seconds) -> Iterator[Members]:
    """Yield the groups that average, in the order in which they form; a step takes a second."""
    policy = Age(num_workers)
    machines = _Machines(scenario, num_workers)
    # (time, 0 for the end of a group or 1 for a ready worker, worker, group)
    events: list[tuple[Seconds, int, Worker, Group | None]] = []
    for worker in machines.workers:
        policy.on_join(worker, "node", 0.0)
        heapq.heappush(events, (machines.step(worker, 0.0), 1, worker, None))
    while (now := min(policy.next_timer(), events[0][0] if events else duration)) < duration:
        if policy.next_timer() <= now:
            formed = policy.on_timer(now)
        else:
            _, _, worker, done = heapq.heappop(events)
            if done is None:
                formed = policy.on_ready(worker, now)
            else:
                formed = policy.on_done(done, True, now)
                for member in done.members:
                    heapq.heappush(events, (now + machines.step(member, now), 1, member, None))
        for group in formed:
            heapq.heappush(events, (now + _AVERAGING, 0, group.members[0], group))
            if len(group.members) > 1:
                yield group.members


class _Machines:
    """How long each worker's steps take."""

    def __init__(self, scenario: Scenario, num_workers: int) -> None:
        self.workers = [Worker(0, pipeline) for pipeline in range(num_workers)]
        traces = load_traces(scenario)
        self._slowness = {
            worker: Slowness.of(scenario, f"{worker}", index=worker.pipeline, traces=traces)
            for worker in self.workers
        }
        self._chance = random.Random(f"{scenario.seed} jitter")

    def step(self, worker: Worker, now: Seconds) -> Seconds:
        duration = 0.0
        for work in (_FORWARD, _BACKWARD):
            work *= self._chance.uniform(1 - _JITTER, 1 + _JITTER)
            delay = self._slowness[worker].delay(now + duration, work, _FORWARD + _BACKWARD)
            duration += delay + work
        return duration

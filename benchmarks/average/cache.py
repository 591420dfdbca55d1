"""How often a cache of process groups would have the one that is asked for.

A group of processes costs sockets and threads, so a worker keeps a number of them, those it used
last. One is of use only if all its members still have it. Which groups are asked for, `age` says:
the very policy that runs, in virtual time, with workers of unequal speed.
"""

import heapq
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from polyrhythm.describe.scenario import Scenario
from polyrhythm.describe.slowness import Slowness, load_traces
from polyrhythm.sync.policies.age import Age
from polyrhythm.types import Group, Seconds, Worker

Members = tuple[Worker, ...]

# In steps of a worker that nothing slows.
_FORWARD, _BACKWARD = 1 / 3, 2 / 3
_JITTER = 0.03  # of each: no machine takes the same time twice
_AVERAGING = 0.02


class GroupCache:
    """Of each worker, the groups it used last, `bound` at the most."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._kept: defaultdict[Worker, OrderedDict[Members, None]] = defaultdict(OrderedDict)

    def use(self, members: Members) -> bool:
        """Whether all members had it; they have it now."""
        is_hit = all(members in self._kept[worker] for worker in members)
        for worker in members:
            kept = self._kept[worker]
            kept[members] = None
            kept.move_to_end(members)
            if len(kept) > self._bound:
                kept.popitem(last=False)
        return is_hit


def hit_rate(groups: Iterable[Members], bound: float) -> float:
    cache = GroupCache(bound)
    hits = [cache.use(members) for members in groups]
    return sum(hits) / len(hits)


def groups_of_age(scenario: Scenario, num_workers: int, duration: Seconds) -> Iterator[Members]:
    """Those that average, in the order in which they form; a step takes a second."""
    policy = Age(num_workers)
    machines = _Machines(scenario, num_workers)
    # (when, 0 for the end of a group, then who is ready)
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


@dataclass(init=False, slots=True)
class _Machines:
    """How long the steps of workers take."""

    workers: list[Worker]
    _slowness: dict[Worker, Slowness]
    _chance: random.Random

    def __init__(self, scenario: Scenario, num_workers: int) -> None:
        self.workers = [Worker(0, pipeline) for pipeline in range(num_workers)]
        traces = load_traces(scenario)
        self._slowness = {
            worker: Slowness.of(scenario, f"{worker}", index=worker.pipeline, traces=traces)
            for worker in self.workers
        }
        self._chance = random.Random(f"{scenario.seed} jitter")

    def step(self, worker: Worker, now: Seconds) -> Seconds:
        took = 0.0
        for work in (_FORWARD, _BACKWARD):
            work *= self._chance.uniform(1 - _JITTER, 1 + _JITTER)
            took += self._slowness[worker].delay(now + took, work, _FORWARD + _BACKWARD) + work
        return took

"""Drive one policy in virtual time, as a scheduler would: timers first, then by worker."""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from polyrhythm.sync.policy import Policy
from polyrhythm.types import Group, Seconds, Worker


class FormedGroup(NamedTuple):
    at: Seconds
    group: Group
    waited: Seconds  # the longest of its members

    @property
    def pipelines(self) -> list[int]:
        return [worker.pipeline for worker in self.group.members]


def workers(num_workers: int) -> list[Worker]:
    return [Worker(0, pipeline) for pipeline in range(num_workers)]


def join_all(policy: Policy, num_workers: int, now: Seconds = 0.0) -> None:
    for worker in workers(num_workers):
        assert policy.on_join(worker, "node", now) == []


def replay(policy: Policy, ready_at: Sequence[Seconds]) -> list[FormedGroup]:
    """Make each worker (by index) ready once; return the groups until no timer is left."""
    return train(policy, len(ready_at), lambda worker: ready_at[worker.pipeline], num_steps=1)


def train(
    policy: Policy,
    num_workers: int,
    step: Callable[[Worker], Seconds],
    *,
    num_steps: float = math.inf,  # of each worker
    num_groups: float = math.inf,
    averaging: Seconds = 0.0,
    joined: bool = False,
) -> list[FormedGroup]:
    """Simulate workers that compute for `step`, report ready, wait for a group, and average."""
    if not joined:
        join_all(policy, num_workers)
    formed: list[FormedGroup] = []
    ready_since: dict[Worker, Seconds] = {}
    left = dict.fromkeys(workers(num_workers), num_steps)
    # (when, 0 for the end of a group, then who is ready)
    events: list[tuple[Seconds, int, Worker, Group | None]] = []

    def begin(members: Iterable[Worker], now: Seconds) -> None:
        for worker in members:
            if left[worker] > 0:
                left[worker] -= 1
                heapq.heappush(events, (now + step(worker), 1, worker, None))

    last_timer = -math.inf  # of those in a row that formed no group
    begin(workers(num_workers), 0.0)
    while len(formed) < num_groups:
        timer = policy.next_timer()
        if timer == math.inf and not events:
            break
        if not events or timer <= events[0][0]:
            assert timer > last_timer, "a timer that does nothing"
            now = timer
            groups = policy.on_timer(now)
            last_timer = -math.inf if groups else timer
        else:
            now, _, worker, done = heapq.heappop(events)
            if done is None:
                ready_since[worker] = now
                groups = policy.on_ready(worker, now)
            else:
                groups = policy.on_done(done, True, now)
                begin(done.members, now)
        for group in groups:
            waited = now - min(ready_since.pop(worker) for worker in group.members)
            formed.append(FormedGroup(now, group, waited))
            heapq.heappush(events, (now + averaging, 0, group.members[0], group))
    return formed

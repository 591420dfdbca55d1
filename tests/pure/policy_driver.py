"""Drivers of one policy in virtual time: `train` for ready reports, `PolicyJob` for churn, too.

Both act as a scheduler does; at equal times `train` takes timers first, then the lowest worker.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import strategies as st

from polyrhythm.sync.policies.pairwise import Pairwise
from polyrhythm.sync.policies.random_groups import RandomGroups
from polyrhythm.sync.policies.smart import SmartGroups
from polyrhythm.sync.policies.ssp import BoundedStaleness
from polyrhythm.sync.policies.static import StaticGroups
from polyrhythm.sync.policy import Policy
from polyrhythm.types import Group, Seconds, Worker


class FormedGroup(NamedTuple):
    at: Seconds
    group: Group
    waited: Seconds  # longest wait of its members

    @property
    def pipelines(self) -> list[int]:
        return [worker.pipeline for worker in self.group.members]


def workers(num_workers: int) -> list[Worker]:
    return [Worker(0, pipeline) for pipeline in range(num_workers)]


def join_all(policy: Policy, num_workers: int, now: Seconds = 0.0) -> None:
    for worker in workers(num_workers):
        assert policy.on_join(worker, "node", now) == []


def replay(policy: Policy, ready_at: Sequence[Seconds]) -> list[FormedGroup]:
    """Let each worker (by index) be ready once; run until no timer is left."""
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
    """Run workers that compute for `step`, report ready, wait for a group, average, and repeat."""
    if not joined:
        join_all(policy, num_workers)
    formed: list[FormedGroup] = []
    ready_since: dict[Worker, Seconds] = {}
    left = dict.fromkeys(workers(num_workers), num_steps)
    # (time, 0 for the end of a group or 1 for ready, worker, group)
    events: list[tuple[Seconds, int, Worker, Group | None]] = []

    def begin(members: Iterable[Worker], now: Seconds) -> None:
        for worker in members:
            if left[worker] > 0:
                left[worker] -= 1
                heapq.heappush(events, (now + step(worker), 1, worker, None))

    last_timer = -math.inf  # the last one, if it formed no group
    begin(workers(num_workers), 0.0)
    while len(formed) < num_groups:
        timer = policy.next_timer()
        if timer == math.inf and not events:
            break
        if not events or timer <= events[0][0]:
            assert timer > last_timer, "a timer repeats without effect"
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


MAKE: dict[str, Callable[[int], Policy]] = {
    "static": StaticGroups,
    "random": lambda n: RandomGroups(seed=n),
    "smart": lambda n: SmartGroups(seed=n),
    "pairwise": lambda n: Pairwise(seed=n),
    "ssp": lambda n: BoundedStaleness(n, staleness=1),
}


@dataclass
class PolicyJob:
    """A job in virtual time around a policy; it checks the policy's contract after each event."""

    policy: Policy
    duration: Callable[[Worker, int], Seconds]  # of each step
    num_steps: int
    exchange: Seconds = 0.5  # duration of an average
    fails: Callable[[int], bool] = lambda nth: False  # whether the n-th average fails
    reports_lone: bool = True  # whether a group of one is reported as done
    check: Callable[[], None] = lambda: None  # called after each event
    now: Seconds = 0.0
    formed: list[tuple[Seconds, Group]] = field(default_factory=list)
    steps: dict[Worker, int] = field(default_factory=dict)  # finished, of present workers
    waits: dict[Worker, list[Seconds]] = field(default_factory=dict)
    _group_of: dict[Worker, Group] = field(default_factory=dict)
    _ready_since: dict[Worker, Seconds] = field(default_factory=dict)
    _running: list[Group] = field(default_factory=list)
    _heap: list[tuple[Seconds, int, Callable[[], object]]] = field(default_factory=list)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)
    _num_averages: int = 0

    def at(self, time: Seconds, callback: Callable[[], object]) -> None:
        heapq.heappush(self._heap, (time, next(self._order), callback))

    def run(self) -> "PolicyJob":
        while self._heap:
            time, _, callback = heapq.heappop(self._heap)
            while self.policy.next_timer() <= time:
                self.now = max(self.now, self.policy.next_timer())
                self._accept(self.policy.on_timer(self.now))
            self.now = time
            callback()
            self._start_averages()
            self.check()
        assert not self.steps, f"deadlock: {self.steps}, groups {self._group_of}"
        return self

    def join(self, worker: Worker, node: str) -> None:
        self.steps[worker] = 0
        self.waits[worker] = []
        self._accept(self.policy.on_join(worker, node, self.now))
        self.at(self.now, lambda: worker in self.steps and self._begin_step(worker))

    def leave(self, worker: Worker) -> None:
        if worker not in self.steps:
            return
        again: list[Worker] = []
        while group := self._group_of.get(worker):  # the end of one may start another
            again += self._close(group, ok=False)
        del self.steps[worker]
        self._ready_since.pop(worker, None)
        self._accept(self.policy.on_leave(worker, self.now))
        self._report_again(again)

    def _begin_step(self, worker: Worker) -> None:
        step = self.steps[worker]
        duration = self.duration(worker, step)
        self.at(self.now + duration, lambda: self._end_compute(worker, step))
        self._accept(self.policy.on_request(worker, self.now))

    def _end_compute(self, worker: Worker, step: int) -> None:
        if self.steps.get(worker) == step:  # else it has left
            self._ready_since[worker] = self.now
            self._accept(self.policy.on_ready(worker, self.now))
            group = self._group_of.get(worker)
            if group and len(group.members) == 1 and worker in self._ready_since:
                self._finish(group, ok=True)  # formed before it was ready

    def _accept(self, groups: list[Group]) -> None:
        for group in groups:
            assert group.why
            assert list(group.members) == sorted(set(group.members))
            for member in group.members:
                assert member in self.steps, f"{member} has not joined"
                assert member not in self._group_of, f"{member} is in two groups"
                self._group_of[member] = group
            self.formed.append((self.now, group))
        for group in groups:
            if len(group.members) == 1 and group.members[0] in self._ready_since:
                self._finish(group, ok=True)

    def _start_averages(self) -> None:
        for group in list(self._group_of.values()):
            started = any(group is running for running in self._running)
            waits_for = [member for member in group.members if not self._is_passive(member)]
            if len(group.members) == 1 or started or not self._ready_since.keys() >= {*waits_for}:
                continue
            self._running.append(group)
            ok = not self.fails(self._num_averages)
            self._num_averages += 1
            self.at(self.now + self.exchange, lambda g=group, ok=ok: self._averaged(g, ok))

    def _is_passive(self, worker: Worker) -> bool:
        return isinstance(self.policy, Pairwise) and worker not in self._ready_since

    def _averaged(self, group: Group, ok: bool) -> None:
        if any(group is running for running in self._running):  # else a member has left
            self._finish(group, ok)

    def _finish(self, group: Group, ok: bool) -> None:
        members = self._close(group, ok=ok)
        if not ok:
            self._report_again(members)
            return
        ended = [member for member in members if member in self._ready_since]
        for member in ended:
            self.waits[member].append(self.now - self._ready_since.pop(member))
            self.steps[member] += 1
        for member in ended:
            if self.steps[member] == self.num_steps:
                self.leave(member)
            else:
                self._begin_step(member)

    def _close(self, group: Group, *, ok: bool) -> tuple[Worker, ...]:
        self._running = [running for running in self._running if running is not group]
        for member in group.members:
            del self._group_of[member]
        if len(group.members) > 1 or self.reports_lone:
            self._accept(self.policy.on_done(group, ok, self.now))
        return group.members

    def _report_again(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            if worker in self.steps and worker not in self._group_of:
                self._accept(self.policy.on_request(worker, self.now))
            if worker in self._ready_since and worker not in self._group_of:
                self._accept(self.policy.on_ready(worker, self.now))


def job_of(
    policy: Policy, nodes: list[int], duration: Callable[[Worker, int], Seconds], num_steps: int
) -> PolicyJob:
    """A job whose workers, one per entry of `nodes`, join at the start."""
    job = PolicyJob(policy, duration, num_steps)
    for pipeline, node in enumerate(nodes):
        job.at(0.0, lambda p=pipeline, n=node: job.join(Worker(0, p), f"n{n}"))
    return job


def random_durations(seed: int) -> Callable[[Worker, int], Seconds]:
    """Few different durations, so that many events coincide, and one straggler."""
    rng = random.Random(seed)
    times: dict[tuple[Worker, int], Seconds] = {}

    def duration(worker: Worker, step: int) -> Seconds:
        slow = 5.0 if worker.pipeline == seed % 7 else 1.0
        return times.setdefault((worker, step), slow * rng.choice([0.5, 1.0, 1.0, 3.0]))

    return duration


node_lists = st.lists(st.integers(0, 3), min_size=1, max_size=9)


def connected(cliques: list[set[int]], nodes: set[int]) -> bool:
    """Whether cliques connect all nodes, by flooding from one node."""
    if not nodes:
        return True
    reached = {min(nodes)}
    for _ in cliques:
        for clique in cliques:
            if clique & reached:
                reached |= clique
    return nodes <= reached

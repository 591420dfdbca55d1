"""What holds for every policy: each step ends, groups do not overlap, nobody waits for ever."""

import heapq
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.pairwise import Pairwise
from polyrhythm.sync.policies.random_groups import RandomGroups
from polyrhythm.sync.policies.smart import SmartGroups
from polyrhythm.sync.policies.ssp import BoundedStaleness
from polyrhythm.sync.policies.static import StaticGroups
from polyrhythm.sync.policy import Policy
from polyrhythm.types import Group, Seconds, Worker

MAKE: dict[str, Callable[[int], Policy]] = {
    "static": StaticGroups,
    "random": lambda n: RandomGroups(seed=n),
    "smart": lambda n: SmartGroups(seed=n),
    "pairwise": lambda n: Pairwise(seed=n),
    "ssp": lambda n: BoundedStaleness(n, staleness=1),
}


@dataclass
class Job:
    """A job in virtual time around a policy; it checks what the policy promises as it goes."""

    policy: Policy
    duration: Callable[[Worker, int], Seconds]  # of each step
    num_steps: int
    exchange: Seconds = 0.5  # what an average takes
    fails: Callable[[int], bool] = lambda nth: False  # whether the n-th average fails
    reports_lone: bool = True  # whether a group of one is reported as done
    check: Callable[[], None] = lambda: None  # called whenever something has happened
    now: Seconds = 0.0
    formed: list[tuple[Seconds, Group]] = field(default_factory=list)
    steps: dict[Worker, int] = field(default_factory=dict)  # that have ended; who is here
    waits: dict[Worker, list[Seconds]] = field(default_factory=dict)
    _group_of: dict[Worker, Group] = field(default_factory=dict)
    _ready_since: dict[Worker, Seconds] = field(default_factory=dict)
    _running: list[Group] = field(default_factory=list)
    _heap: list[tuple[Seconds, int, Callable[[], object]]] = field(default_factory=list)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)
    _num_averages: int = 0

    def at(self, when: Seconds, happens: Callable[[], object]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), happens))

    def run(self) -> "Job":
        while self._heap:
            when, _, happens = heapq.heappop(self._heap)
            while self.policy.next_timer() <= when:
                self.now = max(self.now, self.policy.next_timer())
                self._accept(self.policy.on_timer(self.now))
            self.now = when
            happens()
            self._start_averages()
            self.check()
        assert not self.steps, f"wait for ever: {self.steps}, groups {self._group_of}"
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
        while group := self._group_of.get(worker):  # the end of one may be another's beginning
            again += self._close(group, ok=False)
        del self.steps[worker]
        self._ready_since.pop(worker, None)
        self._accept(self.policy.on_leave(worker, self.now))
        self._report_again(again)

    def _begin_step(self, worker: Worker) -> None:
        step = self.steps[worker]
        took = self.duration(worker, step)
        self.at(self.now + took, lambda: self._end_compute(worker, step))
        self._accept(self.policy.on_request(worker, self.now))

    def _end_compute(self, worker: Worker, step: int) -> None:
        if self.steps.get(worker) == step:  # else it has left meanwhile
            self._ready_since[worker] = self.now
            self._accept(self.policy.on_ready(worker, self.now))
            group = self._group_of.get(worker)
            if group and len(group.members) == 1 and worker in self._ready_since:
                self._finish(group, ok=True)  # it had its answer ahead

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
) -> Job:
    """All workers, pipeline by pipeline on the given nodes, from the beginning."""
    job = Job(policy, duration, num_steps)
    for pipeline, node in enumerate(nodes):
        job.at(0.0, lambda p=pipeline, n=node: job.join(Worker(0, p), f"n{n}"))
    return job


def random_durations(seed: int) -> Callable[[Worker, int], Seconds]:
    """Few different times, so that many things happen at once, and a worker that is slow."""
    draw = random.Random(seed)
    times: dict[tuple[Worker, int], Seconds] = {}

    def duration(worker: Worker, step: int) -> Seconds:
        slow = 5.0 if worker.pipeline == seed % 7 else 1.0
        return times.setdefault((worker, step), slow * draw.choice([0.5, 1.0, 1.0, 3.0]))

    return duration


node_lists = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@pytest.mark.parametrize("name", MAKE)
@given(nodes=node_lists, seed=st.integers(0, 99), reports_lone=st.booleans())
def test_every_step_ends_and_groups_never_overlap(
    name: str, nodes: list[int], seed: int, reports_lone: bool
) -> None:
    job = job_of(MAKE[name](len(nodes)), nodes, random_durations(seed), num_steps=6)
    job.reports_lone = reports_lone
    job.run()
    if len(nodes) == 1:
        assert all(len(group.members) == 1 for _, group in job.formed)


@pytest.mark.parametrize("name", MAKE)
@given(
    nodes=node_lists,
    seed=st.integers(0, 99),
    leaves=st.lists(st.tuples(st.integers(0, 8), st.floats(0, 12)), max_size=4),
    joins=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 12)), max_size=3),
    failing=st.sets(st.integers(0, 12), max_size=4),
)
def test_no_deadlock_with_churn_and_failing_averages(
    name: str,
    nodes: list[int],
    seed: int,
    leaves: list[tuple[int, float]],
    joins: list[tuple[int, float]],
    failing: set[int],
) -> None:
    job = job_of(MAKE[name](len(nodes)), nodes, random_durations(seed), num_steps=5)
    job.fails = failing.__contains__
    for pipeline, when in leaves:
        job.at(when, lambda p=pipeline: job.leave(Worker(0, p)))
    for nth, (node, when) in enumerate(joins):
        job.at(when, lambda p=20 + nth, n=node: job.join(Worker(0, p), f"n{n}"))
    assert not job.run().steps, "nobody is left"


@pytest.mark.parametrize("name", [name for name in MAKE if name != "ssp"])
def test_all_workers_are_connected_by_their_groups(name: str) -> None:
    nodes = [0, 0, 0, 0, 1, 1, 1, 2, 2]
    job = job_of(MAKE[name](len(nodes)), nodes, random_durations(3), num_steps=30).run()
    reached = {Worker(0, 0)}
    for _ in nodes:
        reached.update(m for _, g in job.formed if reached & set(g.members) for m in g.members)
    assert len(reached) == len(nodes)


@pytest.mark.parametrize("name", ["static", "random", "smart", "pairwise", "ssp"])
def test_reports_of_unknown_workers_and_second_joins_are_refused(name: str) -> None:
    policy, worker = MAKE[name](2), Worker(0, 0)
    report = policy.on_request if name in ("random", "smart") else policy.on_ready
    with pytest.raises(PolicyError, match="s0p0 has not joined"):
        report(worker, 0.0)
    with pytest.raises(PolicyError, match="s0p0 has not joined"):
        policy.on_leave(worker, 0.0)
    policy.on_join(worker, "n0", 0.0)
    with pytest.raises(PolicyError, match=r"s0p0 .*(twice|already)"):
        policy.on_join(worker, "n0", 0.0)


SCRIPT = """
from tests.pure.test_policy_contract import MAKE, job_of, random_durations
nodes = [0, 0, 1, 1, 2, 2, 2]
for name, make in MAKE.items():
    print(name, job_of(make(7), nodes, random_durations(2), 8).run().formed)
"""


def test_the_same_events_give_the_same_groups_for_any_hash_seed() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] != ""

"""Smart groups: divisions cover idle workers, groups keep one order, stragglers block no group."""

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.smart import HALVE_GAPS_EVERY, GroupBuffers, SmartGroups
from polyrhythm.types import Group, Seconds, Worker
from tests.pure.policy_driver import PolicyJob, job_of, node_lists, random_durations


class RecordingBuffers(GroupBuffers):
    """Records all divisions, with the idle workers and the request counts before each."""

    def __init__(self, policy: SmartGroups) -> None:
        super().__init__()
        self.policy = policy
        self.divisions: list[tuple[list[Group], set[Worker], dict[Worker, int]]] = []

    def plan(self, groups: Iterable[Group]) -> list[Group]:
        planned = list(groups)
        idle = {w for w in self.ledger.workers() if self.ledger.is_waiting(w) and not self.depth(w)}
        self.divisions.append((planned, idle, dict(self.policy._num_requests)))
        return super().plan(planned)


def recorded_job(
    nodes: list[int], seed: int, num_steps: int = 12
) -> tuple[PolicyJob, RecordingBuffers]:
    policy = SmartGroups(seed=seed)
    policy._buffers = planning = RecordingBuffers(policy)
    job = job_of(policy, nodes, random_durations(seed), num_steps)
    return job, planning


def split(planned: list[Group]) -> tuple[list[Group], list[Group]]:
    """The first groups of a division, and the second ones."""
    second = [group for group in planned if ": all of" in group.why]
    return [group for group in planned if group not in second], second


@given(node_lists, st.integers(0, 999))
def test_division_covers_each_idle_fast_worker_once(nodes: list[int], seed: int) -> None:
    job, planning = recorded_job(nodes, seed)
    job.run()
    assert planning.divisions
    for planned, idle, requests in planning.divisions:
        most = max(requests[w] for w in idle)
        fast = {worker for worker in idle if most - requests[worker] < 3}
        first, second = split(planned)
        covered = sorted(member for group in first for member in group.members)
        initiator = planned[0].why.removeprefix("division by ").split()[0].rstrip(":")
        expected = fast | {worker for worker in idle if str(worker) == initiator}
        assert covered == sorted(expected)
        again = [member for group in second for member in group.members]
        assert len(set(again)) == len(again)
        assert set(again) <= fast & set(covered)


@given(node_lists, st.integers(0, 999))
def test_first_groups_cross_nodes_by_heads_and_second_ones_span_a_node(
    nodes: list[int], seed: int
) -> None:
    job, planning = recorded_job(nodes, seed)
    job.run()
    for planned, _, _ in planning.divisions:
        first, second = split(planned)
        crossing = [g for g in first if len({nodes[m.pipeline] for m in g.members}) > 1]
        heads = [nodes[member.pipeline] for group in crossing for member in group.members]
        assert len(set(heads)) == len(heads)
        assert all(len({nodes[m.pipeline] for m in g.members}) == 1 for g in second)
        assert all(len(group.members) > 1 for group in second)


@given(node_lists, st.integers(0, 999))
def test_every_worker_runs_its_groups_in_planned_order(nodes: list[int], seed: int) -> None:
    job, planning = recorded_job(nodes, seed)
    started: list[Group] = []

    def check() -> None:
        assert all(planning.depth(worker) <= 2 for worker in job.steps)
        if len(job.steps) == len(nodes):  # no worker has left yet
            started[:] = [group for _, group in job.formed]

    job.check = check
    job.run()
    order = [group for planned, _, _ in planning.divisions for group in planned]
    for pipeline in range(len(nodes)):
        groups_of_worker = [group for group in started if Worker(0, pipeline) in group.members]
        planned = [group for group in order if Worker(0, pipeline) in group.members]
        assert [(g.members, g.why) for g in groups_of_worker] == [
            (g.members, g.why) for g in planned[: len(groups_of_worker)]
        ]


@given(st.integers(0, 40), st.integers(2, 6))
def test_a_division_leaves_nobody_alone_and_sizes_differ_by_one(num: int, group_size: int) -> None:
    workers = [Worker(0, pipeline) for pipeline in range(num)]
    groups = SmartGroups(group_size)._divided(workers, "why")
    sizes = [len(group.members) for group in groups]
    assert sorted(member for group in groups for member in group.members) == workers
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert min(sizes, default=2) >= 2 or num == 1
    assert max(sizes, default=0) < 2 * group_size


def one_slow(worker: Worker, step: int) -> Seconds:
    return 6.0 if worker.pipeline == 5 else 1.0 + 0.01 * ((worker.pipeline * 7 + step * 3) % 5)


@pytest.mark.parametrize("num_nodes", [1, 4, 16])
def test_straggler_delays_nobody_but_still_averages(num_nodes: int) -> None:
    nodes = [pipeline * num_nodes // 16 for pipeline in range(16)]
    job = job_of(SmartGroups(), nodes, one_slow, num_steps=10**9)
    job.exchange = 0.05
    for pipeline in range(16):
        job.at(300.0, lambda p=pipeline: job.leave(Worker(0, p)))
    job.run()
    steps = {worker: len(waits) for worker, waits in job.waits.items()}
    all_reduce = 16 * 300 / 6.05
    assert sum(steps.values()) / all_reduce > 5.0  # of 5.6 with no averaging at all
    met = [g for _, g in job.formed if Worker(0, 5) in g.members and len(g.members) > 1]
    assert len(met) > 0.9 * steps[Worker(0, 5)]
    assert len({member for group in met for member in group.members}) == 16


def test_recovered_straggler_is_drawn_again() -> None:
    slow = Worker(0, 2)

    def duration(worker: Worker, step: int) -> Seconds:
        return 8.0 if worker == slow and step < 12 else 1.0 + 0.01 * worker.pipeline

    job = job_of(SmartGroups(), [0] * 4 + [1] * 4 + [2] * 4, duration, num_steps=300).run()
    by_others = [(at, group) for at, group in job.formed if f"by {slow}" not in group.why]
    drawn = [at for at, group in by_others if slow in group.members]
    assert len([at for at in drawn if 24 < at < 96]) <= 2
    assert len([at for at in drawn if 96 + 6 * HALVE_GAPS_EVERY < at < 290]) > 50  # of 63 steps


def test_equal_workers_are_never_left_out_and_groups_change() -> None:
    job = job_of(SmartGroups(), [0] * 4 + [1] * 4, lambda worker, step: 1.0, num_steps=60).run()
    assert not [group for _, group in job.formed if "slow" in group.why]
    firsts = {group.members for _, group in job.formed if "all of" not in group.why}
    assert len(firsts) > 16


def test_joining_worker_starts_at_the_leaders_count() -> None:
    policy, old, new = SmartGroups(), Worker(0, 0), Worker(0, 1)
    policy.on_join(old, "a", 0.0)
    for step in range(50):
        policy.on_request(old, step)
        policy.on_ready(old, step)
    policy.on_join(new, "a", 50.0)
    assert policy.on_request(old, 50.0) == policy.on_request(new, 50.0) == []
    assert [group.members for group in policy.on_ready(old, 51.0)] == [(old, new)]


def test_division_after_a_failed_group_covers_workers_that_asked_again() -> None:
    policy, workers = SmartGroups(), [Worker(0, p) for p in range(3)]
    for worker in workers:
        policy.on_join(worker, "a", 0.0)
        policy.on_request(worker, 0.0)
    [group] = policy.on_ready(workers[0], 1.0)
    assert group.members == tuple(workers)
    assert policy.on_done(group, False, 2.0) == []
    policy.on_request(workers[0], 2.0)
    policy.on_request(workers[1], 2.0)
    assert [len(group.members) for group in policy.on_ready(workers[0], 2.0)] == [2]


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=12), st.randoms())
def test_planned_groups_start_in_order_for_any_order_of_requests(
    plans: list[set[int]], rng: random.Random
) -> None:
    buffers, workers = GroupBuffers(), [Worker(0, pipeline) for pipeline in range(5)]
    for worker in workers:
        buffers.join(worker)
    planned = [
        Group(tuple(workers[p] for p in sorted(members)), f"number {number}")
        for number, members in enumerate(plans)
    ]
    assert buffers.plan(planned) == []
    started: list[Group] = []
    open_groups: list[Group] = []
    while True:
        if open_groups and rng.random() < 0.5:
            buffers.finish(open_groups.pop(rng.randrange(len(open_groups))))
            continue
        can_ask = [
            w
            for w in workers
            if buffers.depth(w)
            and not (buffers.ledger.is_waiting(w) or buffers.ledger.is_in_group(w))
        ]
        if not can_ask and not open_groups:
            break
        if can_ask:
            new = buffers.request(rng.choice(can_ask))
            started += new
            open_groups += new
    assert sorted(started, key=planned.index) == planned
    for worker in workers:
        groups_of_worker = [planned.index(group) for group in started if worker in group.members]
        assert all(a < b for a, b in pairwise(groups_of_worker))


@pytest.mark.parametrize(("group_size", "slow_after"), [(1, 3), (3, 0)])
def test_invalid_smart_settings_are_refused(group_size: int, slow_after: int) -> None:
    with pytest.raises(PolicyError, match="fix:"):
        SmartGroups(group_size, slow_after)

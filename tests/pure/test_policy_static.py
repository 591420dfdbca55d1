"""The static rule: groups of a step are disjoint, members agree, four steps connect all workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.static import NUM_PHASES, NodeLayout, StaticGroups, group_of
from polyrhythm.types import Group, Worker
from tests.pure.policy_driver import job_of, random_durations

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def groups_at(step: int, node_sizes: list[int]) -> list[tuple[int, ...]]:
    return sorted({group_of(index, step, node_sizes) for index in range(sum(node_sizes))})


def test_four_nodes_of_four_have_the_groups_of_the_paper() -> None:
    whole = [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    heads = [(0, 4, 8, 12), (1,), (2, 3), (5,), (6, 7), (9,), (10, 11), (13,), (14, 15)]
    across = [(0, 3), (1, 9), (2,), (4, 7), (5, 13), (6,), (8, 11), (10,), (12, 15), (14,)]
    for cycle in range(5):
        steps = range(NUM_PHASES * cycle, NUM_PHASES * (cycle + 1))
        assert [groups_at(step, [4, 4, 4, 4]) for step in steps] == [heads, whole, across, whole]


@given(sizes, st.integers(0, 60))
def test_all_members_compute_the_same_group_so_groups_are_disjoint(
    node_sizes: list[int], step: int
) -> None:
    for index in range(sum(node_sizes)):
        members = group_of(index, step, node_sizes)
        assert index in members
        assert list(members) == sorted(set(members))
        assert all(group_of(member, step, node_sizes) == members for member in members)


@given(sizes, st.integers(0, 30))
def test_any_four_steps_connect_all_workers(node_sizes: list[int], first: int) -> None:
    reached = {0}
    groups = [g for step in range(first, first + NUM_PHASES) for g in groups_at(step, node_sizes)]
    for _ in groups:
        reached.update(member for group in groups if reached & set(group) for member in group)
    assert len(reached) == sum(node_sizes)


@given(sizes, st.integers(0, 60))
def test_a_group_across_nodes_has_one_worker_of_each(node_sizes: list[int], step: int) -> None:
    node_of = [node for node, size in enumerate(node_sizes) for _ in range(size)]
    for group in groups_at(step, node_sizes):
        nodes = [node_of[member] for member in group]
        assert len(set(nodes)) in (1, len(nodes))


@given(st.integers(2, 9), st.integers(0, 5))
def test_odd_ring_leaves_out_each_node_in_rotation(num_nodes: int, first: int) -> None:
    idle = [
        group
        for cycle in range(first, first + num_nodes)
        for group in groups_at(NUM_PHASES * cycle + 2, [1] * num_nodes)
        if len(group) == 1
    ]
    assert sorted(idle) == ([(node,) for node in range(num_nodes)] if num_nodes % 2 else [])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 99))
def test_static_policy_forms_the_groups_that_each_worker_computes(
    nodes: list[int], seed: int
) -> None:
    job = job_of(StaticGroups(len(nodes)), nodes, random_durations(seed), num_steps=9).run()
    layout = NodeLayout.of({Worker(0, p): f"n{node}" for p, node in enumerate(nodes)})
    for worker in layout.workers:
        formed = [group.members for _, group in job.formed if worker in group.members]
        # A finished worker has left, and the last groups of the others are without it.
        computed = [layout.members(worker, step) for step in range(9)]
        assert formed[:5] == computed[:5]
        assert len(formed) == 9


def test_layout_numbers_workers_node_by_node_for_any_input_order() -> None:
    nodes = {Worker(0, 3): "b", Worker(0, 0): "b", Worker(0, 2): "a", Worker(0, 1): "c"}
    layout = NodeLayout.of(nodes)
    assert [worker.pipeline for worker in layout.workers] == [0, 3, 1, 2]
    assert layout.node_sizes == (2, 1, 1)
    assert NodeLayout.of(dict(sorted(nodes.items()))) == layout
    assert layout.members(Worker(0, 2), 0) == (Worker(0, 0), Worker(0, 1), Worker(0, 2))


def test_static_startup_wait_is_bounded() -> None:
    policy, first, second = StaticGroups(3, startup_timeout=10.0), Worker(0, 0), Worker(0, 1)
    assert policy.on_join(first, "a", 0.0) == policy.on_ready(first, 1.0) == []
    assert policy.on_join(second, "b", 2.0) == policy.on_ready(second, 3.0) == []
    assert policy.next_timer() == 10.0
    assert [group.members for group in policy.on_timer(10.0)] == [(first, second)]


def test_failed_step_is_retried_by_the_remaining_workers() -> None:
    policy, workers = StaticGroups(3), [Worker(0, p) for p in range(3)]
    for worker in workers:
        policy.on_join(worker, f"n{worker.pipeline}", 0.0)
    assert policy.on_ready(workers[0], 0.0) == policy.on_ready(workers[1], 0.0) == []
    [group] = policy.on_ready(workers[2], 0.0)
    assert policy.on_done(group, False, 1.0) == policy.on_leave(workers[2], 1.0) == []
    assert policy.on_ready(workers[0], 1.0) == []
    assert policy.on_ready(workers[1], 1.0) == [Group((workers[0], workers[1]), "step 0, phase 0")]


def test_joining_worker_starts_at_the_most_advanced_step() -> None:
    policy, old, new = StaticGroups(1), Worker(0, 0), Worker(0, 1)
    policy.on_join(old, "a", 0.0)
    for step in range(5):
        assert [group.members for group in policy.on_ready(old, step)] == [(old,)]
    policy.on_join(new, "a", 5.0)
    assert policy.on_ready(old, 5.0) == []
    assert policy.on_ready(new, 6.0) == [Group((old, new), "step 5, phase 1")]


@pytest.mark.parametrize(
    ("index", "step", "node_sizes", "message"),
    [
        (0, 0, [], "at least one node"),
        (0, 0, [2, 0], "at least one worker on each"),
        (3, 0, [2, 1], "a worker from 0 to 2"),
        (0, -1, [2], "steps from 0"),
    ],
)
def test_invalid_static_rule_inputs_are_refused(
    index: int, step: int, node_sizes: list[int], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        group_of(index, step, node_sizes)

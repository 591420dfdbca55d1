"""Workers return in the same incarnation: from a global average, or from a timed-out wait."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polyrhythm.sync.members import Limits
from polyrhythm.sync.modes import SyncMode, make_policies
from polyrhythm.sync.policies.ssp import BoundedStaleness
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Group, Worker
from tests.pure.scheduler_grid import Grid, random_times, seeds


def pushes(policy: BoundedStaleness, *workers: Worker) -> list[Worker]:
    """Report pushes of workers; return the released ones."""
    groups = [group for worker in workers for group in policy.on_ready(worker, 1.0)]
    return [group.members[0] for group in groups]


def two_by_two(staleness: int) -> tuple[BoundedStaleness, list[Worker]]:
    """A policy, and its workers: stages 0 and 1 of pipeline 0, then of pipeline 1."""
    policy = BoundedStaleness(4, staleness, num_stages=2)
    workers = [Worker(stage, pipeline) for pipeline in range(2) for stage in range(2)]
    for worker in workers:
        policy.on_join(worker, "node", 0.0)
    return policy, workers


@pytest.mark.parametrize("staleness", [0, 1, 2, None])
@given(
    shape=st.tuples(st.integers(2, 4), st.integers(1, 4)),
    seed=seeds,
    average_all_at=st.sampled_from([{3}, {2, 4}, {1, 2, 3}, set(range(1, 20))]),
)
# With staleness 1 these deadlocked when stages returned at the clock of the others.
@example(shape=(4, 4), seed=5, average_all_at={1, 2, 3})
@example(shape=(4, 4), seed=25, average_all_at={1, 2, 3})
@settings(max_examples=20)
def test_ssp_pipelines_never_deadlock_after_average_all(
    staleness: int | None, shape: tuple[int, int], seed: int, average_all_at: set[int]
) -> None:
    num_stages, num_pipelines = shape
    options = {} if staleness is None else {"staleness": staleness}
    policies = make_policies(
        "ssp", num_stages=num_stages, num_pipelines=num_pipelines, options=options
    )
    scheduler = Scheduler(
        policies, num_pipelines, limits=SyncMode.named("ssp").limits(num_stages, Limits())
    )
    averages_all = frozenset(average_all_at)
    grid = Grid(scheduler, *shape, 20, random_times(seed), seed, average_all_at=averages_all).run()
    assert grid.unfinished() == []


def test_rejoining_stage_keeps_its_push_count() -> None:
    policy, (first, second, *others) = two_by_two(staleness=1)
    assert pushes(policy, first, second, *others) == [first, second, *others]
    policy.on_leave(first, 2.0)
    assert pushes(policy, second, *others) == [second, *others]
    policy.on_return(first, "node", 3.0)
    assert pushes(policy, second) == []  # 3 pushes, and the returned stage has 1
    assert pushes(policy, first) == [first, second]


def test_stages_that_left_together_rejoin_in_step() -> None:
    policy, (first, second, *others) = two_by_two(staleness=0)
    pushes(policy, first, second, *others)
    for worker in (first, second, *others):
        policy.on_leave(worker, 2.0)
    for worker in (first, others[0]):  # their stage is done first; they run a step
        policy.on_return(worker, "node", 3.0)
    assert pushes(policy, first, others[0]) == [first, others[0]]
    for worker in (second, others[1]):
        policy.on_return(worker, "node", 4.0)
    assert pushes(policy, first) == []  # it is a step ahead of its second stage
    assert pushes(policy, second, others[1]) == [second, others[1]]


def test_pipeline_rejoins_at_the_most_advanced_clock() -> None:
    policy, (first, second, *others) = two_by_two(staleness=1)
    pushes(policy, first)
    for worker in (first, second):
        policy.on_leave(worker, 2.0)
    for _ in range(9):
        assert pushes(policy, *others) == others
    policy.on_return(first, "node", 3.0)
    policy.on_return(second, "node", 3.0)
    assert pushes(policy, others[0]) == []  # `second` is a step behind `first`, as before
    assert pushes(policy, second) == [others[0], second]


def test_new_incarnation_does_not_keep_the_push_count() -> None:
    policy, (first, second, *others) = two_by_two(staleness=1)
    pushes(policy, first, first)
    for worker in (first, second):
        policy.on_leave(worker, 2.0)
    for _ in range(9):
        assert pushes(policy, *others) == others
    for worker in (first, second):
        policy.on_join(worker, "node", 3.0)
    assert pushes(policy, *others) == others
    assert policy.on_ready(first, 4.0) == [Group((first,), "1 of 1 steps ahead")]
    assert policy.on_ready(second, 4.0) == [Group((second,), "0 of 1 steps ahead")]

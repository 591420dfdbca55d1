"""Pipelines under a scheduler: no deadlock, no starvation, and no crash stops the others."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.sync.members import Limits
from polyrhythm.sync.modes import MAX_GROUP_WAIT, POLICIES, SyncMode, make_policies
from polyrhythm.sync.policies.adaptive import Adaptive
from polyrhythm.sync.policies.age import Age
from polyrhythm.sync.policies.windowed import EnforcementToken, WindowedGroups
from polyrhythm.sync.protocol import Assign, Ready
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Action, Op, Seconds, Worker
from tests.grids import num_examples
from tests.pure.scheduler_grid import (
    CEILING,
    HEARTBEAT,
    LEASE,
    MAX_WINDOW,
    Grid,
    grid_of,
    random_times,
    seeds,
    shapes,
)

HOUR: Seconds = 3600.0


def without_a_shared_token(
    kind: type[WindowedGroups], num_stages: int, num_pipelines: int, **options: object
) -> Scheduler:
    """A scheduler whose stages all enforce without limit."""
    tokens = [EnforcementToken(math.inf) for _ in range(num_stages)]
    policies = [kind(num_pipelines, stage=s, token=t, **options) for s, t in enumerate(tokens)]
    return Scheduler(policies, num_pipelines)


def with_one_token(
    kind: type[WindowedGroups], num_stages: int, num_pipelines: int, **options: object
) -> Scheduler:
    """A scheduler whose lease never ends: only the token prevents deadlocks."""
    token = EnforcementToken(math.inf)
    policies = [kind(num_pipelines, stage=s, token=token, **options) for s in range(num_stages)]
    return Scheduler(policies, num_pipelines)


@pytest.mark.parametrize("name", ["adaptive", "age"])
@given(shape=shapes, seed=seeds)
@settings(max_examples=num_examples(100))
def test_every_pipeline_finishes_and_no_ready_worker_starves(
    name: str, shape: tuple[int, int], seed: int
) -> None:
    grid = grid_of(name, shape, seed).run()
    assert grid.unfinished() == []
    assert max(grid.waits) <= MAX_WINDOW + LEASE + grid.latency + 1e-9
    assert grid.scheduler.next_timer() == math.inf


@pytest.mark.parametrize("takes_requests", [False, True])
@pytest.mark.parametrize("name", POLICIES)
@given(shape=shapes, seed=seeds)
@settings(max_examples=8)
def test_every_policy_finishes(
    name: str, takes_requests: bool, shape: tuple[int, int], seed: int
) -> None:
    grid = grid_of(name, shape, seed, takes_requests=takes_requests).run()
    assert grid.unfinished() == []
    for worker, state in grid.workers.items():
        assert state.clock == 6, worker
        assert state.gids == sorted(set(state.gids))


def grid_with_limits(name: str, group_size: int, seed: int, limits: Limits, **more: object) -> Grid:
    options = {} if name == "static" else {"group_size": group_size}
    policies = make_policies(name, num_stages=4, num_pipelines=5, options=options)
    scheduler = Scheduler(policies, 5, limits=limits)
    return Grid(scheduler, 4, 5, 8, random_times(seed), seed, **more)


@pytest.mark.parametrize("name", ["random", "smart", "partial_reduce", "static"])
@given(
    group_size=st.integers(2, 5),
    seed=seeds,
    takes_requests=st.booleans(),
    failure_probability=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=25)
def test_unbounded_policies_finish_with_a_group_timeout(
    name: str, group_size: int, seed: int, takes_requests: bool, failure_probability: float
) -> None:
    limits = SyncMode.named(name).limits(4, Limits(ceiling=CEILING))
    more = {"takes_requests": takes_requests, "failure_probability": failure_probability}
    grid = grid_with_limits(name, group_size, seed, limits, **more).run()
    assert grid.unfinished() == []
    # Each attempt waits for the policy, for the other members, and for the average.
    longest = (limits.max_retries + 1) * (2 * MAX_GROUP_WAIT + CEILING + grid.latency)
    assert max(grid.waits, default=0.0) <= longest


@pytest.mark.parametrize(("name", "failure_probability"), [("random", 0.0), ("static", 0.3)])
def test_unbounded_policies_deadlock_without_a_group_timeout(
    name: str, failure_probability: float
) -> None:
    grids = [
        grid_with_limits(name, 3, seed, Limits(), failure_probability=failure_probability).run()
        for seed in range(30)
    ]
    stuck = [grid for grid in grids if grid.unfinished()]
    assert stuck
    for grid in stuck:
        waiting = {w.stage for w, state in grid.workers.items() if state.waits_since is not None}
        assert len(waiting) > 1


@pytest.mark.parametrize("name", ["random", "smart", "partial_reduce", "static"])
@given(
    shape=st.tuples(st.integers(2, 4), st.integers(2, 5)),
    seed=seeds,
    takes_requests=st.booleans(),
    failure_probability=st.sampled_from([0.0, 0.3]),
    average_all_at=st.sampled_from([frozenset[int](), frozenset({2})]),
)
@settings(max_examples=num_examples(60))
def test_a_deadlock_of_stages_ends_at_once_and_no_other_wait_does(
    name: str,
    shape: tuple[int, int],
    seed: int,
    takes_requests: bool,
    failure_probability: float,
    average_all_at: frozenset[int],
) -> None:
    """In a pipeline with a flush no wait times out if timeouts are long.

    Where none times out without the detection of deadlocks, there is no deadlock. Before a global
    average one may be seen: whoever is about to wait for that one seems to compute a step.
    """
    options = {} if name == "static" else {"group_size": 2}
    limits = Limits(group_timeout=HOUR, ready_timeout=HOUR, average_all_timeout=HOUR)

    def run(steps_ahead: float) -> Grid:
        policies = make_policies(name, num_stages=shape[0], num_pipelines=shape[1], options=options)
        scheduler = Scheduler(policies, shape[1], limits=limits, steps_ahead=steps_ahead)
        more = {
            "takes_requests": takes_requests,
            "failure_probability": failure_probability,
            "average_all_at": average_all_at,
        }
        return Grid(scheduler, *shape, 4, random_times(seed), seed, in_flight=1, **more).run()

    found = run(steps_ahead=0)
    assert found.unfinished() == []
    assert found.now < HOUR
    if not average_all_at and run(steps_ahead=math.inf).now < HOUR:
        assert found.scheduler.counters["deadlocks"] == 0


def figure_3(make: Callable[..., Scheduler]) -> Grid:
    """Pipelines A = 0 and B = 1. B is first at the second stage, A is first at the first one."""
    slow = {
        (Worker(1, 0), Action(Op.B, 0)): 2.0,  # so (2, A) is ready after B has continued
        (Worker(0, 1), Action(Op.B, 0)): 5.0,  # so (1, B) is ready after A has continued
    }
    scheduler = make(Adaptive, 2, 2, last_groups=2, window=0.0)
    times = lambda worker, action: slow.get((worker, action), 1.0)  # noqa: E731
    return Grid(scheduler, 2, 2, 6, times, latency=0.0, averaging=0.0, in_flight=1).run()


def test_figure_3_is_a_deadlock_without_the_token() -> None:
    grid = figure_3(without_a_shared_token)
    waiting = [w for w, state in grid.workers.items() if state.waits_since is not None]
    assert waiting == [Worker(0, 1), Worker(1, 0)]  # (1, B) and (2, A)
    stages = [policy.validator.missing_workers() for policy in grid.scheduler.policies]
    assert stages == [(Worker(0, 0),), (Worker(1, 1),)]  # for (1, A) and (2, B),
    next_actions = {w: state.program[0] for w, state in grid.workers.items()}
    assert next_actions[Worker(0, 0)] == Action(Op.B, 1)  # which waits for (2, A)
    assert next_actions[Worker(1, 1)] == Action(Op.F, 1)  # which waits for (1, B)
    assert len(grid.unfinished()) == 4


def test_figure_3_finishes_with_the_token() -> None:
    grid = figure_3(with_one_token)
    assert grid.unfinished() == []
    first, second = (policy.counters for policy in grid.scheduler.policies)
    assert first["waived_token"] + second["waived_token"] > 0
    assert first["all_ready"] > 0 < second["all_ready"]  # both stages have averaged


@pytest.mark.parametrize(
    ("kind", "options"), [(Adaptive, {"last_groups": 4}), (Age, {"max_age": 1})]
)
def test_token_prevents_deadlock(kind: type[WindowedGroups], options: dict[str, int]) -> None:
    def stuck(make: Callable[..., Scheduler], seed: int) -> bool:
        scheduler = make(kind, 2, 3, window=0.0, **options)
        grid = Grid(scheduler, 2, 3, 8, random_times(seed), seed, latency=0.0, averaging=0.0)
        return bool(grid.run().unfinished())

    lost = [seed for seed in range(60) if stuck(without_a_shared_token, seed)]
    assert lost
    assert not [seed for seed in range(60) if stuck(with_one_token, seed)]


@pytest.mark.parametrize("name", ["adaptive", "age"])
def test_a_crash_of_any_worker_at_any_event_does_not_stop_the_others(name: str) -> None:
    last = len(grid_of(name, (2, 3), 1).run().log)
    for event in range(1, last):
        for lost in (Worker(stage, event % 3) for stage in range(2)):
            grid = grid_of(name, (2, 3), 1, at_event={event: lambda g, w=lost: g.kill(w)}).run()
            others = [pipeline for pipeline in range(3) if pipeline != lost.pipeline]
            assert grid.unfinished(others) == [], (event, lost)
            assert max(grid.waits) <= MAX_WINDOW + LEASE + CEILING + HEARTBEAT


@pytest.mark.parametrize("name", ["adaptive", "age", "all_reduce", "smart", "pairwise"])
@given(seed=seeds, shape=st.tuples(st.integers(1, 3), st.integers(2, 5)), data=st.data())
@settings(max_examples=15)
def test_crashes_and_returns_do_not_stop_the_others(
    name: str, seed: int, shape: tuple[int, int], data: st.DataObject
) -> None:
    """Fewer than all pipelines crash; some of them rejoin."""
    num_lost = data.draw(st.integers(1, shape[1] - 1))
    at_event: dict[int, Callable[[Grid], None]] = {}
    alone = set(range(num_lost))
    for pipeline in range(num_lost):
        worker = Worker(data.draw(st.integers(0, shape[0] - 1)), pipeline)
        event = data.draw(st.integers(1, 80).filter(lambda e: e not in at_event))

        def crash(grid: Grid, worker: Worker = worker) -> None:
            state = grid.workers[worker]
            if state.program and state.is_alive:
                grid.kill(worker)
                if worker.pipeline % 2:
                    grid._schedule(HEARTBEAT + 5, lambda: grid.revive(worker))

        at_event[event] = crash
        alone.discard(pipeline if pipeline % 2 else -1)
    grid = grid_of(name, shape, seed, at_event=at_event).run()
    assert grid.unfinished(set(range(shape[1])) - alone) == []


@given(shape=st.tuples(st.integers(1, 3), st.integers(2, 4)), seed=seeds)
@settings(max_examples=20)
def test_all_pipelines_finish_with_failing_averages(shape: tuple[int, int], seed: int) -> None:
    grid = grid_of("age", shape, seed, failure_probability=0.3).run()
    assert grid.unfinished() == []
    counters = grid.scheduler.counters
    for event, commands in grid.log:
        # A ready worker is assigned to one group, or skipped; a gid is never reused.
        assert not isinstance(event, Ready) or len(commands) <= 2
    gids = [c.gid for _, commands in grid.log for c in commands if isinstance(c, Assign)]
    assert len(gids) == len(set(gids)) == counters["committed"] + counters["aborted"]
    assert gids == sorted(gids)

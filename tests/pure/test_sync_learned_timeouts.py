"""Learned timeouts: a typical duration never times out, for steady, large or long groups."""

import random
from collections.abc import Callable

import pytest

from polyrhythm.sync.members import LearnedTimeout, Limits
from polyrhythm.sync.modes import MAX_GROUP_WAIT, SyncMode, make_policies
from polyrhythm.sync.protocol import Assign, Skip
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Action, Seconds, Worker
from tests.pure.scheduler_grid import Grid, random_times

UNBOUNDED = ["random", "smart", "partial_reduce", "static"]


def grid_of(
    name: str,
    shape: tuple[int, int],
    compute: Callable[[Worker, Action], Seconds],
    num_steps: int,
    averaging: Seconds = 0.1,
) -> Grid:
    num_stages, num_pipelines = shape
    options = {} if name in ("static", "all_reduce", "age") else {"group_size": 2}
    policies = make_policies(
        name, num_stages=num_stages, num_pipelines=num_pipelines, options=options
    )
    mode = SyncMode.named(name)
    scheduler = Scheduler(
        policies,
        num_pipelines,
        waits_for_all=mode.waits_for_all,
        limits=mode.limits(num_stages),
    )
    takes_requests = mode.asks_ahead
    grid = Grid(
        scheduler, *shape, num_steps, compute, takes_requests=takes_requests, averaging=averaging
    )
    grid.latency = 0.0  # so that averages take exactly as long
    return grid


@pytest.mark.parametrize("averaging", [0.1, 2.0, 20.0])
@pytest.mark.parametrize("name", ["all_reduce", "age", "random"])
def test_constant_averages_never_time_out(name: str, averaging: Seconds) -> None:
    grid = grid_of(name, (1, 4), lambda worker, action: 1.0, 60, averaging).run()
    assert grid.scheduler.counters["committed"] >= 59
    assert grid.scheduler.counters["aborted"] == 0


@pytest.mark.parametrize("num_workers", [2, 16, 125])
def test_timeout_learned_from_pairs_suffices_for_all_workers(num_workers: int) -> None:
    """A ring of n sends 2 (n - 1) / n times a model: four times a pair's time is twice enough."""
    limits = Limits()
    timeout = LearnedTimeout(limits.timeout_factor, limits.floor, limits.ceiling, limits.ceiling)
    for _ in range(64):
        timeout.record(3.0)
    ring = 2 * (num_workers - 1) / num_workers
    assert timeout.current >= 4 * ring * 3.0


def test_group_wait_scales_with_step_time() -> None:
    def lost(name: str, unit: Seconds) -> float:
        """Fraction of steps that should have ended with an average, and did not."""
        rng = random.Random(0)

        def compute(worker: Worker, action: Action) -> Seconds:
            return unit * rng.uniform(0.9, 1.1) * (1.5 if worker.pipeline == 0 else 1)

        grid = grid_of(name, (2, 4), compute, 20).run()
        commands = [command for _, commands in grid.log for command in commands]
        failed = [command for command in commands if isinstance(command, Skip) and command.failed]
        return len(failed) / 160

    for name in UNBOUNDED:
        assert lost(name, 1.0) < 0.1
        assert lost(name, 20.0) < 0.2, name
        assert lost(name, 40.0) < 0.2, name


@pytest.mark.parametrize("name", UNBOUNDED)
def test_mutual_waits_do_not_raise_the_wait_timeout(name: str) -> None:
    """With steps of seconds, a worker without a group is skipped within `MAX_GROUP_WAIT`."""
    for seed in range(5):
        grid = grid_of(name, (4, 5), random_times(seed), 40)
        grid.takes_requests = False  # all wait for policies, and none for an assigned group
        grid.run()
        assert grid.unfinished() == []
        assert max(grid.waits) <= MAX_GROUP_WAIT + grid.latency + 1e-9


def test_average_timeout_is_ten_times_the_median() -> None:
    grid = grid_of("all_reduce", (1, 2), lambda worker, action: 1.0, 30, averaging=2.0).run()
    assigns = [c for _, commands in grid.log for c in commands if isinstance(c, Assign)]
    assert [assigns[0].timeout, assigns[-1].timeout] == [Limits().ceiling, pytest.approx(20.0)]

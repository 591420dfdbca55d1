"""Learned patience: what is as usual is never cut off, however steady, large or long it is."""

import random
from collections.abc import Callable

import pytest

from polyrhythm.sync.deadlines import Deadlines, Limits
from polyrhythm.sync.messages import Assign, Skip
from polyrhythm.sync.registry import LONGEST_WAIT, limits_for, make_policies
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Action, Seconds, Worker
from tests.pure.sync_grid import Grid
from tests.pure.test_sync_pipelines import random_times

ENDLESS = ["random", "smart", "partial_reduce", "static"]


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
    scheduler = Scheduler(policies, num_pipelines, limits=limits_for(name, num_stages))
    asks_ahead = name in ("random", "smart")
    grid = Grid(scheduler, *shape, num_steps, compute, asks_ahead=asks_ahead, averaging=averaging)
    grid.latency = 0.0  # so that averages take exactly as long
    return grid


@pytest.mark.parametrize("averaging", [0.1, 2.0, 20.0])
@pytest.mark.parametrize("name", ["all_reduce", "age", "random"])
def test_groups_that_always_take_the_same_time_are_never_cut_off(
    name: str, averaging: Seconds
) -> None:
    grid = grid_of(name, (1, 4), lambda worker, action: 1.0, 60, averaging).run()
    assert grid.scheduler.counters["committed"] >= 59
    assert grid.scheduler.counters["aborted"] == 0


@pytest.mark.parametrize("num_workers", [2, 16, 125])
def test_a_group_of_everybody_has_time_enough_after_many_pairs(num_workers: int) -> None:
    """A ring of n sends 2 (n - 1) / n times a model, so four pairs' time is twice too much."""
    limits = Limits()
    deadlines = Deadlines(limits.slower, limits.floor, limits.ceiling, limits.ceiling)
    for _ in range(64):
        deadlines.made(3.0)
    ring = 2 * (num_workers - 1) / num_workers
    assert deadlines.current >= 4 * ring * 3.0


def test_in_a_pipeline_a_ready_worker_waits_for_a_step_however_long_steps_are() -> None:
    def lost(name: str, unit: Seconds) -> float:
        """The share of the steps that should have ended with an average, and did not."""
        chance = random.Random(0)

        def compute(worker: Worker, action: Action) -> Seconds:
            return unit * chance.uniform(0.9, 1.1) * (1.5 if worker.pipeline == 0 else 1)

        grid = grid_of(name, (2, 4), compute, 20).run()
        commands = [command for _, commands in grid.log for command in commands]
        failed = [command for command in commands if isinstance(command, Skip) and command.failed]
        return len(failed) / 160

    for name in ENDLESS:
        assert lost(name, 1.0) < 0.1
        assert lost(name, 20.0) < 0.2, name
        assert lost(name, 40.0) < 0.2, name


@pytest.mark.parametrize("name", ENDLESS)
def test_waits_for_one_another_do_not_make_patience_grow(name: str) -> None:
    """In steps of seconds a worker that waits in vain is sent on within `LONGEST_WAIT`."""
    for seed in range(5):
        grid = grid_of(name, (4, 5), random_times(seed), 40)
        grid.asks_ahead = False  # all wait for policies, and none for an assigned group
        grid.run()
        assert grid.unfinished() == []
        assert max(grid.waits) <= LONGEST_WAIT + grid.latency + 1e-9


def test_the_deadline_of_an_average_is_ten_times_the_usual_once_that_is_known() -> None:
    grid = grid_of("all_reduce", (1, 2), lambda worker, action: 1.0, 30, averaging=2.0).run()
    assigns = [c for _, commands in grid.log for c in commands if isinstance(c, Assign)]
    assert [assigns[0].deadline, assigns[-1].deadline] == [Limits().ceiling, pytest.approx(20.0)]

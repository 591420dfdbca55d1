"""Workers crash and rejoin several times, soon or late, between global averages: all finish."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.sync.members import Limits
from polyrhythm.sync.modes import SyncMode, make_policies
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Worker
from tests.grids import num_examples
from tests.pure.scheduler_grid import Grid

RETURN_DELAYS = (0.5, 3.0, 20.0, 29.0, 31.0, 40.0)  # s; a death is noticed after 30 s


def run_with_crashes(policy: str, seed: int, *, averages_all: bool) -> Grid:
    rng = random.Random(seed)
    shape = num_stages, num_pipelines = rng.choice([2, 3]), rng.choice([2, 3, 4])
    workers = [Worker(s, p) for s in range(num_stages) for p in range(num_pipelines)]
    durations = {worker: rng.choice([0.05, 0.1, 0.3]) for worker in workers}
    policies = make_policies(policy, num_stages=num_stages, num_pipelines=num_pipelines)
    mode = SyncMode.named(policy)
    limits = mode.limits(
        num_stages, Limits(ceiling=5.0, ready_timeout=40.0, average_all_timeout=60.0)
    )
    grid = Grid(
        Scheduler(policies, num_pipelines, waits_for_all=mode.waits_for_all, limits=limits),
        *shape,
        num_steps=rng.choice([10, 25]),
        compute=lambda worker, _: durations[worker] * rng.uniform(0.5, 1.5),
        seed=seed,
        averaging=rng.choice([0.01, 0.1, 1.0]),
        latency=rng.choice([0.001, 0.05]),
        average_all_at=frozenset(rng.sample(range(1, 10), 2)) if averages_all else frozenset(),
    )

    def crash(grid: Grid) -> None:
        lost = rng.choice(workers)
        pipeline = [w for w in workers if w.pipeline == lost.pipeline]
        if grid.workers[lost].program and all(grid.workers[w].is_alive for w in pipeline):
            grid.kill(lost)
            grid._schedule(rng.choice(RETURN_DELAYS), lambda: grid.revive(lost))

    grid.at_event = dict.fromkeys(rng.sample(range(5, 300), rng.randint(1, 5)), crash)
    return grid.run(60_000)


@pytest.mark.parametrize("policy", ["all_reduce", "ssp", "adaptive", "pairwise"])
@given(seed=st.integers(0, 10_000), averages_all=st.booleans())
@settings(max_examples=num_examples(60))
def test_all_pipelines_finish_after_crashes_and_returns(
    policy: str, seed: int, averages_all: bool
) -> None:
    assert run_with_crashes(policy, seed, averages_all=averages_all).unfinished() == []


@pytest.mark.parametrize("seed", [128, 343, 385, 735])
def test_ssp_stages_of_a_returning_pipeline_keep_equal_clocks(seed: int) -> None:
    assert run_with_crashes("ssp", seed, averages_all=False).unfinished() == []


@pytest.mark.parametrize("seed", [251, 384, 910, 1061])
def test_all_reduce_does_not_wait_for_a_lost_step(seed: int) -> None:
    assert run_with_crashes("all_reduce", seed, averages_all=True).unfinished() == []

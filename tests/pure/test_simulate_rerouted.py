"""A simulated job goes on with rerouted micro-batches where that is predicted to be faster."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.events import read_run
from polyrhythm.plan.predict import predict
from polyrhythm.plan.search import search_plan
from polyrhythm.simulate.epochs import NOTICE, RECONNECT
from polyrhythm.simulate.from_plan import planned_job
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.simulator import simulate
from tests.grids import num_examples
from tests.pure.plan_problems import cluster, problem
from tests.pure.simulate_cases import equal_job, kills_and_joins

MODES = ["all_reduce", "decoupled"]


def job_of(mode: str = "all_reduce", *, num_stages: int = 3, **more) -> SimulatedJob:
    return equal_job(
        policy="all_reduce",
        decoupled=mode == "decoupled",
        num_stages=num_stages,
        num_pipelines=4,
        num_microbatches=8,
        forward=0.1,
        backward=0.2,
        gradient_bytes=1e6,
        bandwidth=1e8,
        **more,
    )


def last_step(found: SimulationResult) -> float:
    return found.ends[0][-1] - found.ends[0][-2]


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_first_stage_is_rerouted(mode: str) -> None:
    job = job_of(mode, scenario=kills_and_joins(kill=[("d0", 10.0)]))
    dissolved = simulate(job, num_steps=12)
    found = simulate(job, num_steps=12, reroutes=True)
    (change,) = found.changes
    assert change.why.startswith("reroute: with the micro-batches of s0p0 rerouted")
    assert change.resumed == pytest.approx(10.0 + NOTICE + RECONNECT)
    assert [len(ends) for ends in found.ends] == [12] * 4
    assert last_step(dissolved) / last_step(found) >= 1.1
    assert 32 * 0.3 / 3 / last_step(found) >= 0.9  # the bound: its work among three workers


def test_a_lost_last_stage_is_not_rerouted() -> None:
    job = job_of(scenario=kills_and_joins(kill=[("d2", 10.0)]))
    found = simulate(job, num_steps=12, reroutes=True)
    kept = simulate(job, num_steps=12)
    assert found.ends == kept.ends
    assert found.changes[0].why == kept.changes[0].why


@pytest.mark.parametrize("mode", MODES)
def test_a_device_that_returns_fills_the_hole(mode: str) -> None:
    whole = simulate(job_of(mode), num_steps=12)
    late = kills_and_joins(kill=[("d0", 10.0)], join=[("d0", 40.0)])
    found = simulate(job_of(mode, scenario=late), num_steps=20, reroutes=True)
    _, second = found.changes
    assert second.what == "devices return"
    assert second.at == pytest.approx(next(end for end in found.ends[0] if end > 40.0))
    assert last_step(found) == pytest.approx(last_step(whole))


@settings(max_examples=num_examples(30), deadline=None)
@given(
    st.sampled_from(MODES),
    st.lists(st.tuples(st.integers(0, 11), st.floats(0, 60)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 11), st.floats(0, 60)), max_size=2),
)
def test_each_step_has_the_whole_batch(mode: str, kills: list, joins: list) -> None:
    scenario = kills_and_joins(
        kill=[(f"d{number}", at) for number, at in dict(kills).items()],
        join=[
            (f"d{number}", at + 10) for number, at in dict(joins).items() if number in dict(kills)
        ],
    )
    found = simulate(job_of(mode, scenario=scenario), num_steps=15, reroutes=True)
    assert found.shares is not None
    total = sum(sum(shares) for shares in found.shares)
    for ends in found.ends:
        assert list(ends) == sorted(ends)
    if found.stop_reason:
        assert "no pipeline could continue" in found.stop_reason
        assert total % 32 == pytest.approx(0.0, abs=1e-6)
    else:
        assert total == pytest.approx(15 * 32)
    assert found.busy.keys() == found.starved.keys()
    assert all(seconds >= -1e-6 for seconds in found.starved.values())


def test_a_device_and_its_buddy_lost_one_by_one_leave_their_shards() -> None:
    """d0 has no shard any more when its buddy d3 is lost: others have divided it."""
    kills = kills_and_joins(kill=[("d0", 10.0), ("d3", 20.0)])
    found = simulate(job_of("decoupled", scenario=kills), num_steps=15, reroutes=True)
    assert found.stop_reason == ""
    assert len(found.changes) == 2
    assert "s0p0 and s0p1 rerouted" in found.changes[1].why


def test_a_planned_job_keeps_to_its_memory() -> None:
    over = problem(cluster([12]), batch=32, num_stages=3, num_pipelines=4, sync="all_reduce")
    plan = search_plan(over).best.plan
    lost = plan.pipelines[0].devices[0]
    job = planned_job(plan, over, scenario=kills_and_joins(kill=[(lost, 20.0)]))
    found = simulate(job, num_steps=30, reroutes=True)
    assert found.stop_reason == ""
    (change,) = found.changes
    assert change.why.startswith(("reroute: ", "pipeline 0 is broken"))
    kept = simulate(job, num_steps=30)
    assert last_step(found) <= last_step(kept) * 1.02
    assert predict(plan, over).time.total <= last_step(found)


def test_a_rerouted_epoch_leaves_a_log_of_the_others(tmp_path: Path) -> None:
    scenario = kills_and_joins(kill=[("d0", 10.0)], join=[("d0", 20.0)])
    job = replace(job_of(), scenario=scenario)
    found = simulate(job, num_steps=12, run=tmp_path / "run", reroutes=True)
    assert len(found.ends[0]) == 12
    steps = {event.step for event in read_run(tmp_path / "run") if event.kind == "step"}
    assert steps < set(range(12))

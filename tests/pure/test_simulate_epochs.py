"""After a loss in an exact mode the survivors repeat the step and compute the whole batch."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.errors import PlanError
from polyrhythm.events import read_run
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import Prediction, predict
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.search import search_plan
from polyrhythm.simulate import epochs
from polyrhythm.simulate.epochs import NOTICE, RECONNECT
from polyrhythm.simulate.from_plan import planned_job
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.simulator import simulate
from polyrhythm.sync.decision_log import decision_log_paths
from polyrhythm.sync.log_reader import replay
from tests.grids import num_examples
from tests.pure.plan_problems import cluster, problem
from tests.pure.simulate_cases import equal_job, kills_and_joins, steps_after_first

PAUSE = NOTICE + RECONNECT
MODES = ["all_reduce", "balanced", "decoupled"]


def exact_job(mode: str, *, num_stages: int = 1, num_pipelines: int = 4, **more) -> SimulatedJob:
    settings_ = {
        "forward": 0.1,
        "backward": 0.2,
        "gradient_bytes": 1e6,
        "bandwidth": 1e8,
        "num_microbatches": 3,
        **more,
    }
    return equal_job(
        policy="all_reduce" if mode == "decoupled" else mode,
        decoupled=mode == "decoupled",
        num_stages=num_stages,
        num_pipelines=num_pipelines,
        **settings_,
    )


def step_times(found: SimulationResult) -> list[float]:
    ends = found.ends[0]
    return [b - a for a, b in zip((0.0, *ends), ends, strict=False)]


@pytest.mark.parametrize("mode", MODES)
def test_survivors_take_as_long_as_a_job_of_their_number(mode: str) -> None:
    scenario = kills_and_joins(kill=[("d2", 5.0)])
    found = simulate(exact_job(mode, scenario=scenario), num_steps=12)
    four = simulate(exact_job(mode), num_steps=12)
    three = simulate(exact_job(mode, num_pipelines=3, num_microbatches=4), num_steps=12)
    assert list(map(len, found.ends)) == [12, 12, 12, 5]
    assert step_times(found)[1:5] == pytest.approx(step_times(four)[1:5])
    assert step_times(found)[-5:] == pytest.approx(step_times(three)[-5:])
    (change,) = found.changes
    assert (change.at, change.resumed) == (5.0, pytest.approx(5.0 + PAUSE))
    assert "pipeline 2 is broken" in change.why
    # The step that was cut begins again: what has been computed of it is lost.
    assert found.ends[0][5] == pytest.approx(change.resumed + three.ends[0][0])
    assert found.present == pytest.approx((found.duration,) * 2 + (5.0,) + (found.duration,))


@settings(max_examples=num_examples(60), deadline=None)
@given(
    st.sampled_from(MODES),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 8), st.floats(0, 40)), min_size=1, max_size=4),
)
def test_each_step_has_the_whole_batch(mode: str, num_stages: int, kills: list) -> None:
    """Or no device is left that could go on."""
    num_stages = 1 if mode == "balanced" else num_stages
    lost = dict(kills)
    names = {f"d{number % (3 * num_stages)}": at for number, at in lost.items()}
    scenario = kills_and_joins(kill=[*names.items()])
    job = exact_job(mode, num_stages=num_stages, num_pipelines=3, scenario=scenario)
    found = simulate(job, num_steps=15)
    assert found.shares is not None
    totals = Counter[float]()
    for ends, shares in zip(found.ends, found.shares, strict=True):
        assert len(ends) == len(shares)
        assert list(ends) == sorted(ends)
        totals["samples"] += sum(shares)
    if found.stop_reason:
        assert "no pipeline could continue" in found.stop_reason
        assert len(names) > 1
        assert totals["samples"] % 9 == pytest.approx(0.0, abs=1e-6)
    else:
        assert len(found.ends[0]) == 15
        assert totals["samples"] == pytest.approx(15 * 9)
        assert found.step_time > 0
    for change in found.changes:
        assert change.at == 0.0 or change.resumed >= change.at + RECONNECT


def test_throughput_counts_the_samples_of_survivors() -> None:
    """A loss late in a job hardly changes its throughput, and a batch stays a batch."""
    late = kills_and_joins(kill=[("d1", 100.0)])
    calm = simulate(exact_job("all_reduce"), num_steps=110)
    found = simulate(exact_job("all_reduce", scenario=late), num_steps=110)
    assert found.throughput == pytest.approx(calm.throughput, rel=0.02)
    assert found.step_time == pytest.approx(calm.step_time, rel=0.02)
    early = kills_and_joins(kill=[("d1", 0.0)])
    found = simulate(exact_job("all_reduce", scenario=early), num_steps=110)
    three = simulate(exact_job("all_reduce", num_pipelines=3, num_microbatches=4), num_steps=110)
    assert found.step_time == pytest.approx(three.step_time, rel=0.01)


def test_what_is_left_of_two_pipelines_makes_one() -> None:
    """Stage 1 of pipeline 0 is lost, then stage 0 of pipeline 1: d0 and d3 go on."""
    scenario = kills_and_joins(kill=[("d1", 5.0), ("d2", 12.0)])
    job = exact_job("all_reduce", num_stages=2, num_pipelines=2, scenario=scenario)
    found = simulate(job, num_steps=12)
    assert found.stop_reason == ""
    assert len(found.ends[0]) == 12
    first, second = found.changes
    # d0 was a spare: it copies weights and two moments from d2, which is lost, so nothing.
    assert second.resumed == pytest.approx(second.at + PAUSE)
    assert "form pipeline 0" in second.why
    alone = exact_job("all_reduce", num_stages=2, num_pipelines=1, num_microbatches=6)
    assert step_times(found)[-3:] == pytest.approx(step_times(simulate(alone, num_steps=9))[-3:])
    assert first.why != second.why


def test_a_spare_copies_the_state_of_another_before_it_computes() -> None:
    """d0 waits as a spare until d7 is lost, and copies from d2 or d4 then."""
    scenario = kills_and_joins(kill=[("d1", 5.0), ("d6", 12.0)])
    job = exact_job("all_reduce", num_stages=2, num_pipelines=4, scenario=scenario)
    found = simulate(job, num_steps=12)
    assert [len(ends) for ends in found.ends][:3] == [12, 12, 12]
    _, second = found.changes
    assert "form pipeline 2" in second.why
    assert second.resumed == pytest.approx(second.at + PAUSE + 3 * 1e6 / 1e8)


def test_a_second_loss_before_the_others_compute_again() -> None:
    scenario = kills_and_joins(kill=[("d1", 5.0), ("d3", 5.3)])
    found = simulate(exact_job("all_reduce", scenario=scenario), num_steps=12)
    (change,) = found.changes
    assert change.resumed == pytest.approx(5.3 + PAUSE)
    assert list(map(len, found.ends)) == [12, 12, 5, 5]


@pytest.mark.parametrize("mode", MODES)
def test_returned_devices_take_part_after_a_step(mode: str) -> None:
    scenario = kills_and_joins(kill=[("d2", 5.0)], join=[("d2", 11.0)])
    found = simulate(exact_job(mode, scenario=scenario), num_steps=20)
    _, second = found.changes
    assert second.at == pytest.approx(next(end for end in found.ends[0] if end > 11.0))
    assert second.resumed == pytest.approx(second.at + RECONNECT + 3 * 1e6 / 1e8)
    usual = simulate(exact_job(mode), num_steps=12)
    assert step_times(found)[-3:] == pytest.approx(step_times(usual)[-3:])


def test_a_device_that_completes_no_pipeline_waits_as_a_spare() -> None:
    """d1 returns to no use, d0 makes a pipeline with it."""
    kills = [("d0", 5.0), ("d1", 5.0), ("d3", 5.0)]
    scenario = kills_and_joins(kill=kills, join=[("d1", 8.0), ("d3", 15.0), ("d0", 30.0)])
    job = exact_job("all_reduce", num_stages=2, num_pipelines=3, scenario=scenario)
    found = simulate(job, num_steps=20)
    assert [change.what for change in found.changes] == [
        "d0, d1, d3 are lost",
        "devices return",
        "devices return",
    ]
    assert 8.0 < found.changes[1].at < 15.0, "d1 makes a pipeline with d2"
    assert found.changes[2].at > 30.0


def test_a_replica_and_its_buddy_lost_at_once_end_a_decoupled_job() -> None:
    together = kills_and_joins(kill=[("d1", 5.0), ("d2", 5.0)])
    found = simulate(exact_job("decoupled", scenario=together), num_steps=12)
    assert "d1 and its buddy d2 were lost before others had their shard" in found.stop_reason
    assert len(found.ends[0]) == 5
    assert found.duration == pytest.approx(5.0 + NOTICE)
    # The others still have everything.
    found = simulate(exact_job("all_reduce", scenario=together), num_steps=12)
    assert found.stop_reason == ""
    one_by_one = kills_and_joins(kill=[("d1", 5.0), ("d2", 9.0)])
    found = simulate(exact_job("decoupled", scenario=one_by_one), num_steps=12)
    assert found.stop_reason == ""


def test_a_decoupled_job_waits_for_devices_as_from_a_checkpoint() -> None:
    """No pipeline is whole, so the shards of those that are lost come from the checkpoint."""
    every = [(f"d{number}", 5.0) for number in range(4)]
    scenario = kills_and_joins(kill=every, join=[("d1", 20.0)])
    found = simulate(exact_job("decoupled", scenario=scenario), num_steps=12)
    assert found.stop_reason == ""
    (change,) = found.changes
    assert change.resumed == pytest.approx(20.0 + RECONNECT)
    assert len(found.ends[0]) == 12


def test_a_device_that_returns_at_once_has_lost_its_shard() -> None:
    scenario = kills_and_joins(kill=[("d1", 5.0), ("d2", 5.0)], join=[("d1", 5.05)])
    found = simulate(exact_job("decoupled", scenario=scenario), num_steps=12)
    assert "d1 and its buddy d2 were lost before others had their shard" in found.stop_reason


@pytest.mark.parametrize("mode", MODES)
def test_a_return_within_the_pause_does_not_restart_it(mode: str) -> None:
    """The device computes after the next step, with the state of another one."""
    scenario = kills_and_joins(kill=[("d2", 5.0)], join=[("d2", 5.2)])
    found = simulate(exact_job(mode, scenario=scenario), num_steps=20)
    first, second = found.changes
    assert first.resumed == pytest.approx(5.0 + PAUSE)
    assert second.at == pytest.approx(next(end for end in found.ends[0] if end > first.resumed))
    assert second.resumed == pytest.approx(second.at + RECONNECT + 3 * 1e6 / 1e8)


def test_a_return_at_the_end_of_the_last_step_changes_nothing() -> None:
    lost = kills_and_joins(kill=[("d2", 5.0)])
    end = simulate(exact_job("all_reduce", scenario=lost), num_steps=8).duration
    back = kills_and_joins(kill=[("d2", 5.0)], join=[("d2", end)])
    assert simulate(exact_job("all_reduce", scenario=back), num_steps=8).duration == end


def test_survivors_that_do_not_fit_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    over = problem(cluster([4]), batch=8, num_stages=2, num_pipelines=2, sync="all_reduce")
    plan = search_plan(over).best.plan
    lost = plan.pipelines[1].devices[0]
    job = planned_job(plan, over, scenario=kills_and_joins(kill=[(lost, 70.0)]))

    def predict_two(plan: Plan, over: Problem) -> Prediction:
        if plan.num_pipelines < 2:
            raise PlanError("layers 0 to 3 need 1 GiB more", expected="memory", fix="add some")
        return predict(plan, over)

    monkeypatch.setattr(epochs, "predict", predict_two)
    found = simulate(job, num_steps=30)
    assert found.stop_reason.endswith("layers 0 to 3 need 1 GiB more")
    assert 0 < len(found.ends[0]) < 30


def test_devices_that_are_missing_from_the_start() -> None:
    found = simulate(
        exact_job("decoupled", scenario=kills_and_joins(kill=[("d1", 0.0)])), num_steps=5
    )
    (change,) = found.changes
    assert (change.at, change.resumed, change.what) == (0.0, 0.0, "devices are missing")
    three = simulate(exact_job("decoupled", num_pipelines=3, num_microbatches=4), num_steps=5)
    assert found.ends[0] == three.ends[0]


@pytest.mark.parametrize("mode", ["all_reduce", "decoupled"])
def test_logs_have_each_step_once(tmp_path: Path, mode: str) -> None:
    scenario = kills_and_joins(kill=[("d2", 5.0)], join=[("d2", 9.0)])
    job = exact_job(mode, num_stages=2, num_pipelines=3, scenario=scenario)
    found = simulate(job, num_steps=12, run=tmp_path / "run")
    paths = decision_log_paths(tmp_path / "run")
    assert len(paths) == 3
    assert all(replay(path) is None for path in paths)
    steps = Counter(
        (event.worker, event.step) for event in read_run(tmp_path / "run") if event.kind == "step"
    )
    assert set(steps.values()) == {1}
    assert sum(steps.values()) == 2 * sum(map(len, found.ends))
    assert {step for _, step in steps} == set(range(12))


def test_a_planned_job_goes_on_as_predicted_for_the_survivors() -> None:
    over = problem(cluster([6]), batch=24, num_stages=2, num_pipelines=3, sync="all_reduce")
    plan = search_plan(over).best.plan
    lost = plan.pipelines[1].devices[0]
    job = planned_job(plan, over, scenario=kills_and_joins(kill=[(lost, 20.0)]))
    found = simulate(job, num_steps=30)
    rest = replace(
        plan,
        pipelines=tuple(
            PipelinePlan(devices=plan.pipelines[i].devices, num_microbatches=12) for i in (0, 2)
        ),
        left_out=(),
    )
    expected = predict(rest, over).time.total
    assert steps_after_first(found) > expected * 0.5
    assert step_times(found)[-1] == pytest.approx(expected, rel=0.02)


@pytest.mark.long
def test_layers_are_divided_anew_if_asked_to() -> None:
    """After a loss a pipeline of four stages has three spares: a new division uses them."""
    over = problem(cluster([8]), batch=32, sync="all_reduce")
    whole = PipelinePlan(num_microbatches=16)
    names = [device.name for device in over.cluster.devices]
    plan = Plan(
        layers_per_stage=(2, 2, 2, 2),
        pipelines=tuple(replace(whole, devices=tuple(names[4 * i : 4 * i + 4])) for i in range(2)),
        microbatch_size=1,
    )
    job = planned_job(plan, over, scenario=kills_and_joins(kill=[(names[5], 30.0)]))
    kept = simulate(job, num_steps=60)
    found = simulate(job, num_steps=60, replans=True)
    assert found.stop_reason == kept.stop_reason == ""
    assert len(found.ends[0]) == len(kept.ends[0]) == 60
    assert found.duration < kept.duration
    assert found.changes[0].resumed - found.changes[0].at > PAUSE + 5.0
    assert "pays for a pause" in found.changes[0].why
    back = replace(job.scenario, join=kills_and_joins(join=[(names[5], 200.0)]).join)
    again = simulate(replace(job, scenario=back), num_steps=60, replans=True)
    assert again.changes[1].at > 200.0
    assert again.duration < found.duration

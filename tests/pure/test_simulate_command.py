"""`polyrhythm simulate`: a written plan, by several policies, and what is wrong with it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polyrhythm import cli
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.describe.write import write_cluster, write_model
from polyrhythm.plan.job import Job
from polyrhythm.plan.plan import PipelinePlan, Plan, Sources
from polyrhythm.plan.predict import predict
from polyrhythm.plan.problem import Problem
from polyrhythm.schedule.planned import PlannedSchedules
from polyrhythm.simulate.planned import planned_job
from polyrhythm.simulate.simulator import simulate

CLUSTER = Cluster(
    name="four",
    devices=tuple(
        Device(name=f"d{i}", region="ab"[i // 2], price_per_hour=2.0, uplink=1e12) for i in range(4)
    ),
    regions=("a", "b"),
    latency=((0.001, 0.01), (0.01, 0.001)),
    bandwidth=((1e9, 1e8), (1e8, 1e9)),
    egress_price_per_gb=(0.1, 0.1),
)
PROFILE = ModelProfile(
    name="small",
    microbatch_size=1,
    layers=tuple(
        Layer(
            name=f"l{i}",
            forward=0.01,
            backward=0.02,
            parameter_bytes=1_000_000,
            activation_bytes=100_000,
            stored_bytes=0,
        )
        for i in range(4)
    ),
)
PLAN = Plan(
    layers_per_stage=(2, 2),
    pipelines=(
        PipelinePlan(devices=("d0", "d1"), num_microbatches=8, schedule="1f1b"),
        PipelinePlan(devices=("d2", "d3"), num_microbatches=8, schedule="1f1b"),
    ),
    microbatch_size=1,
    sources=Sources(cluster="cluster.toml", profile="profile.json"),
)


def problem() -> Problem:
    return Problem(
        cluster=CLUSTER, profile=PROFILE, job=Job(batch=16), schedules=PlannedSchedules()
    )


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    write_cluster(CLUSTER, tmp_path / "cluster.toml")
    write_model(PROFILE, tmp_path / "profile.json")
    PLAN.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_a_plan_is_simulated_as_it_is_predicted() -> None:
    found = simulate(planned_job(PLAN, problem()), num_steps=10)
    assert found.step_time == pytest.approx(predict(PLAN, problem()).time.total, rel=0.02)


def test_scripts_predict_with_one_call(plan: Path, tmp_path: Path) -> None:
    import polyrhythm as pr

    given = plan, tmp_path / "cluster.toml", tmp_path / "profile.json"
    calm = pr.predict(*given, num_steps=10)
    assert calm.ends == simulate(planned_job(PLAN, problem()), num_steps=10).ends
    assert pr.predict(*given, "sdpipe_b", sync="adaptive").step_time > calm.step_time


def test_a_plan_says_what_it_was_made_for(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said([str(plan), "--sync", "all_reduce,adaptive,decoupled"], capsys)
    assert (status, err) == (0, "")
    first, second, third = (out.index(f"\n{name}") for name in ("all_reduce", "adaptive", "dec"))
    assert first < second < third
    assert "a -> a" in out


def test_schedules_and_what_ifs_are_more_rows(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = said(
        [str(plan), "--schedule", "1f1b;gpipe", "--what-if", "device 3 slow x4", "--steps", "3"],
        capsys,
    )
    assert out.count("all_reduce, 1f1b") == 3  # and the title of its links
    assert "all_reduce, gpipe, if device 3 slow x4" in out


def test_its_runs_are_written_and_can_be_replayed(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    said([str(plan), "--sync", "adaptive", "--steps", "3", "--out", str(runs)], capsys)
    with pytest.raises(SystemExit) as ended:
        cli.main(["replay", str(runs / "adaptive")])
    assert ended.value.code == 0
    assert "replayed alike" in capsys.readouterr().out
    status, _, err = said([str(plan), "--sync", "adaptive", "--out", str(runs)], capsys)
    assert status == 2
    assert "has the log of a run already" in err


def test_money_is_by_the_hour_and_by_the_gigabyte(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from polyrhythm.simulate.compare import Way

    job = planned_job(PLAN, problem())
    way = Way(name="x", job=job, found=simulate(job, num_steps=10))
    by_the_hour = 4 * 2.0 * way.found.duration / 10 / 3600
    # Each stage's 2 MB of gradients go to the other region and back, in two halves.
    assert way.price == pytest.approx(by_the_hour + 0.1 * 4 * 2e6 / 1e9, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "case5_worldwide"], "a device of cluster"),
        (["--sync", "adaptiv"], "did you mean 'adaptive'?"),
        (["--schedule", "2f2b"], "write kfkb:2"),
        (["--scenario", "nowhere.toml"], "nowhere.toml"),
        (["--what-if", "link a-c x2"], "unknown region or device 'c'"),
        (["--steps", "0"], "--steps 0"),
        (["--lr", "nan"], "--lr nan"),
        (["--out", "/proc/x"], "--out /proc/x"),
        (["--spot-duration", "10min"], "--spot-duration without --spot"),
        (["--converge", "quadratic", "--what-if", "device 1 gone"], "--converge with devices"),
        (["--sync", "decoupled", "--what-if", "device 1 gone"], "here training would end"),
        (["--spot", "nothing"], "nothing"),
        (["--spot", "bamboo_aws_p3", "--spot-duration", "soon"], "soon"),
    ],
)
def test_bad_input_is_refused_with_a_fix(
    plan: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = said([str(plan), *arguments], capsys)
    assert status == 2
    assert words in err
    assert "fix:" in err


def test_a_plan_whose_cluster_is_not_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PLAN.save(tmp_path / "plan.json")
    status, _, err = said([str(tmp_path / "plan.json")], capsys)
    assert status == 2
    assert "made from cluster.toml, which is not there" in err


def test_a_plan_that_does_not_say_what_it_is_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(PLAN, sources=None).save(tmp_path / "plan.json")
    status, _, err = said([str(tmp_path / "plan.json")], capsys)
    assert status == 2
    assert "add --cluster FILE" in err


def test_a_scenario_for_absent_devices(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "scenario.json"
    scenario.write_text(json.dumps({"name": "x", "kill": [{"device": "d9", "at_s": 1}]}))
    status, _, err = said([str(plan), "--scenario", str(scenario)], capsys)
    assert status == 2
    assert "unknown device 'd9'" in err

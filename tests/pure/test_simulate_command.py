"""`polyrhythm simulate`: simulates a plan file with several policies, and refuses invalid input."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import polyrhythm as pr
from polyrhythm import cli
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.describe.write import write_cluster, write_model
from polyrhythm.errors import PlanError
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.plan import PipelinePlan, Plan, Sources
from polyrhythm.plan.predict import predict
from polyrhythm.plan.problem import Problem
from polyrhythm.simulate.from_plan import planned_job
from polyrhythm.simulate.simulator import simulate
from polyrhythm.sinks.progress import SimulationProgress

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
    return Problem(cluster=CLUSTER, profile=PROFILE, job=TrainingJob(batch_size=16))


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    write_cluster(CLUSTER, tmp_path / "cluster.toml")
    write_model(PROFILE, tmp_path / "profile.json")
    PLAN.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def run_simulate(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_simulated_step_time_matches_the_prediction() -> None:
    found = simulate(planned_job(PLAN, problem()), num_steps=10)
    assert found.step_time == pytest.approx(predict(PLAN, problem()).time.total, rel=0.02)


def test_scripts_simulate_with_one_call(plan: Path, tmp_path: Path) -> None:
    calm = pr.simulate(plan, num_steps=10)
    assert calm.ends == simulate(planned_job(PLAN, problem()), num_steps=10).ends
    assert pr.simulate(plan, "sdpipe_b", sync="adaptive").step_time > calm.step_time
    given = pr.simulate(PLAN, cluster=CLUSTER, profile=PROFILE, num_steps=10)
    assert given.ends == calm.ends
    with pytest.raises(PlanError, match="does not name the cluster that it was made for") as error:
        pr.simulate(replace(PLAN, sources=None))
    assert "cluster=" in error.value.fix


def test_plan_of_a_script_remembers_its_files(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = pr.make_plan("cluster.toml", "profile.json", batch_size=16)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    made.save("plan.json")
    assert pr.simulate("plan.json").ends == pr.simulate(made).ends


def test_plan_names_its_cluster_and_profile(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_simulate([str(plan), "--sync", "all_reduce,adaptive,decoupled"], capsys)
    assert (status, err) == (0, "")
    first, second, third = (out.index(f"\n{name}") for name in ("all_reduce", "adaptive", "dec"))
    assert first < second < third
    assert "busiest links, all_reduce\n" in out


@pytest.mark.parametrize("schedules", ["1f1b;gpipe", "gpipe,1f1b", "bounded:2,1,1f1b, gpipe"])
def test_each_schedule_and_what_if_is_a_row(
    plan: Path, schedules: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run_simulate(
        [str(plan), "--schedule", schedules, "--what-if", "device 3 slow x4", "--steps", "3"],
        capsys,
    )
    for schedule in ("1f1b", "gpipe", *(["bounded:2,1"] if "bounded" in schedules else [])):
        assert out.count(f"\nall_reduce, {schedule} ") == 1
        assert out.count(f"\nall_reduce, {schedule}, if device 3 slow x4 ") == 1


def test_figures_of_a_column_have_one_unit(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_simulate([str(plan), "--what-if", "device 3 slow x9", "--steps", "3"], capsys)
    calm, slow = (line for line in out.splitlines() if line.startswith("all_reduce"))
    job = planned_job(PLAN, problem())
    step_time = simulate(job, num_steps=3).step_time
    assert step_time < 1
    assert f" {step_time:.4g}s " in calm
    assert float(slow.split("x9")[1].split()[0].removesuffix("s")) > 1


@pytest.mark.parametrize(("inside", "between"), [(1e9, 1e8), (1e7, 1e9)])
def test_links_are_ranked_by_the_time_that_they_are_busy(
    plan: Path, inside: float, between: float, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = replace(CLUSTER, bandwidth=((inside, between), (between, inside)))
    write_cluster(cluster, plan.parent / "cluster.toml")
    _, out, _ = run_simulate([str(plan), "--steps", "10"], capsys)
    found = simulate(planned_job(PLAN, replace(problem(), cluster=cluster)), num_steps=10)
    assert found.bytes_sent[0, 1] > found.bytes_sent[0, 0]
    # Two links each: d0 and d1 send to each other; d0 sends to d2, and d1 to d3.
    expected = {
        f"{'ab'[a]} -> {'ab'[b]}": found.bytes_sent[a, b]
        / (inside if a == b else between)
        / (2 * found.duration)
        for a, b in ((0, 0), (0, 1), (1, 0), (1, 1))
    }
    lines = out[out.index("busiest links") :].splitlines()[3:]
    assert [line[:6] for line in lines] == sorted(expected, key=lambda link: -expected[link])
    assert [line.split()[3] for line in lines] == [f"{expected[line[:6]]:.1%}" for line in lines]


def test_policy_with_rare_averages_gets_a_note(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run_simulate([str(plan), "--sync", "local,all_reduce", "--steps", "3"], capsys)
    assert "note: local averages once in 500 steps, so never in these 3\n" in out
    assert out.count("note:") == 1


def spot(plan: Path) -> list[str]:
    """Arguments with a recording in which d0 is lost at 2 s and rejoins at 3 s."""
    trace = plan.parent / "spot.json"
    trace.write_text('{"name": "x", "duration_s": 5, "nodes_s": [[0, 2, 3], [0], [0], [0]]}')
    return [str(plan), "--spot", str(trace), "--sync", "adaptive"]


def test_losses_in_the_simulated_time_are_counted(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, err = run_simulate([*spot(plan), "--steps", "5"], capsys)
    assert "the recording lasts 5s; losses of devices of the plan: 1, the first after 2s" in out
    assert "adaptive: 1 of them in the " in out
    assert "no device was lost" not in out
    assert err == ""


def test_absence_of_losses_is_reported(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run_simulate([*spot(plan), "--steps", "5", "--spot-duration", "10h"], capsys)
    assert "the recording lasts 10h" in out
    assert "the first after 4h" in out
    assert "adaptive: none of them in the " in out
    assert "no device was lost" in out
    assert err == ""


def test_a_recording_that_ends_early_is_warned_of(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = run_simulate([*spot(plan), "--steps", "30"], capsys)
    assert err.startswith("warning: the recording ")
    assert "ends after 5s of " in err


def test_what_follows_from_losses_is_shown(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = plan.parent / "lost.json"
    scenario.write_text(json.dumps({"name": "lost", "kill": [{"device": "d1", "at_s": 1.0}]}))
    arguments = [str(plan), "--sync", "decoupled", "--scenario", str(scenario)]
    _, out, _ = run_simulate(arguments, capsys)
    assert "decoupled: at 1s d1 is lost; after 0.4s: pipeline 0 is broken" in " ".join(out.split())
    _, out, _ = run_simulate([*arguments, "--replan"], capsys)
    assert "keep the running plan" in out or "pays for a pause" in out


def test_progress_is_shown_only_on_a_terminal() -> None:
    job = planned_job(PLAN, problem())
    for is_terminal in (True, False):
        console = Console(file=StringIO(), force_terminal=is_terminal, width=100)
        with SimulationProgress(console) as progress:
            observers = progress.observers_for("mode [1]", 5 * len(job.sync.workers))
            found = simulate(job, num_steps=5, observers=observers)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("mode [1]" in shown and "100%" in shown) is is_terminal
        assert is_terminal or not shown
        assert found.ends == simulate(job, num_steps=5).ends


def test_simulated_runs_are_written_and_can_be_replayed(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    run_simulate([str(plan), "--sync", "adaptive", "--steps", "3", "--out", str(runs)], capsys)
    with pytest.raises(SystemExit) as ended:
        cli.main(["replay", str(runs / "adaptive")])
    assert ended.value.code == 0
    assert "replayed identically" in capsys.readouterr().out
    status, _, err = run_simulate([str(plan), "--sync", "adaptive", "--out", str(runs)], capsys)
    assert status == 2
    assert "already has the log of a run" in err


def test_price_counts_hours_and_egress(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from polyrhythm.simulate.compare import Variant

    job = planned_job(PLAN, problem())
    variant = Variant(name="x", job=job, result=simulate(job, num_steps=10))
    by_the_hour = 4 * 2.0 * variant.result.duration / 10 / 3600
    # Each stage's 2 MB of gradients go to the other region and back, in two phases.
    assert variant.price == pytest.approx(by_the_hour + 0.1 * 4 * 2e6 / 1e9, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "case5_worldwide"], "a device of cluster"),
        (["--sync", "adaptiv"], "did you mean 'adaptive'?"),
        (["--sync", "x"], "ssp, balanced, local, decoupled\n"),
        (["--schedule", "2f2b"], "write kfkb:2"),
        (["--scenario", "nowhere.toml"], "nowhere.toml"),
        (["--what-if", "link a-c x2"], "unknown region or device 'c'"),
        (["--steps", "0"], "--steps 0"),
        (["--lr", "nan"], "--lr nan"),
        (["--out", "/proc/x"], "--out /proc/x"),
        (["--spot-duration", "10min"], "--spot-duration without --spot"),
        (["--converge", "quadratic", "--what-if", "device 1 gone"], "--converge with devices"),
        (["--sync", "static", "--what-if", "device 1 gone"], "static with devices"),
        (["--spot", "nothing"], "nothing"),
        (["--spot", "bamboo_aws_p3", "--spot-duration", "soon"], "soon"),
    ],
)
def test_bad_input_is_refused_with_a_fix(
    plan: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run_simulate([str(plan), *arguments], capsys)
    assert status == 2
    assert message in err
    assert "fix:" in err


def test_plan_whose_cluster_file_is_missing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PLAN.save(tmp_path / "plan.json")
    status, _, err = run_simulate([str(tmp_path / "plan.json")], capsys)
    assert status == 2
    assert "made from cluster.toml, which is not there" in err


def test_plan_without_sources_needs_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(PLAN, sources=None).save(tmp_path / "plan.json")
    status, _, err = run_simulate([str(tmp_path / "plan.json")], capsys)
    assert status == 2
    assert "add --cluster FILE" in err


def test_scenario_with_unknown_devices_is_refused(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "scenario.json"
    scenario.write_text(json.dumps({"name": "x", "kill": [{"device": "d9", "at_s": 1}]}))
    status, _, err = run_simulate([str(plan), "--scenario", str(scenario)], capsys)
    assert status == 2
    assert "unknown device 'd9'" in err

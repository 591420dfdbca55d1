"""`polyrhythm plan`: its output, its files and refused input. The search has separate tests."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyrhythm import cli
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scale import fewer_devices
from polyrhythm.describe.write import write_cluster, write_model
from polyrhythm.plan import search
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.replan import ReplanResult
from polyrhythm.plan.search import PlanResult, search_plan
from tests.grids import long_except
from tests.pure.plan_examples import cluster, predicted, problem, profile

SITES = {"Oregon": 3, "Tokyo": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder with cluster.toml, free.toml (without prices), profile.json."""
    monkeypatch.chdir(tmp_path)
    write_cluster(cluster(SITES), Path("cluster.toml"))
    write_cluster(cluster(SITES, price=None), Path("free.toml"))
    write_model(profile(), Path("profile.json"))
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Record the problems passed to the search."""
    problems: list[Problem] = []

    def spied(of: Problem, **options: Any) -> PlanResult:
        problems.append(of)
        return search_plan(of, **options)

    monkeypatch.setattr(search, "search_plan", spied)
    return problems


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def search_plan(*_: object, **__: object) -> PlanResult:
        pytest.fail("invalid input must be refused before the search")

    monkeypatch.setattr(search, "search_plan", search_plan)


def plan(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


GOOD = ("cluster.toml", "profile.json", "--batch-size", "32")


@pytest.mark.usefixtures("asked")
def test_a_plan_is_shown_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*GOOD, "-o", "plan.json", "--svg", "plan.svg") == 0
    out = capsys.readouterr().out
    assert "planning 0/" in out
    assert "1 stage x 5 pipelines, micro-batches of 2, sync all_reduce" in out
    assert "samples/s" in out
    assert "written to plan.json" in out
    found = Plan.load("plan.json")
    assert found.batch == 32
    assert len(found.pipelines) == 5
    assert found.predicted is not None
    assert ElementTree.parse("plan.svg").getroot().tag.endswith("svg")


@pytest.mark.usefixtures("asked")
def test_no_file_is_written_without_out(folder: Path) -> None:
    before = sorted(folder.iterdir())
    assert plan(*GOOD) == 0
    assert sorted(folder.iterdir()) == before


def test_options_reach_the_search(asked: list[Problem]) -> None:
    options = (
        "--objective cost --sync decoupled --num-stages 2 --num-pipelines 1 --microbatch-size 2"
    )
    options += " --schedule 1f1b --gradient-bytes 2 --optimizer-bytes 6 --memory-reserve 0.2"
    assert plan(*GOOD, *options.split(), "--no-unequal") == 0
    job = asked[0].job
    assert (job.batch_size, job.objective, job.sync) == (32, "cost", "decoupled")
    assert (job.num_stages, job.num_pipelines, job.microbatch_size) == (2, 1, 2)
    assert (job.schedule, job.unequal) == ("1f1b", False)
    assert (job.gradient_bytes, job.optimizer_bytes, job.memory_reserve) == (2, 6, 0.2)


def test_bundled_names_are_accepted(asked: list[Problem]) -> None:
    arguments = "case5_worldwide bert-base-128 --flops 1e13 --batch-size 48 --dtype float16"
    assert plan(*arguments.split(), "--num-stages", "8", "--num-pipelines", "2") == 0
    assert asked[0].num_devices == 64
    assert asked[0].profile.microbatch_sizes == (1, 2, 4, 8, 16)  # powers of two that divide 48
    small, large = asked[0].profile, asked[0].profile.at(16)
    assert large.layers[1].forward == pytest.approx(16 * small.layers[1].forward)
    assert large.layers[1].stored_bytes == 16 * small.layers[1].stored_bytes


def test_without_flops_a_builtin_model_uses_those_of_the_cluster(asked: list[Problem]) -> None:
    where = cluster(SITES)
    devices = tuple(
        replace(device, flops=1e13 * (i + 1), memory=None) for i, device in enumerate(where.devices)
    )
    write_cluster(replace(where, devices=devices), Path("probed.toml"))
    assert plan("probed.toml", "bert-base-128", "--batch-size", "8", "--microbatch-size", "1") == 0
    assert asked[0].profile.flops == 1e13
    assert asked[0].speeds == pytest.approx((1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    ("pick", "degrees", "place"),
    long_except([("fastest", (1, 5), "1"), ("cheapest", (1, 1), "5"), ("2", (2, 2), "2")], 1),
)
def test_picked_plan_of_the_front_is_written(
    asked: list[Problem],
    capsys: pytest.CaptureFixture[str],
    pick: str,
    degrees: tuple[int, int],
    place: str,
) -> None:
    assert plan(*GOOD, "--objective", "both", "--pick", pick, "-o", "plan.json") == 0
    found = Plan.load("plan.json")
    assert (found.num_stages, found.num_pipelines) == degrees
    [marked] = [line for line in capsys.readouterr().out.splitlines() if "this one" in line]
    assert marked.startswith(place)
    assert {each.job.objective for each in asked} == {"both", "time", "cost"}


def changed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace replan by one that moves a device to a 2 x 2 plan; record its arguments."""
    asked: dict[str, Any] = {}

    def replan(running: Plan, of: Problem, **options: Any) -> ReplanResult:
        asked.update(options, running=running, problem=of)
        best = predicted(2, 2, of)
        return ReplanResult(
            planned=PlanResult(best=best, bound=0.5 * best.time.total, front=()),
            migration=12.0,
            moved=("Oregon/2",),
            from_checkpoint=(),
            why="two are faster than one",
        )

    monkeypatch.setattr("polyrhythm.plan.replan.replan", replan)
    return asked


def test_a_running_plan_is_weighed_against_a_new_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = changed(monkeypatch)
    old = predicted(2, 1, problem(cluster(SITES))).plan
    replace(old, sync="decoupled").save(Path("old.json"))
    options = "--running old.json --steps 500 -o plan.json"
    assert plan("cluster.toml", "profile.json", *options.split()) == 0
    assert asked["steps"] == 500
    assert (asked["problem"].job.batch_size, asked["problem"].job.sync) == (32, "decoupled")
    out = capsys.readouterr().out
    assert "decision   two are faster than one" in out
    assert "1 device: Oregon/2 with new layers; 3 as before" in out
    assert "migration  12s" in out
    assert "of 500 steps" in out
    assert Plan.load("plan.json").num_pipelines == 2


def test_a_running_plan_whose_device_is_lost_cannot_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(monkeypatch)
    predicted(2, 1, problem(cluster({"Kyoto": 2}))).plan.save(Path("old.json"))
    assert plan(*GOOD, "--running", "old.json", "--steps", "500") == 0
    assert "running    cannot continue: device 'Kyoto/0'" in capsys.readouterr().out


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("cluster.toml profile.json", "no --batch-size"),
        ("cluster.toml profile.json --batch-size 0", "batch_size=0"),
        ("cluster.toml profile.json --batch-size 8 --num-stages 0", "num_stages=0"),
        ("cluster.toml profile.json --batch-size 8 --memory-reserve 1.5", "memory_reserve=1.5"),
        ("cluster.toml profile.json --batch-size 8 --seed -1", "--seed -1"),
        ("cluster.toml profile.json --batch-size 8 --schedule 2f2b", "kfkb:2"),
        ("cluster.toml profile.json --batch-size 8 -o plan.txt", "-o plan.json"),
        ("cluster.toml profile.json --batch-size 8 -o no/plan.json", "mkdir -p no"),
        ("cluster.toml profile.json --batch-size 8 --svg plan.png", "--svg plan.svg"),
        ("cluster.toml profile.json --batch-size 8 --pick 2", "--objective both"),
        ("cluster.toml profile.json --batch-size 8 --objective both --pick best", "--pick best"),
        ("cluster.toml profile.json --batch-size 8 --steps 9", "--steps without --running"),
        ("cluster.toml profile.json --batch-size 8 --running p.json", "--running without --steps"),
        ("cluster.toml profile.json --batch-size 8 --running p.json --steps 0", "--steps 0"),
        ("cluster.toml profile.json --batch-size 8 --running p.json --steps 9", "cannot read it"),
        ("cluster.toml profile.json --running cluster.toml --steps 9", "no schema"),
        ("profile.json cluster.toml --batch-size 8", "profile.json describes a model"),
        ("cluster.toml cluster.toml --batch-size 8", "cluster.toml describes a cluster"),
        ("bert-base cluster.toml --batch-size 8", "bert-base describes a model"),
        ("cluster.toml case5_worldwide --batch-size 8", "case5_worldwide describes a cluster"),
        ("case5_worldwid profile.json --batch-size 8", "did you mean 'case5_worldwide'?"),
        ("cluster.toml bert-bse --batch-size 8", "did you mean 'bert-base'?"),
        ("cluster.toml bert-base --batch-size 8", "bert-base without the speed of the devices"),
        (
            "cluster.toml profile.json --batch-size 8 --flops 1e12",
            "--flops or --dtype for profile.json",
        ),
        ("cluster.toml bert-base --batch-size 8 --flops 0", "flops is 0"),
        ("cluster.toml bert-base --batch-size 8 --flops nan", "flops is nan"),
        (
            "cluster.toml bert-base --batch-size 8 --flops 1e12 --microbatch-size 0",
            "microbatch_size=0",
        ),
        ("nowhere.toml profile.json --batch-size 8", "cannot read it"),
        ("cluster.toml nowhere.json --batch-size 8", "cannot read it"),
    ],
)
def test_invalid_arguments_are_refused_before_the_search(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert plan(*arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "expected:" in error
    assert "fix:" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("free.toml profile.json --batch-size 8 --objective cost", "'Oregon/0'"),
        ("free.toml profile.json --batch-size 8 --objective both", "'Oregon/0'"),
        ("cluster.toml profile.json --batch-size 7", "a batch of 7"),
        ("cluster.toml profile.json --batch-size 8 --microbatch-size 3", "micro-batches of 3"),
        ("cluster.toml profile.json --batch-size 8 --num-stages 9", "9 stages"),
        ("cluster.toml profile.json --batch-size 8 --num-pipelines 6", "6 pipelines"),
    ],
)
def test_infeasible_job_is_refused_by_the_search(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert plan(*arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "fix:" in error


def test_pick_beyond_the_front_is_refused(
    asked: list[Problem], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*GOOD, "--objective", "both", "--pick", "6", "-o", "plan.json") == 2
    captured = capsys.readouterr()
    assert "a number from 1 to 5" in captured.err
    assert "price/step" in captured.out  # the table is printed before the error
    assert not Path("plan.json").exists()


def test_a_missing_link_is_refused_with_the_pair(capsys: pytest.CaptureFixture[str]) -> None:
    link = '[[links]]\nfrom = "{}"\nto = "{}"\nlatency = "1ms"\nbandwidth = "1Gbit/s"\n'
    devices = "".join(f'[[devices]]\nname = "{name}"\n' for name in ("desktop", "attic", "cloud"))
    text = (
        f'name = "x"\n{devices}' + link.format("desktop", "attic") + link.format("attic", "cloud")
    )
    Path("cluster.toml").write_text(text)
    assert plan(*GOOD) == 2
    assert "no link from 'desktop' to 'cloud'" in capsys.readouterr().err


def test_a_link_that_is_slow_in_one_direction_is_slow_in_that_direction_only() -> None:
    def step(there: float, back: float) -> float:
        where = cluster({"a": 1, "b": 1})
        links = ((125e6, there), (back, 125e6))
        return predicted(2, 1, problem(replace(where, bandwidth=links))).time.total

    fast, slow = 125e6, 125e4
    assert step(fast, fast) < step(slow, fast) < step(slow, slow)
    assert step(fast, fast) < step(fast, slow) < step(slow, slow)


def test_one_device_gets_a_plan_by_the_real_search(capsys: pytest.CaptureFixture[str]) -> None:
    write_cluster(cluster({"desktop": 1}), Path("one.toml"))
    assert plan("one.toml", "profile.json", "--batch-size", "4", "-o", "plan.json") == 0
    assert "desktop/0" in capsys.readouterr().out
    assert set(Plan.load("plan.json").pipelines[0].devices) == {"desktop/0"}


def test_a_lost_device_is_replaced_by_the_real_search(capsys: pytest.CaptureFixture[str]) -> None:
    predicted(2, 1, problem(cluster({"Oregon": 3}), job=TrainingJob(batch_size=8))).plan.save(
        Path("old.json")
    )
    where = cluster({"Oregon": 3})
    write_cluster(replace(where, devices=where.devices[1:]), Path("now.toml"))
    options = "--running old.json --steps 100 --num-stages 2 --num-pipelines 1 -o plan.json"
    assert plan("now.toml", "profile.json", *options.split()) == 0
    assert "cannot continue: device 'Oregon/0'" in capsys.readouterr().out
    assert set(Plan.load("plan.json").pipelines[0].devices) == {"Oregon/1", "Oregon/2"}


def test_fewer_devices_keep_the_prices_of_their_regions() -> None:
    spot = Cluster.load("case2_datacenter_spot")
    prices = {region: float(number) for number, region in enumerate(spot.regions)}
    fewer = fewer_devices(replace(spot, egress_price_per_gb=tuple(prices.values())), 2)
    assert fewer.regions == ("spot_instance_0", "standalone")  # the first and the last
    assert fewer.egress_price_per_gb == (prices["spot_instance_0"], prices["standalone"])


def test_help_does_not_import_the_planner() -> None:
    check = "import polyrhythm.cli, sys; print({'numba', 'scipy', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"

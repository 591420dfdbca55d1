"""`polyrhythm train --lab`: a script on one host per device, and its errors."""

import os
import signal
import statistics
import sys
import time
from pathlib import Path

import pytest

from polyrhythm.cli import main
from polyrhythm.describe.write import write_cluster
from polyrhythm.events import read_run
from polyrhythm.lab.lab import Lab
from polyrhythm.lab.program import run_program
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.processes import TERMINATED, Child
from polyrhythm.types import Worker
from tests.grids import long_except
from tests.lab.hosts import cluster
from tests.lab.training_script import NUM_STEPS, SCRIPT, losses

PRINT_TRAINS = "print('trains', flush=True)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "found").mkdir()
    write_cluster(cluster(4, latency=0.002), tmp_path / "four.toml")
    write_cluster(cluster(8, latency=0.002), tmp_path / "eight.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_plan(folder: Path, layers_per_stage: tuple[int, ...], *devices: str) -> None:
    Plan(
        layers_per_stage=layers_per_stage,
        pipelines=tuple(PipelinePlan(devices=tuple(d), schedule="1f1b") for d in devices),
    ).save(folder / "plan.json")


def train(*arguments: str) -> tuple[int | None, str]:
    """Run the command in a fork; return its exit status and output."""
    child = Child(lambda: main(["train", *arguments]), output=Path("shown.txt"))
    try:
        assert child.wait(80) is not None, "not done in time"
    finally:
        child.end()
    return child.status, Path("shown.txt").read_text()


@pytest.fixture(scope="module")
def single_process_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "script.py").write_text(SCRIPT)
    child = Child(lambda: run_program([sys.executable, str(folder / "script.py"), str(folder)], {}))
    assert child.wait(80) == 0, child.reason
    return losses(folder)


@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("lab", "layers_per_stage", "devices"),
    long_except(
        [
            ("four.toml", (2, 4), ("dd", "cb")),  # two stages on one device, and one unused
            ("eight.toml", (1, 2, 2, 1), ("", "")),  # on any devices
        ],
        0,
    ),
)
def test_pipelines_in_lab_match_one_process(
    folder: Path,
    lab: str,
    layers_per_stage: tuple[int, ...],
    devices: tuple[str, str],
    single_process_losses: list[float],
) -> None:
    write_plan(folder, layers_per_stage, *devices)
    status, shown = train("script.py", "--lab", lab, "--plan", "plan.json", "--", "found")
    assert status == 0, shown
    hosts = "".join(devices) or "abcdefgh"
    assert f"s0p0 on {hosts[0]}\n" in shown
    assert "s0p1" not in shown
    logs = "".join(path.read_text() for path in Path("runs/output").iterdir())
    num_stages = len(layers_per_stage)
    for rank, host in enumerate(hosts[1:], start=1):
        assert f"s{rank % num_stages}p{rank // num_stages} on {host}\n" in logs
    assert len(single_process_losses) == NUM_STEPS
    assert losses(folder / "found") == pytest.approx(single_process_losses, rel=1e-5)


@pytest.mark.long
@pytest.mark.timeout(110)
def test_scenario_slows_the_trainer(folder: Path) -> None:
    """Compare action by action: a pause of the machine is longer than many actions."""
    write_plan(folder, (6,), "a", "b")
    Path("slow.toml").write_text('name = "s"\n[[slow]]\ndevice = "b"\nfactor = 20\n')
    options = ["--lab", "four.toml", "--plan", "plan.json", "--scenario", "slow.toml"]
    status, shown = train("script.py", *options, "--", "found", "run")
    assert status == 0, shown
    durations: dict[Worker, list[float]] = {Worker(0, 0): [], Worker(0, 1): []}
    for event in read_run(folder / "run"):
        if event.kind == "action":
            durations[event.worker].append(event.duration - event.values["wait"])
    quick, slow = durations.values()
    ratios = [slow_time / quick_time for quick_time, slow_time in zip(quick, slow, strict=True)]
    assert statistics.median(ratios) > 5


@pytest.mark.timeout(110)
def test_failure_on_one_host_ends_the_job_and_is_reported_once(folder: Path) -> None:
    write_plan(folder, (2, 4), "", "")
    options = ["--lab", "four.toml", "--plan", "plan.json", "--output", "logs"]
    status, shown = train("script.py", *options, "--", "found", "run", "c")
    assert status == 1
    assert shown.count("error: ") == 1
    assert "error: c failed: ValueError: on purpose\n  its output: logs/c.log" in shown
    assert "Traceback" in Path("logs/c.log").read_text()


@pytest.mark.timeout(110)
def test_sigterm_saves_a_checkpoint_in_lab(folder: Path) -> None:
    write_plan(folder, (2, 4), "", "")
    forever = SCRIPT.replace(f"steps={NUM_STEPS}", "steps=10**6")
    Path("script.py").write_text(forever.replace("fail(end):", f"fail(end):\n    {PRINT_TRAINS}"))
    options = ["--lab", "four.toml", "--plan", "plan.json"]
    child = Child(
        lambda: main(["train", "script.py", *options, "--", "found", "run"]),
        output=Path("shown.txt"),
    )
    try:
        deadline = time.monotonic() + 60
        while "trains" not in Path("shown.txt").read_text():
            assert child.status is None, Path("shown.txt").read_text()
            assert time.monotonic() < deadline, "it does not start"
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(40) == TERMINATED, Path("shown.txt").read_text()
    finally:
        child.end()
    assert list(Path("run/checkpoints").glob("step-*"))


@pytest.mark.long
@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("layers", "text", "status", "message"),
    [
        ((1, 2), SCRIPT, 2, "a plan for 3 layers, and a model with 6"),
        ((2, 4), "print('hello')", 2, "script.py has ended without training"),
        ((2, 4), "raise SystemExit(3)", 1, "error: a failed: exit status 3"),
        ((2, 4), "1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_error_on_all_hosts_is_reported_once(
    folder: Path, layers: tuple[int, ...], text: str, status: int, message: str
) -> None:
    write_plan(folder, layers, "", "")
    Path("script.py").write_text(text)
    found, shown = train("script.py", "--lab", "four.toml", "--plan", "plan.json", "--", "found")
    assert found == status, shown
    assert shown.count(message) == 1
    assert shown.count("error: ") == 1


@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("devices", "arguments", "message"),
    [
        (("ab", "cx"), [], "the plan has s1p1 on 'x': no device of cluster 'test'"),
        (("", "", ""), [], "4 devices for 2 stages x 3 pipelines"),
        (("", ""), ["--timeout", "0"], "--timeout 0"),
        (("", ""), ["--scenario", "nowhere"], "nowhere"),
        (("", ""), ["--output", "script.py"], "output folder script.py"),
    ],
)
def test_invalid_lab_arguments_are_rejected_before_start(
    folder: Path, devices: tuple[str, ...], arguments: list[str], message: str
) -> None:
    write_plan(folder, (2, 4), *devices)
    options = ["--lab", "four.toml", "--plan", "plan.json", *arguments]
    status, shown = train("script.py", *options, "--", "found")
    assert status == 2, shown
    assert shown.startswith("error: ")
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.timeout(110)
def test_groups_form_when_first_worker_is_not_on_the_store_host(folder: Path) -> None:
    """The launcher's rank 0 hosts the store; the plan assigns workers to devices."""
    write_plan(folder, (6,), "b", "a")
    script = SCRIPT.replace("timeout=30", "timeout=30, sync='adaptive', plan='plan.json'")
    Path("script.py").write_text(script)
    with Lab(cluster(2, latency=0.002)) as lab:
        common = {"MASTER_ADDR": lab.address("a"), "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        children = [
            lab.run(
                host,
                [sys.executable, "script.py", "found"],
                environment={**common, "RANK": str(rank), "POLYRHYTHM_DEVICE": host},
                output=folder / f"{host}.log",
            )
            for rank, host in enumerate("ab")
        ]
        lab.wait(children, timeout=60.0)
        assert "s0p1 on a" in Path("a.log").read_text()
        assert "s0p0 on b" in Path("b.log").read_text()

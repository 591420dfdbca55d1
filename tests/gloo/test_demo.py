"""The demo as a user runs it: real training, its run folder, rejected input, Ctrl-C."""

import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from polyrhythm.events import Event, read_run
from polyrhythm.sync.log_reader import DecisionReader
from polyrhythm.types import Worker
from tests.gloo.commands import ForkedCommand, run_forked

SMALL = ["--steps", "30", "--width", "32", "--context", "32", "--blocks", "2"]


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=90, check=False)


def only_run(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def losses(events: list[Event]) -> list[float]:
    """Return the mean loss of each step over the pipelines."""
    by_step: dict[int, list[float]] = {}
    for event in events:
        if event.kind == "step" and event.step is not None and "loss" in event.values:
            by_step.setdefault(event.step, []).append(float(event.values["loss"]))
    return [sum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)]


@pytest.mark.timeout(150)
def test_demo_learns_and_writes_run_folder(tmp_path: Path) -> None:
    done = run_forked("demo", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path)
    assert f"run folder: {folder.relative_to(tmp_path)}" in done.stdout
    assert "2 pipelines = 4 processes, schedule 1f1b, sync decoupled, 30 steps" in done.stdout
    assert re.search(r"step +30/30  loss \d\.\d+  samples/s p0 [\d,]+  p1 [\d,]+", done.stdout)
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.toml",
        "events.jsonl",
        "lock",
        "metrics.jsonl",
        "plan.json",
    ]
    assert tomllib.loads((folder / "config.toml").read_text())["width"] == 32

    events = list(read_run(folder))
    workers = {Worker(stage, pipeline) for stage in range(2) for pipeline in range(2)}
    for worker in workers:
        own = [event for event in events if event.worker == worker]
        first_step = [e.name for e in own if e.kind == "action" and e.step == 0]
        assert first_step == (
            ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
            if worker.stage == 0
            else ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
        )
        assert len([e for e in own if e.kind == "step"]) == 30
    curve = losses(events)
    assert len(curve) == 30
    assert sum(curve[-5:]) / 5 < curve[0] - 0.5


@pytest.mark.timeout(150)
def test_policy_options_reach_scheduler_and_run_folder(tmp_path: Path) -> None:
    shape = [*SMALL, "--steps", "6", "--num-stages", "1", "--num-pipelines", "3"]
    options = ["--sync", "partial_reduce", "--sync-options", "group_size=2", "timeout=1"]
    done = run_forked("demo", *shape, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "schedule 1f1b, sync partial_reduce, 6 steps" in done.stdout
    folder = only_run(tmp_path)
    saved = tomllib.loads((folder / "config.toml").read_text())
    assert saved["sync_options"] == ["group_size=2", "timeout=1"]
    assert DecisionReader(folder / "scheduler.jsonl").setup.options["group_size"] == 2
    sizes = {
        len(str(event.values["members"]).split())
        for event in read_run(folder)
        if event.kind == "average"
    }
    assert sizes == {2, 3}, "and all at the end"
    reported = run_forked("report", str(folder), cwd=tmp_path)
    assert reported.returncode == 0, reported.stderr
    assert re.search(r"\d+ groups of 2\.\d+ workers on average", reported.stdout)
    assert re.search(r"groups +\d+ averaged, 0 aborted", reported.stdout)
    replayed = run_forked("replay", str(folder), cwd=tmp_path)
    assert re.fullmatch(r"[\d,]+ decisions, replayed identically\n", replayed.stdout), (
        replayed.stderr
    )


@pytest.mark.long
@pytest.mark.timeout(150)
def test_torchrun_gives_the_same_losses_as_the_local_launcher(tmp_path: Path) -> None:
    local_folder, torchrun_folder = tmp_path / "here", tmp_path / "there"
    local_folder.mkdir()
    torchrun_folder.mkdir()
    options = [*SMALL, "--steps", "4"]
    local = run_forked("demo", *options, cwd=local_folder)
    torchrun = run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"),
        *("-m", "polyrhythm", "demo", *options),
        cwd=torchrun_folder,
    )
    assert (local.returncode, torchrun.returncode) == (0, 0), local.stderr + torchrun.stderr
    assert torchrun.stdout.count("run folder:") == 1
    expected = losses(list(read_run(only_run(local_folder))))
    assert len(expected) == 4
    assert expected == losses(list(read_run(only_run(torchrun_folder))))


@pytest.mark.long
@pytest.mark.timeout(150)
def test_torchrun_with_too_few_processes_is_rejected(tmp_path: Path) -> None:
    done = run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "polyrhythm", "demo", *SMALL),
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "error: 2 processes for 2 stages x 2 pipelines" in done.stderr
    assert "expected: 4 processes" in done.stderr
    assert "polyrhythm/cli/" not in done.stderr, "only torchrun prints a traceback"
    assert not (tmp_path / "runs").exists()


def has_events(log: Path) -> bool:
    return log.read_bytes().count(b"\n") > 1  # the first line is the log's header


@contextmanager
def long_demo(cwd: Path) -> Iterator[ForkedCommand]:
    """Start a demo that would run for hours, in its own process group as in a terminal."""
    with ForkedCommand("demo", *SMALL, "--steps", "100000", cwd=cwd) as demo:
        deadline = time.monotonic() + 80
        while not any(has_events(log) for log in cwd.glob("runs/*/workers/s1p1.jsonl")):
            assert time.monotonic() < deadline, "the demo did not start"
            assert demo.child.status is None, demo.stderr
            time.sleep(0.1)
        yield demo


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("signal_number", "status"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.long), (signal.SIGTERM, 143)],
)
def test_interrupted_demo_stops_workers_and_keeps_log(
    tmp_path: Path, signal_number: signal.Signals, status: int
) -> None:
    with long_demo(tmp_path) as demo:
        workers = psutil.Process(demo.child.pid).children(recursive=True)
        assert len(workers) == 5, "with the coordinator"
        demo.child.signal(signal_number)  # like Ctrl-C: to the whole process group
        assert demo.child.wait(30) == status
        assert "Traceback" not in demo.stderr
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []
    files = {path.name for path in only_run(tmp_path).iterdir()}
    assert files >= {"config.toml", "events.jsonl", "plan.json"}
    outputs = [path.read_text() for path in (only_run(tmp_path) / "output").glob("*")]
    assert not any("Traceback" in text for text in outputs), "no worker failed"


@pytest.mark.timeout(150)
def test_killed_worker_is_named_by_the_demo(tmp_path: Path) -> None:
    with long_demo(tmp_path) as demo:
        workers = psutil.Process(demo.child.pid).children(recursive=True)
        max(workers, key=lambda process: process.pid).kill()
        assert demo.child.wait(30) == 1
        error = demo.stderr
    assert "was ended by SIGKILL" in error
    assert "its output" not in error, "it printed nothing"
    assert "Traceback" not in error
    assert list(read_run(only_run(tmp_path)))


@pytest.mark.long
@pytest.mark.timeout(150)
def test_brackets_in_folder_name_are_not_markup(tmp_path: Path) -> None:
    options = [*SMALL, "--steps", "2", "--num-stages", "1", "--num-pipelines", "1"]
    done = run_forked("demo", *options, "--out", "r[/x]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run folder: r[/x]/demo-" in done.stdout


@pytest.mark.timeout(150)
def test_incomplete_torchrun_variables_are_rejected(tmp_path: Path) -> None:
    done = run_forked("demo", cwd=tmp_path, env={"RANK": "0", "WORLD_SIZE": "4"})
    assert done.returncode == 2
    assert "'MASTER_PORT' is missing" in done.stderr
    assert "unset RANK WORLD_SIZE" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.timeout(150)
def test_demo_learns_a_user_text(tmp_path: Path) -> None:
    text = tmp_path / "tide.txt"
    text.write_text("in and out goes the tide, " * 200)
    done = run_forked("demo", *SMALL, "--text", "tide.txt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    curve = losses(list(read_run(only_run(tmp_path))))
    assert curve[-1] < curve[0] / 2


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-stages", "9"], "9 stages for 6 layers"),
        (["--schedule", "kfkb:0"], "k=0"),
        (["--steps", "0"], "--steps 0"),
        (["--lr", "nan"], "--lr nan"),
        (["--text", "missing.txt"], "missing.txt: No such file"),
        (["--text", "short.txt"], "a text of 5 bytes"),
        (["--out", "short.txt"], "short.txt"),
        (["--timeout", "1e300"], "--timeout 1e+300"),
        (["--stepps", "3"], "--stepps"),
        (["--num-stages", "two"], "two"),
        (["--sync", "agee"], "did you mean 'age'?"),
        (["--sync", "ssp"], "it needs a parameter server"),
        (["--sync", "partial_reduce", "--sync-options", "group_size=x"], "in --sync-options"),
        (["--sync-options", "group_size"], "--sync-options 'group_size'"),
        (["--sync", "age", "--sync-options", "max_aeg=3"], "did you mean 'max_age'?"),
    ],
)
def test_bad_input_is_rejected_before_any_process_starts(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "short.txt").write_text("short")
    done = run_forked("demo", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.timeout(150)
@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="needs a machine without a GPU")
def test_missing_gpu_is_rejected_by_workers(tmp_path: Path) -> None:
    done = run_forked("demo", "--device", "cuda", cwd=tmp_path)
    assert done.returncode == 2
    assert "without a usable GPU" in done.stderr
    assert "fix: use --device cpu" in done.stderr
    assert "Traceback" not in done.stderr

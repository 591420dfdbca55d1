"""`polyrhythm lab` as a user runs it."""

import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from polyrhythm.events import read_run
from polyrhythm.lab import control
from polyrhythm.processes import Child
from polyrhythm.types import Worker
from tests.gloo.commands import ForkedCommand, run_forked

POLYRHYTHM = [sys.executable, "-m", "polyrhythm"]
CLUSTER = """
name = "pair"
[[devices]]
name = "left"
[[devices]]
name = "right"
[[links]]
from = "left"
to = "right"
latency = "5ms"
bandwidth = "20Mbit/s"
"""
WAIT = [sys.executable, "wait.py"]
PRINT_ENVIRONMENT = "import os, json; print(json.dumps(dict(os.environ)))"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "pair.toml").write_text(CLUSTER)
    (tmp_path / "print_environment.py").write_text(PRINT_ENVIRONMENT)
    (tmp_path / "wait.py").write_text("import time; print('waiting', flush=True); time.sleep(1000)")
    with tempfile.TemporaryDirectory(prefix="labs") as labs:  # a socket's path must stay short
        monkeypatch.setattr(control, "FOLDER", Path(labs))  # hides the labs of other tests
        yield tmp_path


def lab(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked("lab", *arguments, cwd=folder)


@pytest.mark.long
@pytest.mark.timeout(90)
@pytest.mark.parametrize("options", [[], ["--in-process"]])
def test_every_host_gets_torchruns_variables(folder: Path, options: list[str]) -> None:
    done = lab(
        folder,
        "run",
        *options,
        "pair.toml",
        "--output",
        "out",
        "--",
        sys.executable,
        "print_environment.py",
    )
    assert done.returncode == 0, done.stderr + done.stdout
    environments = [
        json.loads((folder / "out" / f"{h}.log").read_text()) for h in ("left", "right")
    ]
    assert [each["RANK"] for each in environments] == ["0", "1"]
    assert all(each["WORLD_SIZE"] == "2" and each["LOCAL_RANK"] == "0" for each in environments)
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in environments}) == 1
    assert [each["POLYRHYTHM_DEVICE"] for each in environments] == ["left", "right"]


@pytest.mark.timeout(90)
def test_failed_program_is_named_and_gives_status_1(folder: Path) -> None:
    (folder / "fail.py").write_text("import os, sys; sys.exit(int(os.environ['RANK']) * 7)")
    done = lab(folder, "run", "pair.toml", "--", sys.executable, "fail.py")
    assert done.returncode == 1
    assert "right failed: exit status 7" in done.stdout
    assert "left" not in done.stdout


@pytest.mark.alone  # the kill comes after a time
@pytest.mark.timeout(90)
def test_scenario_kills_revives_and_slows_hosts(folder: Path) -> None:
    (folder / "s.toml").write_text(
        'name = "s"\n[[kill]]\ndevice = "right"\nat = "3s"\n'
        '[[join]]\ndevice = "right"\nat = "4s"\n'
        '[[slow]]\ndevice = "left"\nfactor = 3\n'
    )
    (folder / "work.py").write_text(
        "import os, time, polyrhythm as pr\n"
        "compute = pr.EmulatedCompute.from_environment(os.environ)\n"
        "start = time.monotonic()\n"
        "for _ in range(4): compute.emulate(pr.Op.F, 0.1)\n"
        "print('elapsed', time.monotonic() - start, flush=True)\n"
        "time.sleep(4 - (time.monotonic() - start))\n"
        "print('done', flush=True)\n"
    )
    done = lab(folder, "run", "pair.toml", "--scenario", "s.toml", "--", sys.executable, "work.py")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("right was killed by the scenario") == 1
    elapsed = [float(t) for t in re.findall(r"elapsed (\S+)", done.stdout)]
    assert len(elapsed) == 3, "left once, right twice"
    assert done.stdout.count("done") == 2, "the first process of right was killed"
    assert max(elapsed) / min(elapsed) > 2, "left is slowed down"


@pytest.mark.long
def test_demo_workers_are_slowed_by_the_scenario(folder: Path) -> None:
    """A factor of 20 is far beyond what a busy machine does to one worker and not to the other.

    Actions are compared one by one, since a pause of the machine is longer than many of them.
    """
    (folder / "s.toml").write_text('name = "s"\n[[slow]]\ndevice = "left"\nfactor = 20\n')
    shape = ["--num-stages", "1", "--num-pipelines", "2", "--width", "64", "--blocks", "1"]
    program = [*POLYRHYTHM, "demo", *shape, "--steps", "4", "--out", "out"]
    # On a busy machine it takes up to a minute, mostly to import torch.
    done = lab(folder, "run", "pair.toml", "--scenario", "s.toml", "--", *program)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "out").iterdir()
    spent: dict[Worker, list[float]] = {Worker(0, 0): [], Worker(0, 1): []}
    for event in read_run(run):
        if event.kind == "action":
            spent[event.worker].append(event.duration - event.values["wait"])
    left, right = spent.values()
    times_as_long = [one / other for one, other in zip(left, right, strict=True)]
    assert statistics.median(times_as_long) > 5


@pytest.mark.timeout(90)
def test_killed_switch_ends_the_lab(folder: Path) -> None:
    with running_lab(folder) as command:
        switch = next(
            child
            for child in psutil.Process(command.child.pid).children()
            if any(f.path == "/dev/net/tun" or "sock" in f.path for f in child.open_files())
            or len(child.net_connections("unix")) > 2
        )
        switch.kill()
        assert command.child.wait(20) == 2
        assert "was ended by SIGKILL" in command.stdout + command.stderr


@pytest.mark.timeout(90)
def test_timeout_ends_all_programs(folder: Path) -> None:
    done = lab(folder, "run", "pair.toml", "--timeout", "1", "--", sys.executable, "wait.py")
    assert done.returncode == 124
    assert "still running: left, right" in done.stdout


@contextmanager
def running_lab(folder: Path) -> Iterator[ForkedCommand]:
    """Run a lab named rehearsal whose two hosts wait."""
    program = ["run", "pair.toml", "--name", "rehearsal", "--", *WAIT]
    with ForkedCommand("lab", *program, cwd=folder) as command:
        deadline = time.monotonic() + 60
        while command.stdout.count("waiting") < 2:
            assert time.monotonic() < deadline, "it does not start"
            assert command.child.status is None, command.stderr
            time.sleep(0.05)
        yield command


@pytest.fixture
def running(folder: Path) -> Iterator[Child]:
    with running_lab(folder) as command:
        yield command.child
        command.child.signal(signal.SIGINT)
        assert command.child.wait(20) == 130


@pytest.mark.timeout(90)
def test_running_lab_is_reachable_from_other_processes(folder: Path, running: Child) -> None:
    status = lab(folder, "status")
    assert status.returncode == 0, status.stderr
    assert re.search(r"left +10\.77\.0\.1 +1", status.stdout)
    inside = lab(
        folder, "shell", "right", "--", sys.executable, "-c", "print(open('/proc/net/dev').read())"
    )
    assert "lab0" in inside.stdout, inside.stderr
    twice = lab(folder, "run", "pair.toml", "--name", "rehearsal", "--", "true")
    assert twice.returncode == 2
    assert "'rehearsal' is running" in twice.stderr


PING = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
s.settimeout(1.5)
try:
    start = time.perf_counter()
    code = s.connect_ex(("10.77.0.2", 9))
    print(time.perf_counter() - start if code == 111 else "lost")
except OSError:
    print("lost")
"""


@pytest.mark.long
@pytest.mark.timeout(90)
def test_running_lab_can_be_changed(folder: Path, running: Child) -> None:
    def ping() -> str:  # a refused connection is one round trip
        return lab(folder, "shell", "left", "--", sys.executable, "-c", PING).stdout.strip()

    quick = float(ping())
    assert lab(folder, "change", "left", "right", "--latency", "200ms").returncode == 0
    assert float(ping()) > 5 * quick
    assert lab(folder, "change", "left", "right", "--up", "False").returncode == 0
    assert ping() == "lost"
    assert lab(folder, "change", "left", "right", "--up", "True").returncode == 0
    assert ping() != "lost"

    def states() -> set[str]:
        family = psutil.Process(running.pid).children()
        return {process.status() for process in family}

    assert "right is paused" in lab(folder, "pause", "right").stdout
    assert "already" in lab(folder, "pause", "right").stdout
    assert "stopped" in states()
    assert re.search(r"right .*paused", lab(folder, "status").stdout)
    assert "right is resumed" in lab(folder, "resume", "right").stdout
    assert "was not paused" in lab(folder, "resume", "right").stdout
    assert "stopped" not in states()
    before = len(psutil.Process(running.pid).children())
    assert lab(folder, "kill", "right").returncode == 0
    deadline = time.monotonic() + 20
    while len(psutil.Process(running.pid).children()) == before:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert ping() == "lost"
    assert re.search(r"right .*killed", lab(folder, "status").stdout)
    assert "reached again" in lab(folder, "revive", "right").stdout
    assert ping() != "lost"


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "pair.toml"], "no program to run"),
        (["run", "missing.toml", "--", "true"], "missing.toml"),
        (["run", "case6", "--", "true"], "unknown network 'case6'"),
        (["run", "pair.toml", "--hosts", "3", "--", "true"], "3"),
        (["run", "pair.toml", "--byte-scale", "0", "--", "true"], "0"),
        (["run", "pair.toml", "--scenario", "bad.toml", "--", "true"], "'middle'"),
        (["run", "odd.toml", "--", "true"], "'middle'"),
        (["run", "pair.toml", "--name", "a b", "--", "true"], "'a b'"),
        (["run", "pair.toml", "--", "no-such-program"], "'no-such-program'"),
        (["run", "pair.toml", "--timeout", "-1", "--", "true"], "--timeout -1"),
        (["run", "pair.toml", "--output", "pair.toml", "--", "true"], "pair.toml"),
        (["status", "--lab", "nowhere"], "no lab named 'nowhere'"),
        (["shell", "left", "--lab", "nowhere"], "no lab named 'nowhere'"),
        (["status"], "0 labs are running"),
    ],
)
def test_bad_input_is_refused_with_a_fix(folder: Path, arguments: list[str], message: str) -> None:
    (folder / "bad.toml").write_text('name = "b"\n[[kill]]\ndevice = "middle"\nat = "1s"\n')
    (folder / "odd.toml").write_text(CLUSTER.replace('to = "right"', 'to = "middle"'))
    done = lab(folder, *arguments)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr

"""`polyrhythm scheduler`: the coordinator as a process of its own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polyrhythm.errors import PeerError
from polyrhythm.run.coordinator.decision_log import replay
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.sync.messages import Commit
from tests.gloo import coordinators
from tests.gloo.coordinators import Trainee, setup_of, train_all, workers_of

POLYRHYTHM = [sys.executable, "-m", "polyrhythm", "scheduler"]


class Running:
    """The command; its output is read as it comes."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [*POLYRHYTHM, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "80"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []

    def until(self, pattern: str) -> str:
        """Read on until a line says that."""
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if found := re.search(pattern, line):
                return found[found.lastindex or 0]
        raise AssertionError(f"no {pattern!r} in {self.lines}")

    def end(self, what: signal.Signals) -> int:
        self._process.send_signal(what)
        rest, _ = self._process.communicate(timeout=20)
        self.lines += rest.splitlines()
        return self._process.returncode

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_workers_are_served_until_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of("age", stages=2, pipelines=2, options={"max_age": 4, "window": "paper"})
    shape = ["--policy", "age", "--stages", "2", "--pipelines", "2"]
    options = ["--options", "max_age=4", "window=paper", "--log", "out"]
    with Running(tmp_path, "--bind", "tcp://127.0.0.1:0", *shape, *options) as running:
        address = running.until(
            r"scheduler at (tcp://[\d.:]+): age every=1 seed=0 max_age=4 window="
        )
        running.until(f"options={setup.options}, coordinator='{address}', keys='job.keys'")
        keys = JobKeys.load(tmp_path / "job.keys")
        monkeypatch.setattr(coordinators, "KEYS", keys)
        *most, last = [Trainee(address, setup, worker) for worker in workers_of(setup)]
        for trainee in (*most, last):
            trainee.join()
        running.until("s0p0 has joined from here")
        running.until("4 of 4 workers have joined")
        for _ in range(3):
            for trainee in (*most, last):
                trainee.ready()
            for trainee in (*most, last):
                trainee.wait()
        train_all(most, 0)
        running.until("has left, 1 are here")
        assert running.end(signal.SIGINT) == 130
        with pytest.raises(PeerError, match="the coordinator has ended"):
            last.step()
        last.client.close()
    assert any(re.match(r"in all: .*committed \d+", line) for line in running.lines)
    assert "error: interrupted" in running.lines
    assert any(trainee.told(Commit) for trainee in (*most, last))
    assert replay(tmp_path / "out" / "scheduler.jsonl") is None


def test_being_terminated_is_an_ending_like_any_other(tmp_path: Path) -> None:
    JobKeys.new().save(tmp_path / "mine")
    with Running(
        tmp_path, "--bind", "tcp://127.0.0.1:0", "--pipelines", "1", "--keys", "mine"
    ) as running:
        running.until("Ctrl-C ends it")
        assert running.end(signal.SIGTERM) == 143
        assert running.lines[-1] == "in all: nothing happened"
        assert not any("new keys" in line for line in running.lines)
        assert not (tmp_path / "job.keys").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--policy", "adaptve"], "did you mean 'adaptive'"),
        (["--options", "nonsense"], "--options 'nonsense'"),
        (["--options", "=1"], "--options '=1'"),
        (["--options", '{"group_size"'], "truncated"),
        (["--options", "group_size=x"], "group_size='x'"),
        (["--options", '{"group_size": 9}'], "group_size=9"),
        (["--bind", "nonsense"], "bind 'nonsense'"),
        (["--pipelines", "0"], "num_pipelines=0"),
        (["--silence", "0"], "silence=0"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
) -> None:
    from polyrhythm.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["scheduler", "--pipelines", "2", "--bind", "tcp://127.0.0.1:0", *arguments])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys, polyrhythm.cli.scheduler;"
        "import polyrhythm.run.coordinator.coordinator, polyrhythm.run.coordinator.client;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

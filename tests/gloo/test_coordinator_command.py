"""`polyrhythm coordinator`: the coordinator as a separate process."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polyrhythm.errors import PeerError
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.sync.log_reader import replay
from polyrhythm.sync.protocol import Commit, Leave
from polyrhythm.types import Worker
from tests.gloo import coordinators
from tests.gloo.coordinators import (
    FakeWorker,
    RawClient,
    coordinator_of,
    eventually,
    hello_of,
    setup_of,
    train_all,
    workers_of,
)
from tests.grids import long_except

POLYRHYTHM = [sys.executable, "-m", "polyrhythm", "coordinator"]


class CommandProcess:
    """A running command; its output is read line by line."""

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

    def read_until(self, pattern: str) -> str:
        """Read lines until one matches; return its last group, or the match."""
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if found := re.search(pattern, line):
                return found[found.lastindex or 0]
        raise AssertionError(f"no {pattern!r} in {self.lines}")

    def signal_and_wait(self, signal_number: signal.Signals) -> int:
        self._process.send_signal(signal_number)
        return self.status()

    def status(self) -> int:
        """Wait until the command has exited; return its status."""
        status = self._process.wait(20)
        # Not `communicate`, which does not return what `read_until` has buffered.
        self.lines += self._process.stdout.read().splitlines()
        return status

    def __enter__(self) -> "CommandProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_command_serves_until_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of("age", stages=2, pipelines=2, options={"max_age": 4, "window": "paper"})
    shape = ["--policy", "age", "--num-stages", "2", "--num-pipelines", "2"]
    options = ["--options", "max_age=4", "window=paper", "--log", "out"]
    with CommandProcess(tmp_path, "--bind", "tcp://127.0.0.1:0", *shape, *options) as running:
        address = running.read_until(r" at (tcp://[\d.:]+): age every=1 seed=0 max_age=4 window=")
        running.read_until(f"options={setup.options}, coordinator='{address}', keys='job.keys'")
        keys = JobKeys.load(tmp_path / "job.keys")
        monkeypatch.setattr(coordinators, "KEYS", keys)
        *others, last = [FakeWorker(address, setup, worker) for worker in workers_of(setup)]
        for fake_worker in (*others, last):
            fake_worker.join()
        running.read_until("s0p0 has joined from here")
        running.read_until("4 of 4 workers have joined")
        for _ in range(3):
            for fake_worker in (*others, last):
                fake_worker.ready()
            for fake_worker in (*others, last):
                fake_worker.wait()
        train_all(others, 0)
        running.read_until("has left, 1 are active")
        assert running.signal_and_wait(signal.SIGINT) == 130
        with pytest.raises(PeerError, match="the coordinator has ended"):
            last.step()
        last.client.close()
    assert re.match(r"in all: [\d,]+ groups? averaged", running.lines[-1])
    assert running.lines[-2] == "stopped"
    assert not any("error" in line for line in running.lines)
    assert any(fake_worker.commands_of(Commit) for fake_worker in (*others, last))
    assert replay(tmp_path / "out" / "scheduler.jsonl") is None


def test_sigterm_ends_command_cleanly(tmp_path: Path) -> None:
    JobKeys.new().save(tmp_path / "mine")
    with CommandProcess(
        tmp_path, "--bind", "tcp://127.0.0.1:0", "--num-pipelines", "1", "--keys", "mine"
    ) as running:
        running.read_until("Ctrl-C")
        assert running.signal_and_wait(signal.SIGTERM) == 143
        summary = running.lines[-1]  # it reports when its machine stalls it
        assert re.fullmatch(r"in all: (nothing happened|\d+ stalls? of this process)", summary)
        assert not any("new keys" in line for line in running.lines)
        assert not (tmp_path / "job.keys").exists()


@pytest.mark.parametrize(
    ("leave", "status", "why"),
    long_except(
        [
            ([True, True], 0, "all workers have left: the job is over"),
            ([False, False], 1, "all workers are lost"),
            ([False, True], 0, "all workers have left, except s0p0 (lost): the job is over"),
            ([True, False], 1, "the last worker is lost (lost in all: s0p1)"),
        ],
        *(0, 3),
    ),
)
def test_command_exits_with_job_and_last_worker_sets_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: list[bool], status: int, why: str
) -> None:
    setup = setup_of("all_reduce", pipelines=2)
    shape = ["--policy", "all_reduce", "--num-pipelines", "2"]
    with CommandProcess(tmp_path, "--bind", "tcp://127.0.0.1:0", *shape) as running:
        address = running.read_until(r" at (tcp://[\d.]+:\d+)")
        running.read_until("Ctrl-C")
        monkeypatch.setattr(coordinators, "KEYS", JobKeys.load(tmp_path / "job.keys"))
        fake_workers = [FakeWorker(address, setup, worker) for worker in workers_of(setup)]
        for fake_worker in fake_workers:
            fake_worker.join()
        for fake_worker, leaves in zip(fake_workers, leave, strict=True):
            fake_worker.client.close(leave=leaves)
            running.read_until(
                f"{fake_worker.worker} has left" if leaves else f"{fake_worker.worker} is dead"
            )
        assert running.status() == status
    assert why in running.lines
    assert running.lines[-1].startswith("in all: ")


def test_coordinator_is_not_over_before_start() -> None:
    setup = setup_of(pipelines=2)
    worker = Worker(0, 0)
    with coordinator_of(setup) as coordinator:
        assert not coordinator.is_over
        with RawClient(coordinator.address) as raw:
            raw.send(hello_of(setup, worker))
            eventually(lambda: coordinator.present)
            raw.send(Leave(worker, 1))
            eventually(lambda: not coordinator.present)
            assert not coordinator.is_over
        fake_workers = [
            FakeWorker(coordinator.address, setup, worker, incarnation=2)
            for worker in workers_of(setup)
        ]
        train_all(fake_workers, 1)
        eventually(lambda: coordinator.is_over)


def test_connection_without_keys_is_logged_once(tmp_path: Path) -> None:
    with CommandProcess(tmp_path, "--bind", "tcp://127.0.0.1:0", "--num-pipelines", "1") as running:
        address = running.read_until(r" at (tcp://[\d.]+:\d+)")
        running.read_until("Ctrl-C")
        keys, wrong_keys = JobKeys.load(tmp_path / "job.keys"), JobKeys.new()
        wrong_client_keys = dataclasses.replace(
            wrong_keys, server_public=keys.server_public, server_secret=keys.server_secret
        )
        with RawClient(address, wrong_client_keys) as raw:
            raw.send(b"hello")
            running.read_until("refused: a connection without this job's keys")
            with RawClient(address, wrong_keys) as another:
                another.send(b"hello")
                with RawClient(address, keys) as valid:
                    valid.send(b"no message")
                    valid.send(hello_of(setup_of("adaptive", pipelines=1), Worker(0, 0)))
                    running.read_until("1 of 1 workers have joined")
        running.read_until("s0p0 is dead")
        assert running.status() == 1
    assert sum("without this job's keys" in line for line in running.lines) == 1
    assert re.search(r"messages refused \(unauthenticated \d+, malformed 1\)", running.lines[-1]), (
        running.lines
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--policy", "adaptve"], "did you mean 'adaptive'"),
        (["--options", "nonsense"], "--options 'nonsense'"),
        (["--options", "=1"], "--options '=1'"),
        (["--options", '{"group_size"'], "truncated"),
        (["--options", "group_size=x"], "group_size='x'"),
        (["--options", "group_size=x"], "in --options"),
        (["--options", '{"group_size": 9}'], "group_size=9"),
        (["--bind", "nonsense"], "bind 'nonsense'"),
        (["--num-pipelines", "0"], "num_pipelines=0"),
        (["--heartbeat-timeout", "0"], "heartbeat_timeout=0"),
    ],
)
def test_invalid_arguments_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
) -> None:
    from polyrhythm.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["coordinator", "--num-pipelines", "2", "--bind", "tcp://127.0.0.1:0", *arguments])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err
    assert not Path("job.keys").exists()


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys, polyrhythm.cli.coordinator;"
        "import polyrhythm.run.coordinator.server, polyrhythm.run.coordinator.client;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

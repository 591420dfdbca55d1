"""`polyrhythm leave` finds the workers of this machine, and asks the right one."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from polyrhythm import worker_registry
from polyrhythm.cli import leave as leave_command
from polyrhythm.cli import main
from polyrhythm.processes import Child, end_all
from polyrhythm.worker_registry import RunningWorker, running_workers

Start = Callable[..., Child]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a registry of its own: other tests train at the same time."""
    monkeypatch.setattr(worker_registry, "FOLDER", tmp_path / "workers")
    return tmp_path / "workers"


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that is registered as a worker, until SIGTERM."""
    children: list[Child] = []

    def started(rank: int, *, ignores: bool = False) -> Child:
        def work() -> None:
            os.environ["RANK"] = str(rank)
            with RunningWorker.here(f"s0p{rank}").registered():
                if ignores:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(60)

        children.append(Child(work))
        deadline = time.monotonic() + 20
        while children[-1].pid not in [worker.pid for worker in running_workers()]:
            assert time.monotonic() < deadline, "it is not registered"
            time.sleep(0.01)
        return children[-1]

    yield started
    end_all(children)


def leave(*arguments: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        main(["leave", *arguments])
    assert isinstance(leaving.value.code, int)
    return leaving.value.code


@pytest.mark.timeout(60)
def test_only_the_chosen_worker_gets_sigterm(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    children = [start(rank) for rank in range(3)]
    assert leave("--rank", "1") == 0
    assert children[1].wait(10) == -signal.SIGTERM
    assert leave("--pid", str(children[0].pid)) == 0
    assert children[0].wait(10) == -signal.SIGTERM
    assert children[2].status is None
    shown = capfd.readouterr().out
    assert f"s0p1 (rank 1, process {children[1].pid}," in shown
    assert "s0p2" not in shown
    assert leave() == 0, "only one is left"
    assert children[2].wait(10) == -signal.SIGTERM


@pytest.mark.timeout(60)
def test_several_workers_are_listed_unless_all_are_meant(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    children = [start(rank) for rank in (0, 0, 1)]
    assert leave("--rank", "0") == 2
    shown = capfd.readouterr().err
    assert "2 workers run here" in shown
    assert [str(child.pid) in shown for child in children] == [True, True, False]
    assert leave("--all") == 0
    assert [child.wait(10) for child in children] == [-signal.SIGTERM] * 3


@pytest.mark.timeout(60)
def test_a_worker_that_does_not_go_is_named_after_the_timeout(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start(0, ignores=True)
    assert leave("--timeout", "0.3") == 1
    assert f"s0p0 (rank 0, process {child.pid}," in capfd.readouterr().err
    assert child.status is None


@pytest.mark.timeout(60)
def test_a_file_of_another_process_is_stale(
    folder: Path, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process number that is used again must get no signal."""
    child = start(3)
    path = folder / f"{child.pid}.json"
    worker = msgspec.json.decode(path.read_bytes(), type=RunningWorker)
    older = msgspec.structs.replace(worker, started_at=worker.started_at - 100)
    path.write_bytes(msgspec.json.encode(older))
    assert leave() == 2
    assert "no worker of this user runs here\n" in capfd.readouterr().err
    assert child.status is None
    assert list(folder.iterdir()) == []


@pytest.mark.timeout(60)
def test_files_of_killed_workers_are_removed_when_another_one_starts(
    folder: Path, start: Start
) -> None:
    child = start(0)
    child.end()
    kept = {f"{os.getpid()}.json", "notes"}
    (folder / f"{os.getpid()}.json").write_text("{}")  # of another version, and running
    for name in ("notes", f"{child.pid}.new"):
        (folder / name).touch()
    assert (folder / f"{child.pid}.json").exists()
    other = start(1)
    assert {path.name for path in folder.iterdir()} == {f"{other.pid}.json", *kept}
    assert [worker.rank for worker in running_workers()] == [1]


@pytest.mark.timeout(60)
def test_a_worker_that_exits_before_the_signal_has_left(
    start: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start(0)
    found = running_workers()
    child.end()
    answers = iter([True, False])
    monkeypatch.setattr(leave_command, "running_workers", lambda: found)
    monkeypatch.setattr(RunningWorker, "is_running", property(lambda _: next(answers)))
    assert leave() == 0
    assert "has left after 0." in capfd.readouterr().out


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no worker of this user runs here\n"),
        (["--rank", "0"], "no worker of this user runs here with --rank 0\n"),
        (["--all", "--pid", "1"], "--all with --pid or --rank"),
        (["--timeout", "0"], "--timeout 0"),
    ],
)
def test_refusals(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave(*arguments) == 2
    assert message in capfd.readouterr().err


@pytest.mark.timeout(60)
def test_a_folder_that_others_can_write_to_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert leave() == 2
    assert "others have access to it" in capfd.readouterr().err
    with RunningWorker.here("s0p0").registered():  # training is not stopped by it
        assert list(folder.iterdir()) == []

"""One worker of `polyrhythm train --local` leaves, or is killed; the others train on."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyrhythm import worker_registry
from polyrhythm.cli import main
from polyrhythm.processes import Child
from polyrhythm.worker_registry import running_workers
from tests.gloo.transport_peers import wait_until

NUM_STEPS, FIRST_SLOW_STEP = 80, 5
SCRIPT = f"""
import json, os, sys, time
from pathlib import Path
from tests.gloo.trainer_jobs import plan_of, trainer

folder, rank = Path(sys.argv[1]), os.environ["RANK"]

def slow(info):
    if info.step >= {FIRST_SLOW_STEP}:
        (folder / "trains").touch()
        time.sleep(0.02)

with trainer(plan_of(1, 3), sync="decoupled") as made:
    fitted = made.fit(max_steps={NUM_STEPS}, callbacks=[slow])
(folder / f"found{{rank}}.json").write_text(json.dumps([info.step for info in fitted.steps]))
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    """A job of three workers that train, each step slowly."""
    monkeypatch.setattr(worker_registry, "FOLDER", tmp_path / "workers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2]), *sys.path])
    Path("script.py").write_text(SCRIPT)
    arguments = ["train", "script.py", "--local", "3", "--", str(tmp_path)]
    child = Child(lambda: main(arguments), output=tmp_path / "shown.txt")
    try:
        wait_until(lambda: child.status is not None or Path("trains").exists(), "it does not train")
        assert len(running_workers()) == 3, Path("shown.txt").read_text()
        yield child
    finally:
        child.end()


def check_end(job: Child, line: str) -> None:
    """Check that rank 1 is lost, as `line` says, and that the others have made all steps."""
    assert job.wait(60) == 0, Path("shown.txt").read_text()
    assert line in Path("shown.txt").read_text()
    found = {path.name: json.loads(path.read_text()) for path in Path().glob("found*.json")}
    assert found == {f"found{rank}.json": list(range(NUM_STEPS)) for rank in (0, 2)}
    assert running_workers() == []


@pytest.mark.timeout(90)
def test_one_worker_leaves_and_the_others_train_on(
    job: Child, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["leave", "--rank", "1"])
    assert leaving.value.code == 0
    assert "has left" in capfd.readouterr().out
    assert [worker.rank for worker in running_workers()] == [0, 2]
    check_end(job, "worker of rank 1 has left: the others go on")


@pytest.mark.timeout(90)
def test_one_worker_is_killed_and_the_others_train_on(job: Child) -> None:
    (pid,) = (worker.pid for worker in running_workers() if worker.rank == 1)
    os.kill(pid, signal.SIGKILL)
    check_end(job, "worker of rank 1 was ended by SIGKILL: the others go on")
    waits = "goes on after losses: after 1 s a process whose connection closes is lost"
    assert Path("shown.txt").read_text().count(waits) == 1

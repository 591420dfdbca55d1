"""Checkpoints that are damaged or cannot be written, as somebody meets them who trains."""

import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from polyrhythm.errors import WorkerError
from polyrhythm.events import read_run
from polyrhythm.run.checkpoint import save
from polyrhythm.run.checkpoint.folder import list_steps
from polyrhythm.run.checkpoint.manifest import MANIFEST, CheckpointError
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.trainer.step_loop import StepEnd
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.pipelines import run_single_process
from tests.gloo.test_checkpoint_failures import mount_small_disk, record_warnings
from tests.gloo.trainer_jobs import NUM_STEPS, plan_of, run_job, trainer

EVERY, STOPPED = 3, 6  # checkpoints of steps 3 and 6


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The folder of a run that was stopped, and the losses of one that was not."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with trainer(plan_of(1, 1), run=folder, checkpoint_every=EVERY) as made:
        made.fit(steps=STOPPED)
    with trainer(plan_of(1, 1)) as whole:
        return folder, list(whole.fit(steps=NUM_STEPS).losses)


@pytest.fixture
def run(stopped: tuple[Path, list[float]], tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(stopped[0], tmp_path / "run"))


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


def largest(path: Path) -> Path:
    return max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)


def truncated(path: Path) -> None:
    os.truncate(largest(path), 100)


def flipped(path: Path) -> None:
    """One bit in the middle of the weights."""
    content = bytearray(largest(path).read_bytes())
    content[len(content) // 2] ^= 1
    largest(path).write_bytes(content)


def without_a_file(path: Path) -> None:
    largest(path).unlink()


def without_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def half_a_manifest(path: Path) -> None:
    os.truncate(path / MANIFEST, 500)


@pytest.mark.parametrize(
    "damaged", [truncated, flipped, without_a_file, without_manifest, half_a_manifest]
)
def test_restore_falls_back_to_previous_checkpoint_with_a_warning(
    stopped: tuple[Path, list[float]], run: Path, damaged: Callable[[Path], None]
) -> None:
    damaged(checkpoint(run, STOPPED))
    with trainer(plan_of(1, 1), run=run) as made:
        with pytest.warns(UserWarning, match=rf"passed over: .*step-{STOPPED:08}"):
            assert made.restore() == EVERY
        assert made.fit(steps=NUM_STEPS).losses == pytest.approx(stopped[1][EVERY:], abs=1e-6)


def test_partial_checkpoint_of_a_killed_job_is_ignored(run: Path) -> None:
    for step in (EVERY, STOPPED):
        whole = checkpoint(run, step)
        without_manifest(whole)
        whole.rename(whole.with_name(f".{whole.name}.partial"))
    with trainer(plan_of(1, 1), run=run) as made:
        assert made.restore() == 0  # nothing was ever saved: no reason to warn
        assert list((run / "checkpoints").iterdir()) == []


def test_job_killed_during_save_resumes_from_previous_checkpoint(
    stopped: tuple[Path, list[float]], tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def killed(ctx: DistContext) -> None:
        write = save.write_stage

        def dying(folder: Path, *rest: Any) -> Any:
            written = write(folder, *rest)
            if f"{STOPPED:08}" in folder.name:
                os.kill(os.getpid(), signal.SIGKILL)
            return written

        save.write_stage = dying
        with trainer(plan_of(1, 1), run=run, checkpoint_every=EVERY) as made:
            made.fit(steps=EVERY)
            made.fit(steps=STOPPED)

    with (
        LocalJob(killed, 1, output_folder=tmp_path) as job,
        pytest.raises(WorkerError, match="SIGKILL"),
    ):
        job.wait(60)
    half = run / "checkpoints" / f".step-{STOPPED:08}.partial"
    assert list(half.glob("*.distcp"))
    with trainer(plan_of(1, 1), run=run) as made:
        assert made.restore() == EVERY
        assert not half.exists()
        assert made.fit(steps=NUM_STEPS).losses == pytest.approx(stopped[1][EVERY:], abs=1e-6)


def refused(made: Trainer, path: Path | None = None) -> str:
    """How, and that nothing was changed by it."""
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        made.restore(path)
    assert made.step == 0
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    return error.value.wrong


def test_restore_error_is_the_same_on_all_workers(run: Path, tmp_path: Path) -> None:
    flipped(checkpoint(run, STOPPED))

    def work(ctx: DistContext | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with trainer(plan_of(2, 2), run=run) as made, record_warnings() as texts:
            found["named"] = refused(made, checkpoint(run, STOPPED))
            found["nowhere"] = refused(made, run / "nowhere")
            dist.barrier()
            if dist.get_rank() == 0:
                truncated(checkpoint(run, EVERY))
            dist.barrier()
            found["all"] = refused(made)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(run / "checkpoints")
            dist.barrier()
            found["none"] = made.restore()
        return found | {"warned": texts}

    first, *others = run_job(4, work, tmp_path)
    assert "has other contents than were written" in first["named"]
    assert "no manifest.json" in first["nowhere"]
    assert "none of its 2 checkpoints is whole" in first["all"]
    assert first["none"] == 0
    assert [text.split(": ")[0] for text in first["warned"]] == ["checkpoint passed over"] * 2
    for found in others:
        assert found == first | {"warned": []}


def test_only_first_worker_warns_of_skipped_checkpoint(run: Path, tmp_path: Path) -> None:
    flipped(checkpoint(run, STOPPED))

    def work(ctx: DistContext | None) -> tuple[int, list[str]]:
        with trainer(plan_of(1, 2), run=run) as made, record_warnings() as texts:
            began = made.restore()
        return began, texts

    (began, texts), others = run_job(2, work, tmp_path)
    assert began == EVERY
    assert len(texts) == 1
    assert f"step-{STOPPED:08}" in texts[0]
    assert others == (EVERY, [])


def wait_for_save(made: Trainer) -> None:
    assert made._checkpointer is not None
    assert made._checkpointer.checkpoints is not None
    made._checkpointer.checkpoints.wait(60)


def test_full_disk_does_not_stop_training(
    stopped: tuple[Path, list[float]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    disk = run / "checkpoints"  # of their own: logs are another matter
    disk.mkdir(parents=True)

    def work() -> dict[str, Any]:
        if (problem := mount_small_disk(disk, "512k")) is not None:
            return {"problem": problem}

        def fill(end: StepEnd) -> None:
            wait_for_save(made)
            if end.step == EVERY:
                with (disk / "other").open("wb", buffering=0) as other:
                    left = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                    other.write(bytes(left - 4 * 1024))
            elif end.step == STOPPED:  # whose checkpoint has failed by now
                (disk / "other").unlink()

        with (
            record_warnings() as texts,
            trainer(plan_of(1, 1), run=run, checkpoint_every=EVERY, callbacks=[fill]) as made,
        ):
            losses = made.fit(steps=NUM_STEPS).losses
        events = [event for event in read_run(run) if event.kind == "checkpoint"]
        return {
            "warned": texts,
            "losses": losses,
            "steps": list(list_steps(disk)),
            "events": [(event.step, event.name, event.why) for event in events],
        }

    found = run_single_process(work, tmp_path)
    if "problem" in found:
        pytest.skip(f"no disk of our own: {found['problem']}")
    assert found["losses"] == pytest.approx(stopped[1], abs=1e-6)
    why = "stage 0: No space left on device"
    assert found["warned"] == [f"checkpoint of step {STOPPED} failed: {why}; training goes on"]
    assert found["steps"] == [EVERY, 9, NUM_STEPS]
    assert found["events"] == [
        (EVERY, "saved", None),
        (STOPPED, "failed", why),
        (9, "saved", None),
        (NUM_STEPS, "saved", None),
    ]


def test_failed_last_checkpoint_is_warned_of(run: Path) -> None:
    with record_warnings() as texts, trainer(plan_of(1, 1), run=run) as made:
        made.restore()
        write, save.write_stage = save.write_stage, lambda *_: 1 / 0
        try:
            made.save()
        finally:
            save.write_stage = write
    assert "the last checkpoint was not saved: stage 0: ZeroDivisionError" in texts[1]
    assert list(list_steps(run / "checkpoints")) == [EVERY, STOPPED]


def test_fit_does_not_wait_for_a_slow_disk(
    stopped: tuple[Path, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, released, write = threading.Event(), threading.Event(), save.write_stage

    def slow(*args: Any) -> Any:
        began.set()
        assert released.wait(60)
        return write(*args)

    monkeypatch.setattr(save, "write_stage", slow)
    written = []

    def last(end: StepEnd) -> None:
        if (
            end.step == NUM_STEPS - 1
        ):  # all of them, and the first checkpoint is still being written
            assert began.is_set()
            written.extend(list_steps(tmp_path / "run" / "checkpoints"))
            released.set()

    with (
        record_warnings() as texts,
        trainer(
            plan_of(1, 1), run=tmp_path / "run", checkpoint_every=EVERY, callbacks=[last]
        ) as made,
    ):
        losses = made.fit(steps=NUM_STEPS).losses
    assert losses == pytest.approx(stopped[1], abs=1e-6)
    assert written == []
    assert list(list_steps(tmp_path / "run" / "checkpoints")) == [EVERY, NUM_STEPS]
    assert [text.split(": ")[0] for text in texts] == [
        f"checkpoint of step {step} left out" for step in (STOPPED, 9)
    ]


def test_sharded_replicas_continue_while_a_save_is_skipped(tmp_path: Path) -> None:
    """The first pipeline alone knows that it is; the others give it their parts all the same."""

    def work(ctx: DistContext | None) -> Any:
        write = save.write_stage

        def slow(*args: Any) -> Any:
            time.sleep(0.3)
            return write(*args)

        save.write_stage = slow
        warnings.simplefilter("ignore", UserWarning)
        given = {"run": tmp_path / "run", "checkpoint_every": 1, "sync": "decoupled"}
        with trainer(plan_of(1, 2), timeout=10.0, **given) as made:
            return len(made.fit(steps=NUM_STEPS).steps)

    assert run_job(2, work, tmp_path) == [NUM_STEPS] * 2
    assert 0 < len(list(list_steps(tmp_path / "run" / "checkpoints"))) < NUM_STEPS

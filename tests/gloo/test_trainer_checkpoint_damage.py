"""The Trainer with damaged checkpoints, and with checkpoints that cannot be written."""

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
from polyrhythm.run.trainer.config import CheckpointConfig
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sinks.metrics import StepInfo
from tests.gloo.checkpoint_faults import mount_small_disk, record_warnings
from tests.gloo.pipelines import run_single_process
from tests.gloo.trainer_jobs import NUM_STEPS, plan_of, run_job, trainer

CHECKPOINT_EVERY, STOP_STEP = 3, 6  # checkpoints of steps 3 and 6


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Return the folder of a stopped run, and the losses of an uninterrupted one."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with trainer(
        plan_of(1, 1), run_dir=folder, checkpoint=CheckpointConfig(every=CHECKPOINT_EVERY)
    ) as made:
        made.fit(max_steps=STOP_STEP)
    with trainer(plan_of(1, 1)) as whole:
        return folder, list(whole.fit(max_steps=NUM_STEPS).losses)


@pytest.fixture
def run(stopped: tuple[Path, list[float]], tmp_path: Path) -> Path:
    """Return a copy of the stopped run, to damage."""
    return Path(shutil.copytree(stopped[0], tmp_path / "run"))


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


def largest(path: Path) -> Path:
    return max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)


def truncated(path: Path) -> None:
    os.truncate(largest(path), 100)


def flipped(path: Path) -> None:
    """Flip one bit in the middle of the weights."""
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
    "damage", [truncated, flipped, without_a_file, without_manifest, half_a_manifest]
)
def test_restore_falls_back_to_previous_checkpoint_with_a_warning(
    stopped: tuple[Path, list[float]], run: Path, damage: Callable[[Path], None]
) -> None:
    damage(checkpoint(run, STOP_STEP))
    with trainer(plan_of(1, 1), run_dir=run) as made:
        with pytest.warns(UserWarning, match=rf"step-{STOP_STEP:08}"):
            assert made.restore() == CHECKPOINT_EVERY
        assert made.fit(max_steps=NUM_STEPS).losses == pytest.approx(
            stopped[1][CHECKPOINT_EVERY:], abs=1e-6
        )


def test_partial_checkpoint_of_a_killed_job_is_ignored(run: Path) -> None:
    for step in (CHECKPOINT_EVERY, STOP_STEP):
        whole = checkpoint(run, step)
        without_manifest(whole)
        whole.rename(whole.with_name(f".{whole.name}.partial"))
    with trainer(plan_of(1, 1), run_dir=run) as made:
        assert made.restore() == 0  # without a warning: nothing was ever saved
        assert list((run / "checkpoints").iterdir()) == []


def test_job_killed_during_save_resumes_from_previous_checkpoint(
    stopped: tuple[Path, list[float]], tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def train_until_killed(ctx: DistContext) -> None:
        write = save.write_tensors

        def write_and_die(path: Path, *rest: Any) -> Any:
            written = write(path, *rest)
            if f"{STOP_STEP:08}" in path.parent.name:
                os.kill(os.getpid(), signal.SIGKILL)
            return written

        save.write_tensors = write_and_die
        with trainer(
            plan_of(1, 1), run_dir=run, checkpoint=CheckpointConfig(every=CHECKPOINT_EVERY)
        ) as made:
            made.fit(max_steps=CHECKPOINT_EVERY)
            made.fit(max_steps=STOP_STEP)

    with (
        LocalJob(train_until_killed, 1, output_folder=tmp_path) as job,
        pytest.raises(WorkerError, match="SIGKILL"),
    ):
        job.wait(60)
    (half,) = (run / "checkpoints").glob(f".step-{STOP_STEP:08}.*.partial")
    assert list(half.glob("*.safetensors"))
    with trainer(plan_of(1, 1), run_dir=run) as made:
        assert made.restore() == CHECKPOINT_EVERY
        assert not half.exists()
        assert made.fit(max_steps=NUM_STEPS).losses == pytest.approx(
            stopped[1][CHECKPOINT_EVERY:], abs=1e-6
        )


def restore_error(made: Trainer, path: Path | None = None) -> str:
    """Return the error of a restore, and check that it changes nothing."""
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        made.restore(path)
    assert made.global_step == 0
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    return error.value.wrong


def test_restore_error_is_the_same_on_all_workers(run: Path, tmp_path: Path) -> None:
    flipped(checkpoint(run, STOP_STEP))

    def work(ctx: DistContext | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with trainer(plan_of(2, 2), run_dir=run) as made, record_warnings() as texts:
            found["named"] = restore_error(made, checkpoint(run, STOP_STEP))
            found["nowhere"] = restore_error(made, run / "nowhere")
            dist.barrier()
            if dist.get_rank() == 0:
                truncated(checkpoint(run, CHECKPOINT_EVERY))
            dist.barrier()
            found["all"] = restore_error(made)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(run / "checkpoints")
            dist.barrier()
            found["none"] = made.restore()
        return found | {"warned": texts}

    first, *others = run_job(4, work, tmp_path)
    assert "has other contents" in first["named"]
    assert "no manifest.json" in first["nowhere"]
    assert "none of its 2 checkpoints" in first["all"]
    assert first["none"] == 0
    assert ["step-" in text for text in first["warned"]] == [True] * 2
    for found in others:
        assert found == first | {"warned": []}


def test_only_first_worker_warns_of_skipped_checkpoint(run: Path, tmp_path: Path) -> None:
    flipped(checkpoint(run, STOP_STEP))

    def work(ctx: DistContext | None) -> tuple[int, list[str]]:
        with trainer(plan_of(1, 2), run_dir=run) as made, record_warnings() as texts:
            step = made.restore()
        return step, texts

    (step, texts), others = run_job(2, work, tmp_path)
    assert step == CHECKPOINT_EVERY
    assert len(texts) == 1
    assert f"step-{STOP_STEP:08}" in texts[0]
    assert others == (CHECKPOINT_EVERY, [])


def wait_for_save(made: Trainer) -> None:
    assert made._checkpointer is not None
    assert made._checkpointer.checkpoints is not None
    made._checkpointer.checkpoints.wait(60)


def test_full_disk_does_not_stop_training(
    stopped: tuple[Path, list[float]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    disk = run / "checkpoints"  # logs are on another disk
    disk.mkdir(parents=True)

    def work() -> dict[str, Any]:
        if (problem := mount_small_disk(disk, "512k")) is not None:
            return {"problem": problem}

        def fill(end: StepInfo) -> None:
            wait_for_save(made)
            if end.step == CHECKPOINT_EVERY:
                with (disk / "other").open("wb", buffering=0) as other:
                    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                    other.write(bytes(free - 4 * 1024))
            elif end.step == STOP_STEP:  # its checkpoint has failed by now
                (disk / "other").unlink()

        with (
            record_warnings() as texts,
            trainer(
                plan_of(1, 1),
                run_dir=run,
                checkpoint=CheckpointConfig(every=CHECKPOINT_EVERY),
            ) as made,
        ):
            losses = made.fit(max_steps=NUM_STEPS, callbacks=[fill]).losses
        events = [event for event in read_run(run) if event.kind == "checkpoint"]
        return {
            "warned": texts,
            "losses": losses,
            "steps": list(list_steps(disk)),
            "events": [(event.step, event.name, event.why) for event in events],
        }

    found = run_single_process(work, tmp_path)
    if "problem" in found:
        pytest.skip(f"no small disk: {found['problem']}")
    assert found["losses"] == pytest.approx(stopped[1], abs=1e-6)
    why = "stage 0: No space left on device"
    [warning] = found["warned"]
    assert f"step {STOP_STEP} failed: {why}" in warning
    assert found["steps"] == [CHECKPOINT_EVERY, 9, NUM_STEPS]
    assert found["events"] == [
        (CHECKPOINT_EVERY, "saved", None),
        (STOP_STEP, "failed", why),
        (9, "saved", None),
        (NUM_STEPS, "saved", None),
    ]


def test_failed_last_checkpoint_is_warned_of(run: Path) -> None:
    with record_warnings() as texts, trainer(plan_of(1, 1), run_dir=run) as made:
        made.restore()
        write, save.write_tensors = save.write_tensors, lambda *_: 1 / 0
        try:
            made.save()
        finally:
            save.write_tensors = write
    assert "the last checkpoint was not saved: stage 0: ZeroDivisionError" in texts[1]
    assert list(list_steps(run / "checkpoints")) == [CHECKPOINT_EVERY, STOP_STEP]


def test_fit_does_not_wait_for_a_slow_disk(
    stopped: tuple[Path, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, released, write = threading.Event(), threading.Event(), save.write_tensors

    def slow(*args: Any) -> Any:
        started.set()
        assert released.wait(60)
        return write(*args)

    monkeypatch.setattr(save, "write_tensors", slow)
    written = []

    def last(end: StepInfo) -> None:
        if end.step == NUM_STEPS - 1:  # the first checkpoint is still being written
            assert started.wait(20)
            written.extend(list_steps(tmp_path / "run" / "checkpoints"))
            released.set()

    with (
        record_warnings() as texts,
        trainer(
            plan_of(1, 1),
            run_dir=tmp_path / "run",
            checkpoint=CheckpointConfig(every=CHECKPOINT_EVERY),
        ) as made,
    ):
        losses = made.fit(max_steps=NUM_STEPS, callbacks=[last]).losses
    assert losses == pytest.approx(stopped[1], abs=1e-6)
    assert written == []
    assert list(list_steps(tmp_path / "run" / "checkpoints")) == [CHECKPOINT_EVERY, NUM_STEPS]
    assert [text.split(": ")[0] for text in texts] == [
        f"checkpoint of step {step} skipped" for step in (STOP_STEP, 9)
    ]


def test_sharded_replicas_continue_while_a_save_is_skipped(tmp_path: Path) -> None:
    """Only the first pipeline knows of the skip; the others still send their shards."""

    def work(ctx: DistContext | None) -> Any:
        write = save.write_tensors

        def slow(*args: Any) -> Any:
            time.sleep(0.3)
            return write(*args)

        save.write_tensors = slow
        warnings.simplefilter("ignore", UserWarning)
        options = {
            "run_dir": tmp_path / "run",
            "checkpoint": CheckpointConfig(every=1),
            "sync": "decoupled",
        }
        with trainer(plan_of(1, 2), timeout=10.0, **options) as made:
            return len(made.fit(max_steps=NUM_STEPS).steps)

    assert run_job(2, work, tmp_path) == [NUM_STEPS] * 2
    assert 0 < len(list(list_steps(tmp_path / "run" / "checkpoints"))) < NUM_STEPS

"""Failed and slow saves: training continues, and earlier checkpoints stay."""

import os
import re
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from polyrhythm.errors import WorkerError
from polyrhythm.events import LogReader
from polyrhythm.run.checkpoint import save
from polyrhythm.run.checkpoint.checkpointer import Checkpointer, SaveOutcome
from polyrhythm.run.checkpoint.folder import latest, list_steps
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.sinks.jsonl import EventLog
from tests.gloo.checkpoint_faults import mount_small_disk, record_warnings
from tests.gloo.checkpoint_models import sequential_stage, train
from tests.gloo.pipelines import STAGE_TIMEOUT, run_single_process, run_stages
from tests.grids import long_except


def wait_for_save(checkpoints: Checkpointer) -> SaveOutcome:
    outcome = checkpoints.wait(60)
    assert outcome is not None, "not done in time"
    return outcome


def test_full_disk_fails_only_one_save(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    log_path = tmp_path / "log.jsonl"

    def work() -> dict[str, Any]:
        if (problem := mount_small_disk(disk, "512k")) is not None:
            return {"problem": problem}
        module = nn.Linear(128, 128)  # 64 KiB
        found: dict[str, Any] = {}
        with (
            EventLog(log_path) as log,
            Checkpointer(disk, log=log) as it,
            record_warnings() as texts,
        ):
            it.save(1, module)
            assert wait_for_save(it).is_saved
            with (disk / "other").open("wb", buffering=0) as other:
                free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                other.write(bytes(free - 32 * 1024))
            it.save(2, module)
            found["why"] = wait_for_save(it).why
            found["there"] = sorted(entry.name for entry in disk.iterdir())
            found["latest"] = str(latest(disk))
            (disk / "other").unlink()
            it.save(3, module)
            assert wait_for_save(it).is_saved
            assert list(list_steps(disk)) == [1, 3]
        return found | {"warned": texts}

    found = run_single_process(work, tmp_path)
    if "problem" in found:
        pytest.skip(f"no small disk: {found['problem']}")
    assert found["why"] == "stage 0: No space left on device"
    assert found["there"] == ["other", "step-00000001"]
    assert found["latest"] == str(disk / "step-00000001")
    [warning] = found["warned"]
    assert "step 2 failed: stage 0: No space left on device" in warning
    assert [event.name for event in LogReader(log_path).new()] == ["saved", "failed", "saved"]


def test_write_error_on_one_stage_fails_the_save_on_all_stages(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def work(ctx: DistContext) -> dict[str, Any]:
        part = sequential_stage(ctx.rank, ctx.world_size)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with Checkpointer(folder) as it, record_warnings() as texts:
            if ctx.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            it.save(1, part.module)
            failed = wait_for_save(it)
            dist.barrier()
            files = list(folder.iterdir())
            dist.barrier()
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            it.save(2, part.module)
            saved = wait_for_save(it).is_saved
        return {"why": failed.why, "files": len(files), "saved": saved, "warned": len(texts)}

    first, second = run_stages(2, work, tmp_path)
    assert first == {"why": "stage 1: File too large", "files": 0, "saved": True, "warned": 1}
    assert second == first | {"warned": 0}


class SlowDisk:
    """Blocks every write until `released` is set."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.started = threading.Event()
        self._write, save.write_tensors = save.write_tensors, self

    def __call__(self, *args: Any) -> Any:
        self.started.set()
        assert self.released.wait(STAGE_TIMEOUT)
        return self._write(*args)


def test_training_continues_while_a_slow_disk_writes(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def work(ctx: DistContext) -> dict[str, Any]:
        part = sequential_stage(ctx.rank, ctx.world_size)
        optimizer = SGD(part.module.parameters(), lr=0.1)
        disk = SlowDisk()
        with Checkpointer(folder) as it, record_warnings() as texts:
            started = [it.save(1, part.module, optimizer)]
            assert disk.started.wait(STAGE_TIMEOUT)
            train(part.module, optimizer, 0, 50)  # while the write is blocked
            started.append(it.save(2, part.module, optimizer))
            assert it.wait(0) is None
            disk.released.set()
            outcomes = [wait_for_save(it)]
            dist.barrier()
            started.append(it.save(3, part.module, optimizer))
            started.append(it.save(4, part.module, optimizer, blocking=True))
            outcomes.append(wait_for_save(it))
        return {
            "started": started,
            "saved": [outcome.step for outcome in outcomes if outcome.is_saved],
            "warned": texts,
        }

    first, second = run_stages(2, work, tmp_path)
    assert first["started"] == second["started"] == [True, False, True, True]
    assert first["saved"] == second["saved"] == [1, 4]
    assert list(list_steps(folder)) == [1, 3, 4]
    assert len(first["warned"]) == 1
    assert "step 2 skipped: stage 0 was still writing" in first["warned"][0]


@pytest.mark.long
@pytest.mark.parametrize("slow_stage", long_except([0, 1], 1))
def test_a_stage_may_write_for_longer_than_the_timeout(slow_stage: int, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> bool:
        part = sequential_stage(ctx.rank, ctx.world_size)
        if ctx.rank == slow_stage:
            write = save.write_tensors
            save.write_tensors = lambda *args: (time.sleep(5), write(*args))[1]  # type: ignore[assignment]
        with Checkpointer(tmp_path / "checkpoints", timeout=2.0) as it:
            it.save(1, part.module)
            return wait_for_save(it).is_saved

    assert run_stages(2, work, tmp_path) == [True, True]


def test_save_skipped_by_one_stage_is_skipped_by_all(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def work(ctx: DistContext) -> list[Any]:
        part = sequential_stage(ctx.rank, ctx.world_size)
        with Checkpointer(folder) as it, record_warnings():
            released = threading.Event()
            if ctx.rank == 1:  # it gets the decision after stage 0 has started another save
                original = save._follow

                def wait_for_release(*args: Any) -> Any:
                    decided = original(*args)
                    assert released.wait(STAGE_TIMEOUT)
                    return decided

                save._follow = wait_for_release
            it.save(1, part.module)
            if ctx.rank == 0:
                assert wait_for_save(it).is_saved
            dist.barrier()
            started = it.save(2, part.module)
            if ctx.rank == 0:
                wait_for_save(it)
            dist.barrier()
            released.set()
            outcome = wait_for_save(it)
        return [started, outcome.step, outcome.is_saved, outcome.why]

    first, second = run_stages(2, work, tmp_path)
    assert first == [True, 2, False, "stage 1 was still writing an earlier one"]
    assert second == [False, 1, True, ""]
    assert [entry.name for entry in folder.iterdir()] == ["step-00000001"]


def test_save_skipped_by_first_stage_ends_at_once_on_all(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def work(ctx: DistContext) -> list[Any]:
        part = sequential_stage(ctx.rank, ctx.world_size)
        with Checkpointer(folder) as it, record_warnings():
            released = threading.Event()
            if ctx.rank == 0:  # its thread is still running when the others have the decision
                original = save._lead

                def wait_for_release(*args: Any) -> Any:
                    decided = original(*args)
                    assert released.wait(STAGE_TIMEOUT)
                    return decided

                save._lead = wait_for_release
            it.save(1, part.module)
            if ctx.rank == 1:
                assert wait_for_save(it).is_saved
            dist.barrier()
            started = it.save(2, part.module)
            if ctx.rank == 1:
                assert wait_for_save(it).why == "stage 0 was still writing an earlier one"
            released.set()
            assert it.save(3, part.module, blocking=True)
            return [started, wait_for_save(it).is_saved]

    assert run_stages(2, work, tmp_path) == [[False, True], [True, True]]
    assert list(list_steps(folder)) == [1, 3]


def test_previous_checkpoint_is_used_after_kill_during_save(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def train_until_killed(ctx: DistContext) -> None:
        part = sequential_stage(ctx.rank, ctx.world_size)
        with Checkpointer(folder) as it:
            it.save(1, part.module, extra={"position": 8})
            assert wait_for_save(it).is_saved
            dist.barrier()
            if ctx.rank == 1:
                write = save.write_tensors
                save.write_tensors = lambda *args: (write(*args), os.kill(os.getpid(), 9))  # type: ignore[assignment, return-value]
            it.save(2, part.module)
            it.wait()

    with pytest.raises(WorkerError, match="rank 1") as caught:
        run_stages(2, train_until_killed, tmp_path)
    assert caught.value.status == -signal.SIGKILL
    assert list(folder.glob(".step-00000002.*.partial/stage-1.safetensors"))

    def next_run(ctx: DistContext) -> list[Any]:
        part = sequential_stage(ctx.rank, ctx.world_size)
        with Checkpointer(folder) as it:
            path = it.latest()
            assert path is not None
            found = it.restore(path, part.module)
        return [found.step, found.extra["position"]]

    assert run_stages(3, next_run, tmp_path) == [[1, 8]] * 3
    assert [entry.name for entry in folder.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("lost", "message"),
    [(0, "lost (stage 0|the process that serves the job's store)"), (1, "lost stage 1")],
)
def test_peer_death_during_save_does_not_hang_the_other_stage(
    tmp_path: Path, lost: int, message: str
) -> None:
    folder = tmp_path / "checkpoints"

    def work(ctx: DistContext) -> None:
        part = sequential_stage(ctx.rank, ctx.world_size)
        with ctx.process_group(STAGE_TIMEOUT), record_warnings():
            it = Checkpointer(folder, timeout=STAGE_TIMEOUT)
            write = save.write_tensors

            def die_in_write(*args: Any) -> Any:
                if ctx.rank == lost:
                    while not (tmp_path / "in-the-save").exists():
                        time.sleep(0.01)
                    os._exit(0)
                (tmp_path / "in-the-save").touch()
                it._context.store.timeout = 1.0
                return write(*args)

            save.write_tensors = die_in_write
            it.save(1, part.module)
            outcome = wait_for_save(it)
            torch.save([outcome.is_saved, outcome.why], tmp_path / "found.pt")
        os._exit(7)  # not reached: leaving the process group fails

    with LocalJob(work, 2, output_folder=tmp_path) as job, pytest.raises(WorkerError):
        job.wait(80)
    is_saved, why = torch.load(tmp_path / "found.pt")
    assert not is_saved
    assert re.match(message, why)
    assert latest(folder) is None
    if lost == 1:
        assert list(folder.iterdir()) == []

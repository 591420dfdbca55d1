"""Saves that go wrong, or take long: training goes on, and what was saved before stays."""

import ctypes
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from polyrhythm.errors import WorkerError
from polyrhythm.events import EventLog, LogReader
from polyrhythm.run.checkpoint import saving
from polyrhythm.run.checkpoint.checkpoints import Checkpoints, Outcome
from polyrhythm.run.checkpoint.folder import latest, steps
from polyrhythm.run.launch import LocalJob, Place
from tests.gloo.checkpointing import part_of_chain, train
from tests.gloo.pipelines import DEADLINE, run_alone, run_stages


@contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of warnings, also of those from other threads."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        texts += [str(each.message) for each in caught]


def ended(checkpoints: Checkpoints) -> Outcome:
    outcome = checkpoints.wait(60)
    assert outcome is not None, "not done in time"
    return outcome


def mount_small_disk(folder: Path, size: str) -> str | None:
    """For this process alone; what is in the way of it, if something is."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, new_mounts, new_user = os.getuid(), 0x20000, 0x10000000
    if libc.unshare(new_mounts | (new_user if user else 0)):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    if user:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    private = 0x4000 | 0x40000  # for all that is mounted below as well
    if libc.mount(b"none", b"/", None, private, None) or libc.mount(
        b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()
    ):
        return f"mount: {os.strerror(ctypes.get_errno())}"
    return None


def test_a_full_disk_costs_one_checkpoint_and_no_more(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    log_path = tmp_path / "log.jsonl"

    def work() -> dict[str, Any]:
        if (problem := mount_small_disk(disk, "512k")) is not None:
            return {"problem": problem}
        module = nn.Linear(128, 128)  # 64 KiB
        found: dict[str, Any] = {}
        with EventLog(log_path) as log, Checkpoints(disk, log=log) as it, warned() as texts:
            it.save(1, module)
            assert ended(it).is_saved
            with (disk / "other").open("wb", buffering=0) as other:
                left = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                other.write(bytes(left - 32 * 1024))
            it.save(2, module)
            found["why"] = ended(it).why
            found["there"] = sorted(entry.name for entry in disk.iterdir())
            found["latest"] = str(latest(disk))
            (disk / "other").unlink()
            it.save(3, module)
            assert ended(it).is_saved
            assert list(steps(disk)) == [1, 3]
        return found | {"warned": texts}

    found = run_alone(work, tmp_path)
    if "problem" in found:
        pytest.skip(f"no disk of our own: {found['problem']}")
    assert found["why"] == "stage 0: No space left on device"
    assert found["there"] == ["other", "step-00000001"]
    assert found["latest"] == str(disk / "step-00000001")
    assert found["warned"] == [
        "checkpoint of step 2 failed: stage 0: No space left on device; training goes on"
    ]
    assert [event.name for event in LogReader(log_path).new()] == ["saved", "failed", "saved"]


def test_a_stage_that_cannot_write_fails_the_save_of_all(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def work(place: Place) -> dict[str, Any]:
        part = part_of_chain(place.rank, place.world_size)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with Checkpoints(folder) as it, warned() as texts:
            if place.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
            it.save(1, part.module)
            failed = ended(it)
            dist.barrier()
            left = list(folder.iterdir())
            dist.barrier()
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            it.save(2, part.module)
            saved = ended(it).is_saved
        return {"why": failed.why, "left": len(left), "saved": saved, "warned": len(texts)}

    first, second = run_stages(2, work, tmp_path)
    assert first == {"why": "stage 1: File too large", "left": 0, "saved": True, "warned": 1}
    assert second == first | {"warned": 0}


class SlowDisk:
    """Holds up whatever is written, until it is told not to."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.began = threading.Event()
        self._write, saving.write_part = saving.write_part, self

    def __call__(self, *args: Any) -> Any:
        self.began.set()
        assert self.released.wait(DEADLINE)
        return self._write(*args)


def test_training_goes_on_while_a_slow_disk_writes(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def work(place: Place) -> dict[str, Any]:
        part = part_of_chain(place.rank, place.world_size)
        optimizer = SGD(part.module.parameters(), lr=0.1)
        disk = SlowDisk()
        with Checkpoints(folder) as it, warned() as texts:
            started = [it.save(1, part.module, optimizer)]
            assert disk.began.wait(DEADLINE)
            train(part.module, optimizer, 0, 50)  # all of it while nothing can be written
            started.append(it.save(2, part.module, optimizer))
            assert it.wait(0) is None
            disk.released.set()
            outcomes = [ended(it)]
            dist.barrier()
            started.append(it.save(3, part.module, optimizer))
            started.append(it.save(4, part.module, optimizer, patient=True))
            outcomes.append(ended(it))
        return {
            "started": started,
            "saved": [outcome.step for outcome in outcomes if outcome.is_saved],
            "warned": texts,
        }

    first, second = run_stages(2, work, tmp_path)
    assert first["started"] == second["started"] == [True, False, True, True]
    assert first["saved"] == second["saved"] == [1, 4]
    assert list(steps(folder)) == [1, 3, 4]
    assert len(first["warned"]) == 1
    assert "step 2 left out: stage 0 was still writing" in first["warned"][0]


def test_a_save_that_one_stage_leaves_out_is_left_out_by_all(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def work(place: Place) -> list[Any]:
        part = part_of_chain(place.rank, place.world_size)
        with Checkpoints(folder) as it, warned():
            released = threading.Event()
            if place.rank == 1:  # it hears of the end of a save when the other has begun another
                told = saving._told

                def lingering(*args: Any) -> Any:
                    assert released.wait(DEADLINE)
                    return told(*args)

                saving._told = lingering
            it.save(1, part.module)
            if place.rank == 0:
                assert ended(it).is_saved
            dist.barrier()
            started = it.save(2, part.module)
            if place.rank == 0:
                ended(it)
            dist.barrier()
            released.set()
            outcome = ended(it)
        return [started, outcome.step, outcome.is_saved, outcome.why]

    first, second = run_stages(2, work, tmp_path)
    assert first == [True, 2, False, "stage 1 was still writing an earlier one"]
    assert second == [False, 1, True, ""]
    assert [entry.name for entry in folder.iterdir()] == ["step-00000001"]


def test_after_a_kill_in_the_middle_of_a_save_the_one_before_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def killed(place: Place) -> None:
        part = part_of_chain(place.rank, place.world_size)
        with Checkpoints(folder) as it:
            it.save(1, part.module, extra={"position": 8})
            assert ended(it).is_saved
            dist.barrier()
            if place.rank == 1:
                write = saving.write_part
                saving.write_part = lambda *args: (write(*args), os.kill(os.getpid(), 9))  # type: ignore[assignment, return-value]
            it.save(2, part.module)
            it.wait()

    with pytest.raises(WorkerError, match="rank 1") as caught:
        run_stages(2, killed, tmp_path)
    assert caught.value.status == -signal.SIGKILL
    assert (folder / ".step-00000002.partial" / "__1_0.distcp").exists()

    def next_run(place: Place) -> list[Any]:
        part = part_of_chain(place.rank, place.world_size)
        with Checkpoints(folder) as it:
            path = it.latest()
            assert path is not None
            found = it.restore(path, part.module)
        return [found.step, found.extra["position"]]

    assert run_stages(3, next_run, tmp_path) == [[1, 8]] * 3
    assert [entry.name for entry in folder.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("lost", "says"), [(0, "lost the process that serves the job's store"), (1, "lost stage 1")]
)
def test_a_peer_that_dies_in_a_save_does_not_hang_the_other(
    tmp_path: Path, lost: int, says: str
) -> None:
    folder = tmp_path / "checkpoints"

    def work(place: Place) -> None:
        part = part_of_chain(place.rank, place.world_size)
        with place.joined(DEADLINE), warned():
            it = Checkpoints(folder, deadline=1.0)
            write = saving.write_part

            def dying(*args: Any) -> Any:
                if place.rank == lost:
                    while not (tmp_path / "in-the-save").exists():
                        time.sleep(0.01)
                    os._exit(0)
                (tmp_path / "in-the-save").touch()
                return write(*args)

            saving.write_part = dying
            it.save(1, part.module)
            outcome = ended(it)
            torch.save([outcome.is_saved, outcome.why], tmp_path / "found.pt")
        os._exit(7)  # not reached: the job cannot be left together

    with LocalJob(work, 2, output_folder=tmp_path) as job, pytest.raises(WorkerError):
        job.wait(80)
    is_saved, why = torch.load(tmp_path / "found.pt")
    assert not is_saved
    assert says in why
    assert latest(folder) is None
    if lost == 1:
        assert list(folder.iterdir()) == []

"""A local job ends: when its work is done, when a worker fails, and when its parent is killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from polyrhythm.errors import LaunchError, PeerError, WorkerError
from polyrhythm.processes import BAD_INPUT, Child
from polyrhythm.run.launch import LocalJob, Place
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Worker

FOREVER = 3600


def all_reduce(place: Place) -> None:
    with place.joined(20):
        total = torch.tensor([place.rank + 1.0])
        dist.all_reduce(total)
        assert total.item() == place.world_size * (place.world_size + 1) / 2


@pytest.mark.timeout(60)
def test_workers_meet_and_a_good_job_leaves_no_file(tmp_path: Path) -> None:
    with LocalJob(all_reduce, 4, output_folder=tmp_path) as job:
        assert job.wait(40)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
def test_waiting_is_bounded_while_workers_go_on(tmp_path: Path) -> None:
    with LocalJob(lambda place: time.sleep(FOREVER), 2, output_folder=tmp_path) as job:
        assert job.wait(0.1) is False
        began = psutil.Process().children()
    assert began
    assert psutil.Process().children() == []


def fail_on_rank_1(place: Place) -> None:
    if place.rank == 1:
        print("about to fail")
        raise ZeroDivisionError("on purpose")
    all_reduce(place)


@pytest.mark.timeout(60)
def test_the_worker_that_failed_is_named_with_its_reason_and_output(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerError, match="rank 1 failed: ZeroDivisionError: on purpose") as caught,
        LocalJob(fail_on_rank_1, 3, output_folder=tmp_path) as job,
    ):
        job.wait(40)
    output = Path(caught.value.output).read_text()
    assert "about to fail" in output
    assert "Traceback" in output


def refuse(place: Place) -> None:
    raise LaunchError("no GPU", expected="one", fix="use the CPU")


@pytest.mark.timeout(60)
def test_a_worker_that_refuses_bad_input_says_so_in_full(tmp_path: Path) -> None:
    with (
        pytest.raises(
            WorkerError, match="refused: no GPU\n  expected: one\n  fix: use the"
        ) as caught,
        LocalJob(refuse, 1, output_folder=tmp_path) as job,
    ):
        job.wait(40)
    assert caught.value.status == BAD_INPUT


def die_after_joining(place: Place) -> None:
    with place.joined(20):
        dist.barrier()
        if place.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with waiting_for(Worker(2, 0), "adding"):
            dist.all_reduce(torch.ones(1000))


@pytest.mark.timeout(60)
def test_a_killed_worker_is_named_rather_than_the_peers_that_lost_it(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerError, match="rank 2 was ended by SIGKILL"),
        LocalJob(die_after_joining, 3, output_folder=tmp_path) as job,
    ):
        job.wait(40)


def fail_last_and_late(place: Place) -> None:
    """The culprit has the highest rank, and is seen to end after those that lost it."""
    with place.joined(20):
        dist.barrier()
        if place.rank == 2:
            dist.destroy_process_group()
            time.sleep(0.3)
            raise ZeroDivisionError("on purpose")
        with waiting_for(Worker(2, 0), "adding"):
            dist.all_reduce(torch.ones(1000))


@pytest.mark.timeout(60)
def test_the_culprit_is_waited_for_when_its_peers_end_first(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerError, match="rank 2 failed: ZeroDivisionError"),
        LocalJob(fail_last_and_late, 3, output_folder=tmp_path) as job,
    ):
        job.wait(40)


@pytest.mark.timeout(60)
def test_an_interrupted_start_leaves_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, started = LocalJob._start, []

    def interrupted(job: LocalJob, rank: int, listening: socket.socket) -> None:
        if rank == 2:
            raise KeyboardInterrupt
        real(job, rank, listening)
        started.append(rank)

    monkeypatch.setattr(LocalJob, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LocalJob(lambda place: time.sleep(FOREVER), 3, output_folder=tmp_path).__enter__()
    assert started == [0, 1]
    assert psutil.Process().children() == []


@pytest.mark.timeout(60)
def test_a_job_that_is_ended_writes_no_false_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Child.signal

    def signal_slowly(child: Child, what: signal.Signals) -> None:
        real(child, what)
        time.sleep(0.2)  # time enough for the others to notice

    monkeypatch.setattr(Child, "signal", signal_slowly)

    def reduce_for_ever(place: Place) -> None:
        with place.joined(20):
            while True:
                with waiting_for("another", "adding"):
                    dist.all_reduce(torch.ones(10))

    with LocalJob(reduce_for_ever, 4, output_folder=tmp_path) as job:
        assert not job.wait(2)
    assert list(tmp_path.iterdir()) == []


def lose_a_peer(place: Place) -> None:
    with place.joined(1000):
        dist.barrier()
        if place.rank == 1:
            os._exit(0)  # leaves without a word
        try:
            with waiting_for(Worker(1, 0), "receiving F0"):
                dist.recv(torch.ones(1000), 1)
        except PeerError as error:
            assert "lost s1p0 during receiving F0 after" in str(error)
            os._exit(0)
    raise AssertionError("not noticed")


@pytest.mark.timeout(60)
def test_a_peer_that_leaves_becomes_a_peer_error_at_once(tmp_path: Path) -> None:
    with LocalJob(lose_a_peer, 2, output_folder=tmp_path) as job:
        assert job.wait(40)


def wait_for_silence(place: Place) -> None:
    with place.joined(2):
        if place.rank == 1:
            time.sleep(FOREVER)  # alive, and silent beyond the deadline
        try:
            with waiting_for(Worker(1, 0), "receiving F0"):
                dist.recv(torch.ones(1000), 1)
        except PeerError as error:
            assert "imed out" in str(error)
            os._exit(0)
    raise AssertionError("not noticed")


@pytest.mark.timeout(60)
def test_a_silent_peer_becomes_a_peer_error_at_the_deadline(tmp_path: Path) -> None:
    with LocalJob(wait_for_silence, 2, output_folder=tmp_path) as job:
        assert job._workers[0].wait(40) == 0, job._workers[0].reason


PARENT = f"""
import time
from pathlib import Path
from polyrhythm.processes import BAD_INPUT, Child
from polyrhythm.run.launch import LocalJob
with LocalJob(lambda place: time.sleep({FOREVER}), 3, output_folder=Path("out")):
    print("started", flush=True)
    time.sleep({FOREVER})
"""


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="dying with the parent is a Linux facility")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_die_with_their_parent_however_it_ends(
    tmp_path: Path, ending: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        workers = psutil.Process(parent.pid).children()
        assert len(workers) == 3
        parent.send_signal(ending)
        parent.wait(timeout=20)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []


def test_without_torchrun_there_is_no_place() -> None:
    assert Place.from_environment({}) is None


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_torchruns_variables_give_the_place() -> None:
    assert Place.from_environment(TORCHRUN) == Place(rank=5, world_size=8, local_rank=1)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RANK": "five"}, "'five'"),
        ({"RANK": "8"}, "RANK is not below WORLD_SIZE"),
        ({"MASTER_PORT": "x"}, "'x'"),
        ({"MASTER_ADDR": None}, "'MASTER_ADDR' is missing"),
    ],
)
def test_variables_that_make_no_sense_are_refused(
    changed: dict[str, str | None], says: str
) -> None:
    environ = {k: v for k, v in {**TORCHRUN, **changed}.items() if v is not None}
    with pytest.raises(LaunchError, match=says):
        Place.from_environment(environ)

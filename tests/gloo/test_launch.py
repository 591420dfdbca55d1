"""A local job ends: when its work is done, when a worker fails, and when its parent is killed."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from polyrhythm.errors import LaunchError, PeerError, TrainingError, WorkerError, peer_errors
from polyrhythm.processes import BAD_INPUT, Child
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.types import Worker
from tests.gloo.coordinators import eventually
from tests.grids import long_except

FOREVER = 3600


def all_reduce(ctx: DistContext) -> None:
    with ctx.process_group(20):
        total = torch.tensor([ctx.rank + 1.0])
        dist.all_reduce(total)
        assert total.item() == ctx.world_size * (ctx.world_size + 1) / 2


@pytest.mark.timeout(60)
def test_successful_job_leaves_no_output_files(tmp_path: Path) -> None:
    with LocalJob(all_reduce, 4, output_folder=tmp_path) as job:
        assert job.wait(40)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
def test_wait_returns_false_after_timeout(tmp_path: Path) -> None:
    with LocalJob(lambda ctx: time.sleep(FOREVER), 2, output_folder=tmp_path) as job:
        assert job.wait(0.1) is False
        started = psutil.Process().children()
    assert started
    assert psutil.Process().children() == []


def fail_on_rank_1(ctx: DistContext) -> None:
    if ctx.rank == 1:
        print("about to fail")
        raise ZeroDivisionError("on purpose")
    all_reduce(ctx)


@pytest.mark.timeout(60)
def test_worker_error_has_rank_reason_and_output(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerError, match="rank 1 failed: ZeroDivisionError: on purpose") as caught,
        LocalJob(fail_on_rank_1, 3, output_folder=tmp_path) as job,
    ):
        job.wait(40)
    output = Path(caught.value.output).read_text()
    assert "about to fail" in output
    assert "Traceback" in output


def refuse(ctx: DistContext) -> None:
    raise LaunchError("no GPU", expected="one", fix="use the CPU")


@pytest.mark.timeout(60)
def test_worker_error_has_the_full_user_error(tmp_path: Path) -> None:
    with (
        pytest.raises(
            WorkerError, match="refused: no GPU\n  expected: one\n  fix: use the"
        ) as caught,
        LocalJob(refuse, 1, output_folder=tmp_path) as job,
    ):
        job.wait(40)
    assert caught.value.status == BAD_INPUT


def die_after_joining(ctx: DistContext) -> None:
    with ctx.process_group(20):
        dist.barrier()
        if ctx.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with peer_errors(Worker(2, 0), "adding"):
            dist.all_reduce(torch.ones(1000))


@pytest.mark.timeout(60)
def test_worker_error_names_killed_worker_not_its_peers(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerError, match="rank 2 was ended by SIGKILL"),
        LocalJob(die_after_joining, 3, output_folder=tmp_path) as job,
    ):
        job.wait(40)


def fail_last_and_late(ctx: DistContext) -> None:
    """The failing worker has the highest rank and exits after those that lost it."""
    with ctx.process_group(20):
        dist.barrier()
        if ctx.rank == 2:
            dist.destroy_process_group()
            time.sleep(0.3)
            raise ZeroDivisionError("on purpose")
        with peer_errors(Worker(2, 0), "adding"):
            dist.all_reduce(torch.ones(1000))


@pytest.mark.timeout(60)
def test_worker_error_waits_for_the_failed_worker(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerError, match="rank 2 failed: ZeroDivisionError"),
        LocalJob(fail_last_and_late, 3, output_folder=tmp_path) as job,
    ):
        job.wait(40)


def kill_and_wait(job: LocalJob, rank: int) -> None:
    """Kill a worker; the job goes on without it."""
    os.kill(job._workers[rank].pid, signal.SIGKILL)
    assert not job.wait(0.5)
    assert job._workers[rank].status == -signal.SIGKILL


def refuse_when_asked(folder: Path) -> Callable[[DistContext], None]:
    """Return work that goes on until a file exists, and refuses then, the highest rank first."""

    def work(ctx: DistContext) -> None:
        eventually((folder / "refuse").exists)
        time.sleep(0.5 * (ctx.world_size - ctx.rank))
        raise TrainingError(f"nobody is left: {ctx.rank}", expected="a worker", fix="restore()")

    return work


@pytest.mark.timeout(60)
def test_worker_error_is_that_of_a_survivor_of_earlier_losses(tmp_path: Path) -> None:
    """As `polyrhythm train` runs it: a survivor's own error ends the job, not an earlier loss."""
    with LocalJob(
        refuse_when_asked(tmp_path),
        3,
        output_folder=tmp_path / "out",
        shown_ranks=(0,),
        keeps_survivors=True,
    ) as job:
        kill_and_wait(job, 0)
        (tmp_path / "refuse").touch()
        with pytest.raises(WorkerError) as caught:
            job.wait(20)
    assert caught.value.status == BAD_INPUT
    text = "nobody is left: 2\n  expected: a worker\n  fix: restore()"
    shown = (
        f"worker of rank 2 cannot go on: {text}\n  after the last loss: worker of rank 0 was ended"
    )
    assert str(caught.value).startswith(shown)
    assert caught.value.output is not None
    assert text in Path(caught.value.output).read_text()


@pytest.mark.timeout(60)
def test_worker_error_names_the_last_of_several_losses(tmp_path: Path) -> None:
    with LocalJob(
        lambda ctx: time.sleep(FOREVER), 3, output_folder=tmp_path, keeps_survivors=True
    ) as job:
        for rank in (1, 2):
            kill_and_wait(job, rank)
        os.kill(job._workers[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank 0 was ended by SIGKILL"):
            job.wait(20)


@pytest.mark.timeout(60)
def test_loss_of_the_shown_rank_says_where_the_output_of_others_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with LocalJob(
        lambda ctx: time.sleep(FOREVER),
        4,
        output_folder=tmp_path,
        shown_ranks=(0,),
        keeps_survivors=True,
    ) as job:
        for rank in (1, 0, 2):
            kill_and_wait(job, rank)
        assert (tmp_path / "rank3.log").exists()
    logs = tmp_path / "rank*.log"
    assert capfd.readouterr().err.splitlines() == [
        "worker of rank 1 was ended by SIGKILL: the others go on",
        f"worker of rank 0 was ended by SIGKILL: the others go on; their output is in {logs}",
        "worker of rank 2 was ended by SIGKILL: the others go on",
    ]


@pytest.mark.timeout(60)
def test_interrupted_start_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, started = LocalJob._start, []

    def interrupted(job: LocalJob, rank: int) -> Child:
        if rank == 2:
            raise KeyboardInterrupt
        started.append(rank)
        return real(job, rank)

    monkeypatch.setattr(LocalJob, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LocalJob(lambda ctx: time.sleep(FOREVER), 3, output_folder=tmp_path).__enter__()
    assert started == [0, 1]
    assert psutil.Process().children() == []


@pytest.mark.timeout(60)
def test_terminated_job_writes_no_peer_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Child.signal

    def signal_slowly(child: Child, what: signal.Signals) -> None:
        real(child, what)
        time.sleep(0.2)  # the others have time to notice

    monkeypatch.setattr(Child, "signal", signal_slowly)

    def reduce_for_ever(ctx: DistContext) -> None:
        with ctx.process_group(20):
            while True:
                with peer_errors("another", "adding"):
                    dist.all_reduce(torch.ones(10))

    with LocalJob(reduce_for_ever, 4, output_folder=tmp_path) as job:
        assert not job.wait(2)
    assert list(tmp_path.iterdir()) == []


def lose_a_peer(ctx: DistContext) -> None:
    with ctx.process_group(1000):
        dist.barrier()
        if ctx.rank == 1:
            os._exit(0)  # without any cleanup
        try:
            with peer_errors(Worker(1, 0), "receiving F0"):
                dist.recv(torch.ones(1000), 1)
        except PeerError as error:
            assert "lost s1p0 during receiving F0 after" in str(error)
            os._exit(0)
    raise AssertionError("not noticed")


@pytest.mark.timeout(60)
def test_exited_peer_raises_peer_error_at_once(tmp_path: Path) -> None:
    with LocalJob(lose_a_peer, 2, output_folder=tmp_path) as job:
        assert job.wait(40)


def wait_for_a_silent_peer(ctx: DistContext) -> None:
    with ctx.process_group(2):
        if ctx.rank == 1:
            time.sleep(FOREVER)  # alive, without a message until the timeout
        try:
            with peer_errors(Worker(1, 0), "receiving F0"):
                dist.recv(torch.ones(1000), 1)
        except PeerError as error:
            assert "imed out" in str(error)
            os._exit(0)
    raise AssertionError("not noticed")


@pytest.mark.timeout(60)
def test_unresponsive_peer_raises_peer_error_after_timeout(tmp_path: Path) -> None:
    with LocalJob(wait_for_a_silent_peer, 2, output_folder=tmp_path) as job:
        assert job._workers[0].wait(40) == 0, job._workers[0].reason


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="dying with the parent is a Linux facility")
@pytest.mark.parametrize("ending", long_except([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], 0))
def test_workers_die_with_their_parent(tmp_path: Path, ending: signal.Signals) -> None:
    def run_job() -> None:
        with LocalJob(lambda ctx: time.sleep(FOREVER), 3, output_folder=tmp_path / "out"):
            (tmp_path / "started").touch()
            time.sleep(FOREVER)

    parent = Child(run_job, output=tmp_path / "parent.log")
    try:
        eventually((tmp_path / "started").exists)
        workers = psutil.Process(parent.pid).children()
        assert len(workers) == 3 + 1  # the coordinator
        os.kill(parent.pid, ending)
        assert parent.wait(20) is not None
    finally:
        parent.end()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []


def test_from_environment_is_none_without_torchrun() -> None:
    assert DistContext.from_environment({}) is None


SURVIVORS = "POLYRHYTHM_KEEP_SURVIVORS"
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_from_environment_reads_torchrun_variables() -> None:
    assert DistContext.from_environment(TORCHRUN) == DistContext(rank=5, world_size=8, local_rank=1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "five"}, "'five'"),
        ({"RANK": "8"}, "RANK is not below WORLD_SIZE"),
        ({"MASTER_PORT": "x"}, "'x'"),
        ({"MASTER_ADDR": None}, "'MASTER_ADDR' is missing"),
    ],
)
def test_invalid_torchrun_variables_are_refused(
    changed: dict[str, str | None], message: str
) -> None:
    environ = {k: v for k, v in {**TORCHRUN, **changed}.items() if v is not None}
    with pytest.raises(LaunchError, match=message):
        DistContext.from_environment(environ)


@pytest.mark.parametrize(
    ("changed", "keeps"),
    [
        ({}, False),
        ({"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"GROUP_WORLD_SIZE": "4", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ({"GROUP_WORLD_SIZE": "4", "TORCHELASTIC_MAX_RESTARTS": "0"}, True),
        ({"GROUP_WORLD_SIZE": "4", "TORCHELASTIC_MAX_RESTARTS": "0", SURVIVORS: "0"}, False),
        ({SURVIVORS: "1"}, True),
    ],
)
def test_survivors_are_kept_by_several_agents_without_restarts(
    changed: dict[str, str], keeps: bool
) -> None:
    ctx = DistContext.from_environment({**TORCHRUN, **changed})
    assert ctx is not None
    assert ctx.keeps_survivors == keeps


def test_unknown_wish_for_survivors_is_refused() -> None:
    with pytest.raises(LaunchError, match=f"{SURVIVORS}=yes"):
        DistContext.from_environment({**TORCHRUN, SURVIVORS: "yes"})

"""Processes of a job are killed, stopped, fenced and leave: the others go on, and none hangs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyrhythm.errors import PeerError, WorkerError
from polyrhythm.processes import FENCED, PEER_LOST, TERMINATED, Child, FencedError
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.coordinator import epoch_server
from polyrhythm.run.coordinator.epoch_client import CoordinatorAccess, EpochClient
from polyrhythm.run.coordinator.epoch_server import EpochServer, LossTimeouts
from polyrhythm.run.coordinator.job_coordinator import JobCoordinator
from polyrhythm.run.coordinator.keys import ClientKeys, KeyPair, ServerKeys
from polyrhythm.sync.epochs import Begin
from polyrhythm.sync.log_reader import membership_changes
from tests.gloo.coordinators import eventually
from tests.gloo.transport_peers import wait_until

TIMEOUT = 20.0
FOREVER = 3600
QUICK = LossTimeouts(min_heartbeat=1.0, max_heartbeat=1.5)


class Member:
    """A client that records why its epochs have ended."""

    def __init__(self, coordinator: CoordinatorAccess | None, member: int) -> None:
        assert coordinator is not None
        self.ends: list[tuple[float, str]] = []
        self.client = EpochClient(coordinator, member=member, node="here", on_end=self._on_end)

    def _on_end(self, why: str, lost: Collection[int] | None) -> None:
        self.ends.append((time.monotonic(), why))

    def begin(self, why: str = "") -> Begin:
        return self.client.next_epoch(why, TIMEOUT)

    def commit_until_the_end(self, num_voters: int) -> str:
        """Commit steps until the epoch ends, and return why."""
        for number in range(1, 1_000_000):
            try:
                self.client.commit(number, num_voters, TIMEOUT)
            except PeerError as error:
                return error.cause
        raise AssertionError("it never ends")


@contextmanager
def job_of(
    work: Callable[[DistContext], None], num_workers: int, folder: Path, **more: object
) -> Iterator[LocalJob]:
    """Run a job that keeps its survivors, and leaves no process."""
    job = LocalJob(work, num_workers, output_folder=folder, keeps_survivors=True, **more)
    with job:
        yield job
    left = psutil.Process().children(recursive=True)
    assert all(has_ended(process.pid) for process in left)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def events_of(folder: Path, kind: str) -> list[Any]:
    changes = membership_changes(folder / "membership.jsonl")
    return [change for name, change in changes if name == kind]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("victim", [0, 2])
def test_others_begin_the_next_epoch_within_a_second_of_a_kill(
    tmp_path: Path, victim: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever is killed, rank 0 as well: the job's store remains, too."""
    killed_at = tmp_path / "killed"

    def work(ctx: DistContext) -> None:
        ctx = ctx.with_store(TIMEOUT)
        assert ctx.store is not None
        member = Member(ctx.coordinator, ctx.rank)
        assert member.begin() == Begin(1, (0, 1, 2, 3), (), (), None)
        for number in range(1, 21):
            assert not member.client.commit(number, 4, TIMEOUT).is_last
        if ctx.rank == victim:
            killed_at.write_text(repr(time.monotonic()))
            kill_self()
        try:
            member.client.commit(21, 4, TIMEOUT)
        except PeerError as error:
            why = f"process {victim} on here is lost: it was ended by SIGKILL"
            assert error.cause == f"the epoch has ended: {why}"
        assert member.client.ended == why
        begin = member.begin(member.client.ended)
        assert time.monotonic() - float(killed_at.read_text()) < 1.0
        assert (begin.epoch, begin.committed, begin.lost[0].member) == (2, 20, victim)
        assert begin.members == tuple(rank for rank in range(4) if rank != victim)
        assert [why for _, why in member.ends] == [why]
        assert (member.client.ended, member.client.last_commit) == ("", None)
        ctx.store.set(f"left {ctx.rank}", b"")
        ctx.store.wait([f"left {rank}" for rank in begin.members], timedelta(seconds=TIMEOUT))
        assert member.client.commit(1, 3, TIMEOUT).number == 1
        member.client.finish()

    with job_of(work, 4, tmp_path) as job:
        assert job.wait(40)
    line = f"worker of rank {victim} was ended by SIGKILL: the others go on\n"
    assert capfd.readouterr().err == line
    assert [event.member for event in events_of(tmp_path, "Lost")] == [victim]
    assert len(events_of(tmp_path, "Finish")) == 3


@pytest.mark.timeout(60)
def test_stopped_process_is_lost_and_fenced_when_it_continues(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        member = Member(ctx.coordinator, ctx.rank)
        member.begin()
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            member.client.commit(1, 2, TIMEOUT)
            raise AssertionError("it is fenced")
        why = member.commit_until_the_end(2)
        assert "process 1 on here is lost: no heartbeat for " in why
        assert member.begin(why).members == (0,)
        (tmp_path / "lost").touch()
        eventually((tmp_path / "fenced").exists)
        member.client.finish()

    with job_of(work, 2, tmp_path, timeouts=QUICK) as job:
        eventually((tmp_path / "lost").exists)
        os.kill(job._workers[1].pid, signal.SIGCONT)
        assert job._workers[1].wait(10) == FENCED
        assert "lost the job during training" in job._workers[1].reason
        (tmp_path / "fenced").touch()
        assert job.wait(20)


@pytest.mark.timeout(60)
def test_of_a_broken_link_the_end_without_heartbeats_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two equal ends, of which the machine with the lower rank is dead."""
    monkeypatch.setattr(epoch_server, "_SILENT_FOR", 1.0)

    def work(ctx: DistContext) -> None:
        member = Member(ctx.coordinator, ctx.rank)
        member.begin()
        if ctx.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)
        member.client._unreachable = lambda: [0]  # as the kernel reports it
        why = member.commit_until_the_end(2)
        assert "process 0 on here is lost: it has no connection with process 1" in why
        assert member.begin(why).members == (1,)
        (tmp_path / "lost").touch()
        member.client.finish()

    with job_of(work, 2, tmp_path) as job:
        eventually((tmp_path / "lost").exists)
        os.kill(job._workers[0].pid, signal.SIGKILL)
        assert job.wait(20)


@pytest.mark.timeout(60)
def test_departing_member_takes_part_in_one_more_epoch(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        member, number = Member(ctx.coordinator, ctx.rank), 0
        member.begin()
        if ctx.rank == 1:
            member.client.depart("SIGTERM")
        while not (commit := member.client.commit(number := number + 1, 3, TIMEOUT)).is_last:
            time.sleep(0.01)
        assert (commit.why, commit.departing) == ("process 1 on here leaves", (1,))
        begin = member.begin(commit.why)
        assert (begin.members, begin.departing, begin.committed) == ((0, 1, 2), (1,), number)
        assert member.ends == []
        if ctx.rank == 1:
            member.client.finish()
            sys.exit(TERMINATED)
        for number in range(1, 50):
            assert not member.client.commit(number, 2, TIMEOUT).is_last
            time.sleep(0.01)  # longer than until the exit is noticed
        member.client.finish()

    with job_of(work, 3, tmp_path) as job:
        assert job.wait(20)
    assert events_of(tmp_path, "Lost") == []
    assert len(events_of(tmp_path, "Begin")) == 2


@pytest.mark.timeout(60)
def test_killed_coordinator_is_noticed_by_all_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever they wait for; if it is not started again, the job names it as the cause."""
    monkeypatch.setattr(JobCoordinator, "can_restart", False)

    def work(ctx: DistContext) -> None:
        member = Member(ctx.coordinator, ctx.rank)
        member.begin()
        (tmp_path / f"has begun {ctx.rank}").touch()
        if ctx.rank == 0:
            member.client.commit(1, 3, TIMEOUT)
        if ctx.rank == 1:
            member.client.next_epoch("", TIMEOUT)
        eventually(lambda: member.ends)
        member.client.check()

    start = 0.0
    with (
        pytest.raises(WorkerError, match="the job's coordinator was ended by SIGKILL") as caught,
        job_of(work, 3, tmp_path) as job,
    ):
        eventually(lambda: len(list(tmp_path.glob("has begun *"))) == 3)
        assert job._coordinator is not None
        start = time.monotonic()
        os.kill(job._coordinator.process.pid, signal.SIGKILL)
        job.wait(20)
    assert time.monotonic() - start < 4
    assert caught.value.status == -signal.SIGKILL
    for rank in range(3):
        error = (tmp_path / f"rank{rank}.log").read_text().splitlines()[-1]
        assert "PeerError: lost the coordinator at tcp://127.0.0.1:" in error
        assert "its process has exited" in error


@pytest.mark.timeout(60)
def test_clients_neither_hang_at_exit_nor_in_a_fork(tmp_path: Path) -> None:
    script = (
        "import os, sys, msgspec\n"
        "from polyrhythm.run.coordinator.epoch_client import CoordinatorAccess, EpochClient\n"
        "access = msgspec.json.decode(sys.argv[1], type=CoordinatorAccess)\n"
        "client = EpochClient(access, member=0, node='here', on_end=print)\n"
        "print(client.next_epoch('', 10).members)\n"
        "if (child := os.fork()) == 0:\n"
        "    client.close()\n"
        "    sys.exit(3)\n"
        "print(os.waitpid(child, 0)[1] >> 8, client.commit(1, 1, 10).number)\n"
    )
    with server_of(1, log=tmp_path / "log.jsonl") as (server, access):
        start = time.monotonic()
        text = access_text(access)
        command = [sys.executable, "-c", script, text]
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert (run.returncode, run.stdout, run.stderr) == (0, "(0,)\n3 1\n", "")
        eventually(lambda: server.is_over, 2.0)
        assert time.monotonic() - start < 15
    assert '"its connection has closed"' in (tmp_path / "log.jsonl").read_text()


@contextmanager
def server_of(num_members: int, **more: object) -> Iterator[tuple[EpochServer, CoordinatorAccess]]:
    own, client = KeyPair.new(), KeyPair.new()
    keys = ServerKeys(own, frozenset([client.public]))
    with EpochServer(num_members, bind="tcp://127.0.0.1:0", keys=keys, **more) as server:
        yield server, CoordinatorAccess(server.address, ClientKeys(client, own.public))


def access_text(access: CoordinatorAccess) -> str:
    pair = access.keys.pair
    return json.dumps([access.address, [[pair.public, pair.secret], access.keys.server]])


@pytest.mark.timeout(60)
def test_second_process_for_a_member_is_fenced_and_the_first_goes_on() -> None:
    with server_of(1) as (_, access):
        first = Member(access, 0)
        first.begin()
        second = Member(access, 0)
        with pytest.raises(FencedError, match="another process is member 0 already"):
            second.begin()
        assert first.client.commit(1, 1, TIMEOUT).number == 1
        first.client.finish()
        second.client.close()


@pytest.mark.timeout(60)
def test_waits_end_after_their_timeouts() -> None:
    with server_of(2) as (_, access):
        members = [Member(access, number) for number in range(2)]
        with pytest.raises(PeerError, match="not all processes that are left await the next"):
            members[0].client.next_epoch("", 0.1)
        members[1].begin()  # the first one still awaits it
        wait_until(lambda: members[0].client.epoch == 1, "it begins there, too")
        with pytest.raises(PeerError, match="not all of 2 workers have voted"):
            members[0].client.commit(1, 2, 0.1)
        assert members[1].client.commit(1, 2, TIMEOUT).number == 1, "its vote counts"
        for member in members:
            member.client.finish()


@pytest.mark.timeout(60)
def test_killed_coordinator_is_the_cause_also_after_an_earlier_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobCoordinator, "can_restart", False)

    def work(ctx: DistContext) -> None:
        member = Member(ctx.coordinator, ctx.rank)
        member.begin()
        if ctx.rank == 2:
            kill_self()
        eventually(lambda: member.client.ended)
        member.begin(member.client.ended)
        (tmp_path / f"goes on {ctx.rank}").touch()
        eventually(lambda: len(member.ends) == 2)
        member.client.check()

    with (
        pytest.raises(WorkerError, match="the job's coordinator was ended by SIGKILL"),
        job_of(work, 3, tmp_path) as job,
    ):
        eventually(lambda: job.wait(0.0) or len(list(tmp_path.glob("goes on *"))) == 2)
        assert job._coordinator is not None
        os.kill(job._coordinator.process.pid, signal.SIGKILL)
        job.wait(20)


def test_server_sleeps_after_a_report_whatever_it_has_seen_first() -> None:
    with server_of(1) as (server, access):
        member, waits = Member(access, 0), count()
        member.begin()
        wait = server._socket.wait

        def counting(timeout: float) -> None:
            next(waits)
            wait(timeout)

        server._socket.wait = counting  # type: ignore[method-assign]
        server._socket.wake()  # of a report that was read already
        time.sleep(1.0)
        assert next(waits) < 100
        member.client.finish()


@pytest.mark.timeout(60)
def test_reconnected_member_is_still_a_member() -> None:
    """Its TCP connection breaks while it waits for the others' votes."""
    with server_of(2) as (server, access):
        members = [Member(access, number) for number in range(2)]
        first = members[0]
        with pytest.raises(PeerError):
            first.client.next_epoch("", 0.1)
        members[1].begin()
        eventually(lambda: first.client.epoch == 1)
        with pytest.raises(PeerError):
            first.client.commit(1, 2, 0.1)
        with socket.socket(fileno=os.dup(server._connections[0, 0].fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        assert members[1].client.commit(1, 2, TIMEOUT).number == 1
        eventually(lambda: first.client.last_commit is not None)  # it was lost at first
        assert server.counters["reconnected"] == 1
        assert first.ends == members[1].ends == []
        for member in members:
            member.client.finish()


@pytest.mark.timeout(60)
def test_a_full_disk_ends_the_log_and_not_the_job() -> None:
    full = pytest.warns(UserWarning, match="log /dev/full ends here: .*No space left on device")
    with full as warned, server_of(1, log=Path("/dev/full")) as (_, access):
        member = Member(access, 0)
        member.begin()
        for number in (1, 2):
            assert member.client.commit(number, 1, TIMEOUT).number == number
        member.client.finish()
    assert len(warned) == 1


def fail_with(status_by_rank: dict[int, Callable[[], None]]) -> Callable[[DistContext], None]:
    def work(ctx: DistContext) -> None:
        if ctx.rank in status_by_rank:
            time.sleep(0.05 * ctx.rank)
            status_by_rank[ctx.rank]()
        else:
            time.sleep(1.5)

    return work


def raise_error() -> None:
    raise ZeroDivisionError("on purpose")


def lose_peer() -> None:
    time.sleep(0.1)
    raise PeerError("rank 1", action="a step", waited=0.0, cause="closed")


def leave() -> None:
    sys.exit(TERMINATED)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("by_rank", "error", "line"),
    [
        pytest.param({1: kill_self}, "", "rank 1 was ended by SIGKILL: the o", id="killed"),
        pytest.param({1: leave}, "", "rank 1 has left: the others go on", id="left"),
        pytest.param({1: raise_error}, "rank 1 failed: ZeroDivisionError", "", id="error"),
        pytest.param(
            {0: kill_self, 2: raise_error}, "rank 2 failed: Zero", "rank 0 was", id="loss and error"
        ),
        pytest.param({0: lose_peer, 1: kill_self, 2: lose_peer}, "rank 1 was", "", id="stuck"),
        pytest.param({0: leave, 1: kill_self, 2: kill_self}, "was ended by SIGKILL", "", id="all"),
    ],
)
def test_job_keeps_survivors_of_losses_but_not_of_errors(
    tmp_path: Path,
    by_rank: dict[int, Callable[[], None]],
    error: str,
    line: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with job_of(fail_with(by_rank), 3, tmp_path) as job:
        if error:
            with pytest.raises(WorkerError, match=error):
                job.wait(20)
        else:
            assert job.wait(20)
    assert line in capfd.readouterr().err


@pytest.mark.timeout(60)
def test_job_that_is_asked_to_stop_accepts_no_loss(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        if ctx.rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        (tmp_path / f"runs {ctx.rank}").touch()
        time.sleep(FOREVER)

    with job_of(work, 2, tmp_path) as job:
        eventually(lambda: len(list(tmp_path.glob("runs *"))) == 2)
        job.request_stop()
        with pytest.raises(WorkerError, match="rank 1 was ended by SIGTERM"):
            job.wait(20)


def has_ended(pid: int) -> bool:
    try:  # nobody may wait for an orphan here
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.timeout(60)
def test_lost_worker_leaves_no_process_behind(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        if ctx.rank == 1:
            started = subprocess.Popen(["sleep", str(FOREVER)])
            (tmp_path / "pid").write_text(str(started.pid))
            kill_self()
        eventually(lambda: has_ended(int((tmp_path / "pid").read_text() or os.getpid())))

    (tmp_path / "pid").touch()
    with job_of(work, 2, tmp_path) as job:
        assert job.wait(20)


@pytest.mark.timeout(60)
def test_coordinator_ends_with_its_launcher(tmp_path: Path) -> None:
    def run_job() -> None:
        with LocalJob(lambda ctx: time.sleep(FOREVER), 2, output_folder=tmp_path / "out") as job:
            assert job._coordinator is not None
            (tmp_path / "pid").write_text(str(job._coordinator.process.pid))
            (tmp_path / "started").touch()
            time.sleep(FOREVER)

    parent = Child(run_job, output=tmp_path / "parent.log")
    try:
        eventually((tmp_path / "started").exists)
        coordinator = psutil.Process(int((tmp_path / "pid").read_text()))
        os.kill(parent.pid, signal.SIGKILL)
        assert psutil.wait_procs([coordinator], timeout=10)[1] == []
    finally:
        parent.end()


def test_single_worker_has_no_coordinator(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        assert ctx.coordinator is None
        with ctx.process_group(TIMEOUT):
            raise PeerError("nobody", action="a test", waited=0.0, cause="none")

    with LocalJob(work, 1, output_folder=tmp_path, keeps_survivors=True) as job:
        assert psutil.Process().children() == [psutil.Process(job._workers[0].pid)]
        with pytest.raises(WorkerError) as caught:
            job.wait(20)
    assert caught.value.status == PEER_LOST

"""Failures: killed and stopped workers, a killed coordinator, broken connections."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.processes import BAD_INPUT, PEER_LOST, Child
from polyrhythm.run.coordinator import client
from polyrhythm.run.coordinator.sessions import Heartbeat, Welcome
from polyrhythm.sync.log_reader import DecisionReader, rebuild, replay
from polyrhythm.sync.protocol import Abort, Assign, Commit, CopyFrom, Dead, Done, Ready, Skip
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Worker
from tests.gloo import coordinators
from tests.gloo.coordinators import (
    TIMEOUT,
    FakeWorker,
    Proxy,
    RawClient,
    coordinator_of,
    eventually,
    hello_of,
    joined_workers,
    setup_of,
    train_all,
    workers_of,
)
from tests.grids import long_except

FIRST, SECOND, THIRD = (Worker(0, pipeline) for pipeline in range(3))


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


def work(address: str, setup: Setup, worker: Worker, *, averages: bool, **more: object) -> None:
    """Train in a child process until an error is raised."""
    fake_worker = FakeWorker(address, setup, worker, **more)
    fake_worker.averages = averages
    fake_worker.join()
    while True:
        fake_worker.step()


def test_killed_worker_is_detected_and_others_continue(
    children: list[Child], tmp_path: Path
) -> None:
    setup, lines = setup_of(pipelines=3), list[str]()
    log = tmp_path / "log"
    with coordinator_of(setup, log, log_info=lines.append) as coordinator:
        child = Child(lambda: work(coordinator.address, setup, THIRD, averages=False))
        children.append(child)
        first, second = (FakeWorker(coordinator.address, setup, w) for w in (FIRST, SECOND))
        first.join(), second.join()
        first.ready(), second.ready()
        eventually(lambda: first.commands_of(Assign) and second.commands_of(Assign))
        child.signal(signal.SIGKILL)
        # The survivors get an Abort, and average in a new group.
        assert isinstance(first.wait(), Commit)
        assert "s0p2" in first.commands_of(Abort)[0].reason
        assert any("s0p2 is dead: its connection has closed" in line for line in lines), lines
        assert first.commands_of(Assign)[-1].members == (FIRST, SECOND)
        assert isinstance(second.wait(), Commit)
        assert coordinator.present == [FIRST, SECOND]
        first.client.close(), second.client.close()
    assert replay(log) is None


def test_stopped_worker_is_dead_after_heartbeat_timeout_and_is_notified_on_resume(
    children: list[Child], tmp_path: Path
) -> None:
    setup = setup_of(pipelines=2)
    output = tmp_path / "child.log"
    with coordinator_of(setup, heartbeat_timeout=1.2) as coordinator:
        address = coordinator.address
        child = Child(
            lambda: work(address, setup, SECOND, averages=False, heartbeat_timeout=1.0),
            output=output,
        )
        children.append(child)
        first = FakeWorker(address, setup, FIRST).join()
        first.ready()
        eventually(lambda: first.commands_of(Assign))
        stopped = time.monotonic()
        child.signal(signal.SIGSTOP)
        assert isinstance(first.wait(), Skip | Commit)
        assert time.monotonic() - stopped > 0.9
        assert coordinator.present == [FIRST]
        child.signal(signal.SIGCONT)
        assert child.wait(TIMEOUT) == PEER_LOST
        assert "s0p1 is dead: no heartbeat for 1." in output.read_text()
        first.client.close()


def flood(address: str, setup: Setup, worker: Worker) -> None:
    """Join, then send messages without a pause until this process is killed."""
    with RawClient(address) as client:
        client.send(hello_of(setup, worker))
        while True:
            client.send(Heartbeat(worker, 1))


@pytest.mark.parametrize("is_closed", long_except([True, False], 0))
def test_dead_worker_is_noticed_while_others_flood_the_coordinator(
    is_closed: bool, children: list[Child]
) -> None:
    setup = setup_of(pipelines=5)
    dead, alive, *flooding = workers_of(setup)
    with coordinator_of(setup, heartbeat_timeout=1.0, startup_timeout=1.0) as coordinator:
        address = coordinator.address
        with RawClient(address) as client:
            client.send(hello_of(setup, dead))
            # One of them alone leaves turns of the coordinator in which no message is queued.
            for worker in flooding:
                children.append(Child(partial(flood, address, setup, worker)))
            other = FakeWorker(address, setup, alive).join()
            if is_closed:
                client.socket.close(linger=0)
            eventually(lambda: dead not in coordinator.present)
        time.sleep(1.5)  # longer than the timeout: those that send heartbeats stay
        assert coordinator.present == [alive, *flooding]
        for child in children:
            child.end()
        other.client.close()


def test_computing_worker_sends_heartbeats() -> None:
    setup = setup_of(pipelines=2)
    with (
        coordinator_of(setup, heartbeat_timeout=1.0) as coordinator,
        joined_workers(coordinator.address, setup),
    ):
        time.sleep(1.2)  # Accepted has set their heartbeat interval
        assert len(coordinator.present) == 2


def test_reused_fd_does_not_mark_wrong_worker_dead(
    children: list[Child],
) -> None:
    """The operating system reuses descriptors: a closed one may now be another connection's."""
    setup = setup_of(pipelines=3)
    with (
        coordinator_of(setup, startup_timeout=0.0) as coordinator,
        RawClient(coordinator.address) as quiet,
    ):
        RawClient(coordinator.address).__exit__()
        quiet.send(hello_of(setup, FIRST))
        quiet.receive(Welcome)
        for incarnation in range(1, 6):
            with RawClient(coordinator.address) as second:
                second.send(hello_of(setup, SECOND, incarnation=incarnation))
                second.receive(Welcome)
        sessions = coordinator._sessions
        mistaken = sessions.connections[sessions.by_worker[FIRST].routing_id].fd
        coordinator._socket.closed_fds.append(mistaken)
        eventually(lambda: SECOND not in coordinator.present)
        time.sleep(0.2)
        assert coordinator.present == [FIRST]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_detect_lost_coordinator(
    children: list[Child], tmp_path: Path, ending: signal.Signals
) -> None:
    setup = setup_of(pipelines=2)
    address_file = tmp_path / "address"

    def serve() -> None:
        coordinator = coordinator_of(setup)
        (tmp_path / "partial").write_text(coordinator.address)
        (tmp_path / "partial").rename(address_file)
        coordinator.serve(threading.Event())

    children.append(Child(serve))
    eventually(address_file.exists)
    with joined_workers(address_file.read_text(), setup, heartbeat_timeout=1.0) as (first, second):
        assert first.ready() is None
        clients = [fake_worker.client for fake_worker in (first, second)]
        eventually(lambda: all(time.monotonic() - c._last_received_at < 0.1 for c in clients))
        lost = time.monotonic()
        children[0].signal(ending)
        for fake_worker in (first, second):
            with pytest.raises(PeerError, match="lost coordinator at tcp://") as error:
                fake_worker.wait()
        assert 0.7 < time.monotonic() - lost < 15, "15 s is the default, which must not hold here"
        assert "during waiting for a group" in str(first.failures[0])
        is_closed = ending == signal.SIGKILL
        assert ("its connection has closed" in str(error.value)) == is_closed
        assert len(first.failures) == len(second.failures) == 1


@pytest.mark.parametrize("policy", ["all_reduce", "pairwise", "adaptive"])
def test_broken_connections_lose_no_step(policy: str, tmp_path: Path) -> None:
    setup = setup_of(policy, stages=2, pipelines=3)
    num_steps, num_disconnects, is_over = 20, 3, threading.Event()

    class StayingWorker(FakeWorker):
        """A worker that does not leave before the last disconnect."""

        def ready(self) -> None:
            assert self.clock < num_steps - 1 or is_over.wait(TIMEOUT)
            super().ready()

    with coordinator_of(setup, tmp_path / "log", heartbeat_timeout=60.0) as coordinator:
        proxy = Proxy(coordinator.address)
        fake_workers = [
            StayingWorker(proxy.address, setup, w, pause=0.01) for w in workers_of(setup)
        ]

        def disconnect() -> None:
            for fake_worker in fake_workers:
                fake_worker.client.join(TIMEOUT)
            for number in range(1, num_disconnects + 1):
                eventually(
                    lambda n=number: max(fake_worker.clock for fake_worker in fake_workers) >= 3 * n
                )
                proxy.disconnect_all()
                num_back = number * len(fake_workers)
                eventually(lambda n=num_back: coordinator.counters["reconnected"] >= n)
                assert coordinator.counters["reconnected"] == num_back

        errors: list[BaseException] = []
        thread = threading.Thread(target=_run_collecting_errors, args=(disconnect, errors, is_over))
        thread.start()
        try:
            train_all(fake_workers, num_steps)
        finally:
            thread.join()
            proxy.close()
        assert not errors
    for fake_worker in fake_workers:
        assert fake_worker.clock == num_steps
        for kind in (Assign, Commit):
            gids = [command.gid for command in fake_worker.commands_of(kind)]
            assert gids == sorted(set(gids)), "a command is missing, repeated or out of order"
    assert replay(tmp_path / "log") is None
    events = [decision.event for _, decision in DecisionReader(tmp_path / "log").decisions()]
    assert not any(isinstance(event, Dead) for event in events)
    assert len({(e.worker, e.clock) for e in events if isinstance(e, Ready)}) == 6 * num_steps


def _run_collecting_errors(
    work: Callable[[], None], errors: list[BaseException], is_over: threading.Event
) -> None:
    try:
        work()
    except BaseException as error:
        errors.append(error)
    finally:
        is_over.set()


def test_lost_commands_are_resent(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(pipelines=2)
    monkeypatch.setattr(client, "RECONNECT_TIMEOUT", 20.0)
    with (
        coordinator_of(setup, heartbeat_timeout=90.0) as coordinator,
        RawClient(coordinator.address) as second,
    ):
        proxy = Proxy(coordinator.address)
        first = FakeWorker(proxy.address, setup, FIRST)
        second.send(hello_of(setup, SECOND))
        first.join()
        first.ready()
        eventually(lambda: coordinator.scheduler.membership.members[FIRST].is_ready)
        proxy.close()  # the worker has six seconds to reconnect, through another proxy
        time.sleep(0.1)
        second.send(Ready(SECOND, 1, 1))
        gid = second.receive(Assign).gid
        second.send(Done(SECOND, gid, False, 1))
        assert "s0p1" in second.receive(Abort).reason
        assert second.receive(Assign).gid == gid + 1
        again = Proxy(coordinator.address, at=proxy.address)
        assert isinstance(_second_assign(first), Assign)
        assert [type(command) for command in first.commands[:3]] == [Assign, Abort, Assign]
        second.send(Done(SECOND, gid + 1, True, 1))
        second.send(Heartbeat(SECOND, 1))
        assert isinstance(first.wait(), Commit)
        first.client.close()
        again.close()


def test_last_worker_message_is_resent_on_reconnect() -> None:
    setup = setup_of(pipelines=1)
    with coordinator_of(setup, heartbeat_timeout=90.0) as coordinator:
        proxy = Proxy(coordinator.address)
        first = FakeWorker(proxy.address, setup, FIRST, heartbeat_timeout=90.0).join()
        proxy.drops_messages = True
        first.ready()
        eventually(lambda: proxy.num_dropped)
        proxy.drops_messages = False
        proxy.disconnect_all()
        assert isinstance(first.wait(), Skip)  # without a reconnect it would be after 30 s
        assert coordinator.counters["duplicate"] == 1  # the Hello
        first.client.close()
        proxy.close()


def test_unanswered_message_is_resent_after_timeout() -> None:
    setup = setup_of(pipelines=1)
    with coordinator_of(setup) as coordinator:
        first = FakeWorker(coordinator.address, setup, FIRST, heartbeat_timeout=1.5).join()
        step, lost = coordinator._step, []

        def lose(event: object) -> None:
            coordinator._step = step
            lost.append(event)

        coordinator._step = lose
        assert isinstance(first.step(), Skip)
        assert isinstance(lost[0], Ready)
        first.client.close()


def _second_assign(fake_worker: FakeWorker) -> object:
    eventually(lambda: len(fake_worker.commands_of(Assign)) == 2)
    return fake_worker.commands_of(Assign)[1]


def test_restarted_worker_copies_model() -> None:
    setup = setup_of(pipelines=2)
    with coordinator_of(setup) as coordinator:
        fake_workers = [
            FakeWorker(coordinator.address, setup, worker) for worker in workers_of(setup)
        ]
        first, second = fake_workers
        first.join(), second.join()
        first.ready(), second.ready()
        first.wait(), second.wait()
        second.client.close(leave=False)
        restarted = FakeWorker(coordinator.address, setup, SECOND, incarnation=2).join()
        assert [command.source for command in restarted.commands_of(CopyFrom)] == [FIRST]
        first.client.close(), restarted.client.close()


def test_dead_worker_cannot_reuse_incarnation(children: list[Child], tmp_path: Path) -> None:
    setup = setup_of(pipelines=2)
    output = tmp_path / "child.log"
    with coordinator_of(setup, startup_timeout=0.0) as coordinator:
        dead = FakeWorker(coordinator.address, setup, SECOND).join()
        dead.client.close(leave=False)
        eventually(lambda: not coordinator.present)
        again = Child(
            lambda: work(coordinator.address, setup, SECOND, averages=True), output=output
        )
        children.append(again)
        assert again.wait(TIMEOUT) == BAD_INPUT
        assert "incarnation 1 is dead: its connection has closed" in output.read_text()
        with pytest.raises(LaunchError):
            FakeWorker(coordinator.address, setup, SECOND).join()


def test_stalled_coordinator_marks_no_worker_dead(tmp_path: Path) -> None:
    """The time in which the coordinator did not run does not count as silence."""
    setup = setup_of(pipelines=2)
    with (
        coordinator_of(setup, heartbeat_timeout=1.0) as coordinator,
        joined_workers(coordinator.address, setup, heartbeat_timeout=10.0),
    ):
        socket = coordinator._socket
        wait, receive = socket.wait, socket.receive

        def stop(timeout: float) -> None:
            socket.wait, socket.receive = wait, receive_nothing
            time.sleep(1.1)

        def receive_nothing(most: int) -> list:
            socket.receive = receive  # libzmq's thread was stalled as well
            return []

        socket.wait = stop
        eventually(lambda: coordinator.counters["stalled"])
        time.sleep(0.3)
        assert len(coordinator.present) == 2


def test_all_connections_may_break_at_once() -> None:
    setup = setup_of(stages=2, pipelines=4)
    with coordinator_of(setup, heartbeat_timeout=60.0) as coordinator:
        proxy = Proxy(coordinator.address)
        fake_workers = [FakeWorker(proxy.address, setup, worker) for worker in workers_of(setup)]
        for fake_worker in fake_workers:
            fake_worker.join()
        assert proxy.disconnect_all() == 8
        train_all(fake_workers, 5)
        eventually(lambda: not coordinator.present)
        assert coordinator.counters["reconnected"] == 8
        proxy.close()


def test_log_of_a_killed_coordinator_leads_to_its_state(
    children: list[Child], tmp_path: Path
) -> None:
    """What the workers know, its successor knows, too: its last commands are in the log."""
    setup, log = setup_of("age", pipelines=3), tmp_path / "scheduler.jsonl"

    def serve() -> None:
        coordinator = coordinator_of(setup, log)
        (tmp_path / "address").write_text(coordinator.address)
        coordinator.serve(threading.Event())

    children.append(Child(serve))
    eventually(lambda: (tmp_path / "address").exists() and (tmp_path / "address").read_text())
    address = (tmp_path / "address").read_text()
    fake_workers = [FakeWorker(address, setup, worker) for worker in workers_of(setup)]
    for fake_worker in fake_workers:
        fake_worker.join()
    for _ in range(30):
        for fake_worker in fake_workers:
            fake_worker.ready()
        for fake_worker in fake_workers:
            fake_worker.wait()
    time.sleep(0.2)  # of which the writer needs a few milliseconds
    children[0].signal(signal.SIGKILL)
    assert children[0].wait(TIMEOUT) is not None
    for fake_worker in fake_workers:
        with pytest.raises(PeerError):
            fake_worker.step()
        fake_worker.client.close()
    rebuilt = rebuild(log, job=coordinators.KEYS.server_keys.pair.public, setup=setup)
    members = rebuilt.machine.membership.members
    assert [members[worker].clock for worker in workers_of(setup)] == [30] * 3
    assert not any(member.is_ready or member.queue for member in members.values())
    assert rebuilt.machine.counters["committed"] > 0
    assert rebuilt.end.num_decisions == len(list(DecisionReader(log).decisions()))

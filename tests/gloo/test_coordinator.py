"""The coordinator with workers on loopback: full cycles, start, close, and the decision log."""

import threading
import time
from pathlib import Path

import pytest

from polyrhythm.errors import LaunchError, PeerError, PolicyError
from polyrhythm.run.coordinator.server import Coordinator
from polyrhythm.run.coordinator.sessions import Accepted, Heartbeat, Welcome
from polyrhythm.sync import scheduler
from polyrhythm.sync.log_reader import DecisionReader, replay
from polyrhythm.sync.members import Limits
from polyrhythm.sync.protocol import Assign, Commit, Done, Join, Leave, Ready, Refuse, Skip
from polyrhythm.types import Worker
from tests.gloo.coordinators import (
    KEYS,
    TIMEOUT,
    FakeWorker,
    RawClient,
    coordinator_of,
    eventually,
    hello_of,
    joined_workers,
    setup_of,
    train_all,
    workers_of,
)

POLICIES = {
    "adaptive": {},
    "age": {"max_age": 3},
    "all_reduce": {},
    "partial_reduce": {"group_size": 2},
    "pairwise": {},
    "random": {"group_size": 2},
    "static": {},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_ends_once_and_log_replays(policy: str, tmp_path: Path) -> None:
    setup = setup_of(policy, stages=2, pipelines=3, options=POLICIES[policy], seed=5)
    log = tmp_path / "scheduler.jsonl"
    with coordinator_of(setup, log) as coordinator:
        fake_workers = [
            FakeWorker(coordinator.address, setup, worker) for worker in workers_of(setup)
        ]
        train_all(fake_workers, 20)
        eventually(lambda: not coordinator.present)
        counters = coordinator.counters
    for fake_worker in fake_workers:
        gids = [command.gid for command in fake_worker.commands_of(Assign)]
        assert gids == sorted(set(gids))
        assert not fake_worker.failures
    assert counters["committed"] > 0
    assert counters["malformed"] == counters["unknown_worker"] == 0
    assert counters["late"] == 0 or policy == "pairwise"  # a passive partner may leave
    assert replay(log) is None
    events = [decision.event for _, decision in DecisionReader(log).decisions()]
    num_ready = sum(isinstance(event, Ready) for event in events)
    assert num_ready == len(fake_workers) * 20
    assert [event.now for event in events] == sorted(event.now for event in events)


def test_single_worker_skips_averaging(tmp_path: Path) -> None:
    setup = setup_of("age", pipelines=1)
    with (
        coordinator_of(setup, tmp_path / "log") as coordinator,
        joined_workers(coordinator.address, setup) as (alone,),
    ):
        assert [type(alone.step()) for _ in range(5)] == [Skip] * 5
    assert replay(tmp_path / "log") is None


def test_one_connection_serves_several_workers() -> None:
    setup = setup_of(pipelines=3)
    with coordinator_of(setup) as coordinator, RawClient(coordinator.address) as raw:
        for worker in workers_of(setup):
            raw.send(hello_of(setup, worker))
        assert raw.receive(Welcome) == Welcome(3)
        for worker in workers_of(setup):
            raw.send(Ready(worker, 1, 1))
        assign = raw.receive(Assign)
        for worker in assign.members:
            raw.send(Done(worker, assign.gid, True, 1))
        assert raw.receive(Commit) == Commit(assign.gid, tuple(workers_of(setup)), (1, 1, 1))
        raw.send(Heartbeat(Worker(0, 1), 1))
        assert raw.receive(object) == Heartbeat(Worker(0, 1), 1)  # no command was sent twice


def test_coordinator_sets_event_time(tmp_path: Path) -> None:
    setup = setup_of(pipelines=1)
    with (
        coordinator_of(setup, tmp_path / "log") as coordinator,
        RawClient(coordinator.address) as raw,
    ):
        before = time.monotonic()
        raw.send(hello_of(setup, Worker(0, 0)))
        raw.receive(Welcome)
        raw.send(Ready(Worker(0, 0), 1, 1, now=1e9))
        raw.receive(Skip)
        after = time.monotonic()
    times = [decision.event.now for _, decision in DecisionReader(tmp_path / "log").decisions()]
    assert before <= times[0] <= times[1] <= after


def test_welcome_waits_for_all_workers() -> None:
    setup = setup_of(pipelines=2)
    with coordinator_of(setup) as coordinator, RawClient(coordinator.address) as first:
        first.send(hello_of(setup, Worker(0, 0)))
        assert isinstance(first.receive(object), Accepted)
        with pytest.raises(AssertionError, match="no Welcome"):
            first.receive(Welcome, timeout=0.3)
        with RawClient(coordinator.address) as second:
            second.send(hello_of(setup, Worker(0, 1)))
            assert first.receive(Welcome) == second.receive(Welcome) == Welcome(2)


def test_startup_timeout_starts_present_workers_and_late_join_starts_at_once() -> None:
    setup = setup_of(pipelines=3)
    with (
        coordinator_of(setup, startup_timeout=0.3) as coordinator,
        RawClient(coordinator.address) as first,
    ):
        start = time.monotonic()
        first.send(hello_of(setup, Worker(0, 0)))
        assert first.receive(Welcome) == Welcome(1)
        assert time.monotonic() - start >= 0.3
        with RawClient(coordinator.address) as late:
            late.send(hello_of(setup, Worker(0, 1)))
            assert late.receive(Welcome) == Welcome(2)


def test_internal_error_stops_server_and_reaches_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = setup_of(pipelines=2)
    coordinator = coordinator_of(setup).start()
    with joined_workers(coordinator.address, setup) as (first, second):
        monkeypatch.setitem(scheduler._HANDLERS, Ready, lambda scheduler, event: 1 / 0)
        with pytest.raises(PeerError, match="the coordinator has failed: ZeroDivisionError"):
            first.step()
        with pytest.raises(PeerError, match="the coordinator has failed"):
            second.wait()
    with pytest.raises(ZeroDivisionError):
        coordinator.close()
    coordinator.close()  # it has raised the error once


def test_close_waits_for_workers_to_leave() -> None:
    setup = setup_of(pipelines=1)
    coordinator = coordinator_of(setup).start()
    fake_worker = FakeWorker(coordinator.address, setup, Worker(0, 0)).join()
    leaves = threading.Timer(0.5, fake_worker.client.close)
    start = time.monotonic()
    leaves.start()
    coordinator.close(timeout=TIMEOUT)
    assert 0.4 < time.monotonic() - start < TIMEOUT
    leaves.join()
    assert not fake_worker.failures


def test_close_notifies_remaining_workers() -> None:
    setup = setup_of(pipelines=1)
    coordinator = coordinator_of(setup).start()
    with joined_workers(coordinator.address, setup) as (left,):
        coordinator.close()
        with pytest.raises(PeerError, match="the coordinator has ended"):
            left.step()


def test_worker_rejoins_with_new_incarnation() -> None:
    setup = setup_of(pipelines=1)
    with coordinator_of(setup) as coordinator:
        FakeWorker(coordinator.address, setup, Worker(0, 0), incarnation=1).train(2)
        eventually(lambda: not coordinator.present)
        with pytest.raises(LaunchError, match="incarnation 1 has left"):
            FakeWorker(coordinator.address, setup, Worker(0, 0), incarnation=1).train(1)
        FakeWorker(coordinator.address, setup, Worker(0, 0), incarnation=2).train(2)


def test_coordinator_can_close_without_serving(tmp_path: Path) -> None:
    coordinator = coordinator_of(setup_of(), tmp_path / "log")
    coordinator.close()
    coordinator.close()
    assert replay(tmp_path / "log") is None


def test_foreground_serve_stops_on_event() -> None:
    coordinator, until = coordinator_of(setup_of()), threading.Event()
    threading.Timer(0.1, until.set).start()
    coordinator.serve(until)
    assert until.is_set()


@pytest.mark.parametrize(
    ("bind", "problem"),
    [
        ("tcp://1.2.3.4:5", "annot assign"),
        ("tcp://nowhere.invalid:0", "No such device"),
        ("nonsense", "bind 'nonsense'"),
        ("ipc:///tmp/x", "tcp://, a host"),
        ("tcp://127.0.0.1:99999", "port up to 65535"),
    ],
)
def test_unbindable_address_is_refused(bind: str, problem: str) -> None:
    with pytest.raises(LaunchError, match=problem):
        Coordinator(setup_of(), bind=bind, keys=KEYS.server_keys)


def test_a_port_in_use_is_refused() -> None:
    with coordinator_of(setup_of()) as coordinator, pytest.raises(LaunchError, match="in use"):
        Coordinator(setup_of(), bind=coordinator.address, keys=KEYS.server_keys)


def test_invalid_timeouts_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"heartbeat_timeout=0\.5"):
        coordinator_of(setup_of(), heartbeat_timeout=0.5)
    with pytest.raises(PolicyError, match="startup_timeout=inf"):
        coordinator_of(setup_of(), startup_timeout=float("inf"))
    with pytest.raises(PolicyError, match=r"300 s.* lease .*300 s"):
        setup_of(limits=Limits(ceiling=300.0))


def test_full_disk_stops_log_but_not_server() -> None:
    setup = setup_of(pipelines=2)
    with pytest.warns(UserWarning, match="/dev/full"):
        coordinator = coordinator_of(setup, Path("/dev/full"))
    with coordinator:
        fake_workers = [
            FakeWorker(coordinator.address, setup, worker) for worker in workers_of(setup)
        ]
        train_all(fake_workers, 3)
        counters = coordinator.counters
    assert [fake_worker.clock for fake_worker in fake_workers] == [3, 3]
    assert not any(fake_worker.failures for fake_worker in fake_workers)
    assert counters["committed"] > 0


def test_log_starts_with_join_and_ends_with_leave(tmp_path: Path) -> None:
    setup = setup_of(pipelines=1)
    with coordinator_of(setup, tmp_path / "log") as coordinator:
        FakeWorker(coordinator.address, setup, Worker(0, 0)).train(1)
        eventually(lambda: not coordinator.present)
    kinds = [type(decision.event) for _, decision in DecisionReader(tmp_path / "log").decisions()]
    assert kinds == [Join, Ready, Leave]
    assert not any(isinstance(kind, Refuse) for kind in kinds)

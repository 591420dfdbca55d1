"""The coordinator with workers on loopback: full cycles, beginning, ending, and the log of it."""

import threading
import time
from pathlib import Path

import pytest

from polyrhythm.errors import LaunchError, PeerError, PolicyError
from polyrhythm.run.coordinator.coordinator import Coordinator
from polyrhythm.run.coordinator.wire import Accepted, Beat, Welcome
from polyrhythm.sync.deadlines import Limits
from polyrhythm.sync.decision_log import DecisionReader, replay
from polyrhythm.sync.messages import Assign, Commit, Done, Join, Leave, Ready, Refuse, Skip
from polyrhythm.types import Worker
from tests.gloo.coordinators import (
    KEYS,
    PATIENCE,
    Raw,
    Trainee,
    coordinator_of,
    eventually,
    hello_of,
    setup_of,
    train_all,
    trainees,
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
def test_every_step_ends_once_and_the_log_replays(policy: str, tmp_path: Path) -> None:
    setup = setup_of(policy, stages=2, pipelines=3, options=POLICIES[policy], seed=5)
    log = tmp_path / "scheduler.jsonl"
    with coordinator_of(setup, log) as coordinator:
        made = [Trainee(coordinator.address, setup, worker) for worker in workers_of(setup)]
        train_all(made, 20)
        eventually(lambda: not coordinator.present)
        counters = coordinator.counters
    for trainee in made:
        gids = [command.gid for command in trainee.told(Assign)]
        assert gids == sorted(set(gids))
        assert not trainee.failures
    assert counters["committed"] > 0
    assert counters["malformed"] == counters["stranger"] == 0
    assert counters["late"] == 0 or policy == "pairwise"  # a passive partner may leave
    assert replay(log) is None
    events = [decision.event for _, decision in DecisionReader(log).decisions()]
    num_ready = sum(isinstance(event, Ready) for event in events)
    assert num_ready == len(made) * 20
    assert [event.now for event in events] == sorted(event.now for event in events)


def test_a_worker_alone_goes_on_alone(tmp_path: Path) -> None:
    setup = setup_of("age", pipelines=1)
    with (
        coordinator_of(setup, tmp_path / "log") as coordinator,
        trainees(coordinator.address, setup) as (alone,),
    ):
        assert [type(alone.step()) for _ in range(5)] == [Skip] * 5
    assert replay(tmp_path / "log") is None


def test_one_connection_may_speak_for_several_workers() -> None:
    setup = setup_of(pipelines=3)
    with coordinator_of(setup) as coordinator, Raw(coordinator.address) as raw:
        for worker in workers_of(setup):
            raw.say(hello_of(setup, worker))
        assert raw.hear(Welcome) == Welcome(3)
        for worker in workers_of(setup):
            raw.say(Ready(worker, 1, 1))
        assign = raw.hear(Assign)
        for worker in assign.members:
            raw.say(Done(worker, assign.gid, True, 1))
        assert raw.hear(Commit) == Commit(assign.gid, tuple(workers_of(setup)), (1, 1, 1))
        raw.say(Beat(Worker(0, 1), 1))
        assert raw.hear(object) == Beat(Worker(0, 1), 1)  # no command came twice


def test_the_coordinator_sets_the_time_of_events(tmp_path: Path) -> None:
    setup = setup_of(pipelines=1)
    with coordinator_of(setup, tmp_path / "log") as coordinator, Raw(coordinator.address) as raw:
        before = time.monotonic()
        raw.say(hello_of(setup, Worker(0, 0)))
        raw.hear(Welcome)
        raw.say(Ready(Worker(0, 0), 1, 1, now=1e9))
        raw.hear(Skip)
        after = time.monotonic()
    times = [decision.event.now for _, decision in DecisionReader(tmp_path / "log").decisions()]
    assert before <= times[0] <= times[1] <= after


def test_workers_are_welcomed_together() -> None:
    setup = setup_of(pipelines=2)
    with coordinator_of(setup) as coordinator, Raw(coordinator.address) as first:
        first.say(hello_of(setup, Worker(0, 0)))
        assert isinstance(first.hear(object), Accepted)
        with pytest.raises(AssertionError, match="no Welcome"):
            first.hear(Welcome, timeout=0.3)
        with Raw(coordinator.address) as second:
            second.say(hello_of(setup, Worker(0, 1)))
            assert first.hear(Welcome) == second.hear(Welcome) == Welcome(2)


def test_who_is_there_begins_after_a_time_and_who_is_late_begins_at_once() -> None:
    setup = setup_of(pipelines=3)
    with coordinator_of(setup, startup=0.3) as coordinator, Raw(coordinator.address) as first:
        began = time.monotonic()
        first.say(hello_of(setup, Worker(0, 0)))
        assert first.hear(Welcome) == Welcome(1)
        assert time.monotonic() - began >= 0.3
        with Raw(coordinator.address) as late:
            late.say(hello_of(setup, Worker(0, 1)))
            assert late.hear(Welcome) == Welcome(2)


def test_a_defect_ends_the_service_and_everybody_hears_of_it() -> None:
    setup = setup_of(pipelines=2)
    coordinator = coordinator_of(setup).in_thread()
    with trainees(coordinator.address, setup) as (one, other):
        coordinator.scheduler._hear[Ready] = lambda event: 1 / 0
        with pytest.raises(PeerError, match="the coordinator has failed: ZeroDivisionError"):
            one.step()
        with pytest.raises(PeerError, match="the coordinator has failed"):
            other.wait()
    with pytest.raises(ZeroDivisionError):
        coordinator.close()
    coordinator.close()  # it has said so


def test_closing_waits_for_those_who_have_not_left() -> None:
    setup = setup_of(pipelines=1)
    coordinator = coordinator_of(setup).in_thread()
    trainee = Trainee(coordinator.address, setup, Worker(0, 0)).join()
    leaves = threading.Timer(0.5, trainee.client.close)
    leaves.start()
    began = time.monotonic()
    coordinator.close(patience=PATIENCE)
    assert 0.4 < time.monotonic() - began < PATIENCE
    leaves.join()
    assert not trainee.failures


def test_those_who_are_still_there_hear_of_the_end() -> None:
    setup = setup_of(pipelines=1)
    coordinator = coordinator_of(setup).in_thread()
    with trainees(coordinator.address, setup) as (left,):
        coordinator.close()
        with pytest.raises(PeerError, match="the coordinator has ended"):
            left.step()


def test_a_worker_that_left_may_come_again_in_a_new_life() -> None:
    setup = setup_of(pipelines=1)
    with coordinator_of(setup) as coordinator:
        Trainee(coordinator.address, setup, Worker(0, 0), life=1).train(2)
        eventually(lambda: not coordinator.present)
        with pytest.raises(LaunchError, match="life 1 is over, as it has left"):
            Trainee(coordinator.address, setup, Worker(0, 0), life=1).train(1)
        Trainee(coordinator.address, setup, Worker(0, 0), life=2).train(2)


def test_a_coordinator_that_never_served_can_be_closed(tmp_path: Path) -> None:
    coordinator = coordinator_of(setup_of(), tmp_path / "log")
    coordinator.close()
    coordinator.close()
    assert replay(tmp_path / "log") is None


def test_serving_in_the_foreground_ends_when_it_is_told_to() -> None:
    coordinator, until = coordinator_of(setup_of()), threading.Event()
    threading.Timer(0.1, until.set).start()
    began = time.monotonic()
    coordinator.serve(until)
    assert time.monotonic() - began < 5


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
def test_an_address_that_cannot_be_bound_is_refused(bind: str, problem: str) -> None:
    with pytest.raises(LaunchError, match=problem):
        Coordinator.of(setup_of(), bind=bind, keys=KEYS)


def test_a_port_in_use_is_refused() -> None:
    with coordinator_of(setup_of()) as coordinator, pytest.raises(LaunchError, match="in use"):
        Coordinator.of(setup_of(), bind=coordinator.address, keys=KEYS)


def test_times_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"silence=0\.5"):
        coordinator_of(setup_of(), silence=0.5)
    with pytest.raises(PolicyError, match="startup=inf"):
        coordinator_of(setup_of(), startup=float("inf"))
    with pytest.raises(PolicyError, match=r"up to 300 s, and a lease .* of 300 s"):
        setup_of(limits=Limits(ceiling=300.0))
    setup = setup_of(pipelines=2)
    with pytest.raises(PolicyError, match="1 stages x 2 pipelines, in a job of 2 stages x 1"):
        Coordinator(
            setup.scheduler(),
            bind="tcp://127.0.0.1:0",
            keys=KEYS,
            policy=setup.text,
            num_stages=2,
            num_pipelines=1,
        )
    with pytest.raises(PolicyError, match="without the setup"):
        Coordinator(
            setup.scheduler(),
            bind="tcp://127.0.0.1:0",
            keys=KEYS,
            policy=setup.text,
            num_stages=1,
            num_pipelines=2,
            log=tmp_path / "log",
        )


def test_a_full_disk_stops_the_log_and_not_the_service() -> None:
    setup = setup_of(pipelines=2)
    with pytest.warns(UserWarning, match="decision log /dev/full ends here"):
        coordinator = coordinator_of(setup, Path("/dev/full"))
    with coordinator:
        made = [Trainee(coordinator.address, setup, worker) for worker in workers_of(setup)]
        train_all(made, 3)
        counters = coordinator.counters
    assert [trainee.clock for trainee in made] == [3, 3]
    assert not any(trainee.failures for trainee in made)
    assert counters["committed"] > 0


def test_join_comes_first_and_leave_last_in_a_log(tmp_path: Path) -> None:
    setup = setup_of(pipelines=1)
    with coordinator_of(setup, tmp_path / "log") as coordinator:
        Trainee(coordinator.address, setup, Worker(0, 0)).train(1)
        eventually(lambda: not coordinator.present)
    kinds = [type(decision.event) for _, decision in DecisionReader(tmp_path / "log").decisions()]
    assert kinds == [Join, Ready, Leave]
    assert not any(isinstance(kind, Refuse) for kind in kinds)

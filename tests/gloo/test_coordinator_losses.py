"""Losses: killed and stopped workers, a killed coordinator, connections that break."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.processes import BAD_INPUT, PEER_LOST, Child
from polyrhythm.run.coordinator.wire import Beat, Welcome
from polyrhythm.sync.decision_log import DecisionReader, replay
from polyrhythm.sync.messages import Abort, Assign, Commit, Dead, Done, Heal, Ready, Skip
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Worker
from tests.gloo.coordinators import (
    PATIENCE,
    Proxy,
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

FIRST, SECOND, THIRD = (Worker(0, pipeline) for pipeline in range(3))


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


def work(address: str, setup: Setup, worker: Worker, *, averages: bool, **more: object) -> None:
    """In a process of its own: one step after another, until something fails."""
    trainee = Trainee(address, setup, worker, **more)
    trainee.averages = averages
    trainee.join()
    while True:
        trainee.step()


def test_a_killed_worker_is_noticed_at_once_and_the_others_go_on(
    children: list[Child], tmp_path: Path
) -> None:
    setup = setup_of(pipelines=3)
    log = tmp_path / "log"
    with coordinator_of(setup, log) as coordinator:
        child = Child(lambda: work(coordinator.address, setup, THIRD, averages=False))
        children.append(child)
        one, other = (Trainee(coordinator.address, setup, w) for w in (FIRST, SECOND))
        one.join(), other.join()
        one.ready(), other.ready()
        eventually(lambda: one.told(Assign) and other.told(Assign))
        killed = time.monotonic()
        child.signal(signal.SIGKILL)
        # The rest of its group is told to forget it, and averages in another one.
        assert isinstance(one.wait(), Commit)
        assert time.monotonic() - killed < 2.5
        assert "s0p2 died" in one.told(Abort)[0].reason
        assert one.told(Assign)[-1].members == (FIRST, SECOND)
        assert isinstance(other.wait(), Commit)
        assert coordinator.present == [FIRST, SECOND]
        one.client.close(), other.client.close()
    assert replay(log) is None


def test_a_stopped_worker_is_dead_after_a_silence_and_hears_so_when_it_comes_back(
    children: list[Child], tmp_path: Path
) -> None:
    setup = setup_of(pipelines=2)
    output = tmp_path / "child.log"
    with coordinator_of(setup, silence=1.2) as coordinator:
        address = coordinator.address
        child = Child(
            lambda: work(address, setup, SECOND, averages=False, silence=1.0), output=output
        )
        children.append(child)
        one = Trainee(address, setup, FIRST).join()
        one.ready()
        eventually(lambda: one.told(Assign))
        stopped = time.monotonic()
        child.signal(signal.SIGSTOP)
        assert isinstance(one.wait(), Skip | Commit)
        assert 0.9 < time.monotonic() - stopped < 4.0
        assert coordinator.present == [FIRST]
        child.signal(signal.SIGCONT)
        assert child.wait(PATIENCE) == PEER_LOST
        assert "it says: s0p1 is dead: it was silent for 1." in output.read_text()
        one.client.close()


def test_a_worker_that_only_computes_is_alive() -> None:
    setup = setup_of(pipelines=2)
    with coordinator_of(setup, silence=1.0) as coordinator, trainees(coordinator.address, setup):
        time.sleep(1.2)  # it has told them how often to beat
        assert len(coordinator.present) == 2


def test_one_of_many_connections_that_close_is_not_mistaken_for_another(
    children: list[Child],
) -> None:
    """Descriptors are used again: what closes was another's a moment ago."""
    setup = setup_of(pipelines=3)
    with coordinator_of(setup, startup=0.0) as coordinator, Raw(coordinator.address) as quiet:
        Raw(coordinator.address).__exit__()
        quiet.say(hello_of(setup, FIRST))
        quiet.hear(Welcome)
        for life in range(1, 6):
            with Raw(coordinator.address) as other:
                other.say(hello_of(setup, SECOND, life=life))
                other.hear(Welcome)
        seats = coordinator._desk.seats
        mistaken = seats.connections[seats.of[FIRST].name].descriptor
        coordinator._door.closed.append(mistaken)
        eventually(lambda: SECOND not in coordinator.present)
        time.sleep(0.2)
        assert coordinator.present == [FIRST]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_notice_a_lost_coordinator(
    children: list[Child], tmp_path: Path, ending: signal.Signals
) -> None:
    setup = setup_of(pipelines=2)
    place = tmp_path / "address"

    def serve() -> None:
        coordinator = coordinator_of(setup)
        (tmp_path / "partial").write_text(coordinator.address)
        (tmp_path / "partial").rename(place)
        coordinator.serve(threading.Event())

    children.append(Child(serve))
    eventually(place.exists)
    with trainees(place.read_text(), setup, silence=1.0) as (one, other):
        assert one.ready() is None
        lost = time.monotonic()
        children[0].signal(ending)
        for trainee in (one, other):
            with pytest.raises(PeerError, match="lost coordinator at tcp://") as error:
                trainee.wait()
        assert 0.7 < time.monotonic() - lost < 4.0
        assert "during waiting for a group" in str(one.failures[0])
        is_closed = ending == signal.SIGKILL
        why = "its connection has closed" if is_closed else "nothing was heard from it"
        assert why in str(error.value)
        assert len(one.failures) == len(other.failures) == 1


@pytest.mark.parametrize("policy", ["all_reduce", "pairwise", "adaptive"])
def test_broken_connections_lose_no_step(policy: str, tmp_path: Path) -> None:
    setup = setup_of(policy, stages=2, pipelines=3)
    num_steps, num_cuts = 20, 3
    with coordinator_of(setup, tmp_path / "log", silence=60.0) as coordinator:
        proxy = Proxy(coordinator.address)
        made = [Trainee(proxy.address, setup, w, pause=0.01) for w in workers_of(setup)]

        def cut() -> None:
            for trainee in made:
                trainee.client.join(PATIENCE)
            for number in range(1, num_cuts + 1):
                eventually(lambda n=number: max(trainee.clock for trainee in made) >= 3 * n)
                proxy.cut()
                num_back = number * len(made)
                eventually(lambda n=num_back: coordinator.counters["reconnected"] == n)

        errors: list[BaseException] = []
        cutter = threading.Thread(target=_run_noting, args=(cut, errors))
        cutter.start()
        try:
            train_all(made, num_steps)
        finally:
            cutter.join()
            proxy.close()
        assert not errors
    for trainee in made:
        assert trainee.clock == num_steps
        for kind in (Assign, Commit):
            gids = [command.gid for command in trainee.told(kind)]
            assert gids == sorted(set(gids)), "each command once, in order"
    assert replay(tmp_path / "log") is None
    events = [decision.event for _, decision in DecisionReader(tmp_path / "log").decisions()]
    assert not any(isinstance(event, Dead) for event in events)
    assert len({(e.worker, e.clock) for e in events if isinstance(e, Ready)}) == 6 * num_steps


def _run_noting(work: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:
        errors.append(error)


def test_commands_that_were_lost_are_told_again() -> None:
    setup = setup_of(pipelines=2)
    with coordinator_of(setup) as coordinator, Raw(coordinator.address) as other:
        proxy = Proxy(coordinator.address)
        one = Trainee(proxy.address, setup, FIRST)
        other.say(hello_of(setup, SECOND))
        one.join()
        one.ready()
        eventually(lambda: coordinator.scheduler.membership.members[FIRST].is_ready)
        proxy.close()  # for good: nothing reaches it, and it has a second to come back
        time.sleep(0.1)
        other.say(Ready(SECOND, 1, 1))
        gid = other.hear(Assign).gid
        other.say(Done(SECOND, gid, False, 1))
        assert "s0p1 failed" in other.hear(Abort).reason
        assert other.hear(Assign).gid == gid + 1
        again = Proxy(coordinator.address, at=proxy.address)
        assert isinstance(_second_assign(one), Assign)
        assert [type(command) for command in one.heard[:3]] == [Assign, Abort, Assign]
        other.say(Done(SECOND, gid + 1, True, 1))
        other.say(Beat(SECOND, 1))
        assert isinstance(one.wait(), Commit)
        one.client.close()
        again.close()


def test_what_a_worker_said_last_is_said_again() -> None:
    setup = setup_of(pipelines=1)
    with coordinator_of(setup) as coordinator:
        proxy = Proxy(coordinator.address)
        one = Trainee(proxy.address, setup, FIRST).join()
        proxy.loses = True
        one.ready()
        eventually(lambda: proxy.num_lost)
        proxy.loses = False
        began = time.monotonic()
        proxy.cut()
        assert isinstance(one.wait(), Skip)
        assert time.monotonic() - began < 4.0  # so not by waiting for a third of its patience
        assert coordinator.counters["duplicate"] == 1  # of the Hello
        one.client.close()
        proxy.close()


def test_what_has_no_answer_for_long_is_said_again() -> None:
    setup = setup_of(pipelines=1)
    with coordinator_of(setup) as coordinator:
        one = Trainee(coordinator.address, setup, FIRST, silence=1.5).join()
        step, lost = coordinator._desk._step, []

        def lose(event: object) -> None:
            coordinator._desk._step = step
            lost.append(event)

        coordinator._desk._step = lose
        assert isinstance(one.step(), Skip)
        assert isinstance(lost[0], Ready)
        one.client.close()


def _second_assign(trainee: Trainee) -> object:
    eventually(lambda: len(trainee.told(Assign)) == 2)
    return trainee.told(Assign)[1]


def test_a_worker_that_starts_anew_copies_the_model() -> None:
    setup = setup_of(pipelines=2)
    with coordinator_of(setup) as coordinator:
        made = [Trainee(coordinator.address, setup, worker) for worker in workers_of(setup)]
        one, other = made
        one.join(), other.join()
        one.ready(), other.ready()
        one.wait(), other.wait()
        other.client.close(leave=False)
        anew = Trainee(coordinator.address, setup, SECOND, life=2).join()
        assert [command.source for command in anew.told(Heal)] == [FIRST]
        one.client.close(), anew.client.close()


def test_a_worker_that_died_may_not_go_on_in_its_old_life(
    children: list[Child], tmp_path: Path
) -> None:
    setup = setup_of(pipelines=2)
    output = tmp_path / "child.log"
    with coordinator_of(setup, startup=0.0) as coordinator:
        gone = Trainee(coordinator.address, setup, SECOND).join()
        gone.client.close(leave=False)
        eventually(lambda: not coordinator.present)
        again = Child(
            lambda: work(coordinator.address, setup, SECOND, averages=True), output=output
        )
        children.append(again)
        assert again.wait(PATIENCE) == BAD_INPUT
        assert "life 1 is over, as it is dead: its connection has closed" in output.read_text()
        with pytest.raises(LaunchError):
            Trainee(coordinator.address, setup, SECOND).join()


def test_a_coordinator_that_was_stopped_blames_nobody(tmp_path: Path) -> None:
    """Nobody was silent while it did not listen, though nothing was heard."""
    setup = setup_of(pipelines=2)
    with (
        coordinator_of(setup, silence=1.0) as coordinator,
        trainees(coordinator.address, setup, silence=10.0),
    ):
        door = coordinator._door
        wait, receive = door.wait, door.receive

        def stop(timeout: float) -> None:
            door.wait, door.receive = wait, nothing_yet
            time.sleep(1.1)

        def nothing_yet(most: int) -> list:
            door.receive = receive  # libzmq's thread was stopped as well
            return []

        door.wait = stop
        eventually(lambda: coordinator.counters["stalled"])
        time.sleep(0.3)
        assert len(coordinator.present) == 2


def test_all_of_a_job_may_break_at_once() -> None:
    setup = setup_of(stages=2, pipelines=4)
    with coordinator_of(setup) as coordinator:
        proxy = Proxy(coordinator.address)
        made = [Trainee(proxy.address, setup, worker) for worker in workers_of(setup)]
        for trainee in made:
            trainee.join()
        assert proxy.cut() == 8
        train_all(made, 5)
        eventually(lambda: not coordinator.present)
        assert coordinator.counters["reconnected"] == 8
        proxy.close()

"""A worker's client of the coordinator: join, refusals, close, and retransmission."""

import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from polyrhythm.errors import LaunchError, PeerError, PolicyError
from polyrhythm.run.coordinator.client import CoordinatorClient, PendingMessages
from polyrhythm.run.coordinator.keys import ClientKeys, JobKeys
from polyrhythm.run.coordinator.sessions import ToWorker
from polyrhythm.sync.protocol import (
    Abort,
    Assign,
    AverageAll,
    Commit,
    CopyFrom,
    Done,
    Ready,
    Request,
    Skip,
)
from polyrhythm.types import Worker
from tests.gloo.coordinators import (
    KEYS,
    FakeWorker,
    coordinator_of,
    eventually,
    hello_of,
    joined_workers,
    setup_of,
)

ME, OTHER = Worker(0, 0), Worker(0, 1)
SETUP = setup_of(pipelines=2)


def client_of(
    address: str, keys: ClientKeys = KEYS.client_keys, **more
) -> tuple[CoordinatorClient, list]:
    failures: list[Exception] = []
    client = CoordinatorClient(
        address,
        keys,
        hello_of(SETUP, ME),
        on_command=more.pop("on_command", lambda command: None),
        on_failure=failures.append,
        **more,
    )
    return client, failures


def test_no_server_at_address_raises_peer_error() -> None:
    client, failures = client_of("tcp://127.0.0.1:9", heartbeat_timeout=0.5)
    with pytest.raises(PeerError, match=r"lost coordinator at tcp://127.0.0.1:9 during joining"):
        client.join(10)
    assert "nothing answers" in str(failures[0])
    assert len(failures) == 1
    client.close()
    assert not client._thread.is_alive()


def test_join_respects_timeout() -> None:
    with coordinator_of(SETUP) as coordinator:
        client, failures = client_of(coordinator.address)
        eventually(lambda: client._coordinator)
        with pytest.raises(PeerError, match=r"during joining .* other workers"):
            client.join(0.3)
        assert not failures  # join() may be called again
        client.close()


def test_wrong_key_is_reported_at_once() -> None:
    other = JobKeys.new().client_keys
    keys = ClientKeys(other.pair, KEYS.server_public)
    with coordinator_of(SETUP) as coordinator:
        client, _ = client_of(coordinator.address, keys)
        with pytest.raises(LaunchError, match="the key of s0p0"):
            client.join(10)
        client.close()
        client, _ = client_of(coordinator.address, other)  # with another server key as well
        eventually(lambda: "keys" in client._problem)
        with pytest.raises(PeerError, match="keys"):
            client.join(0.5)
        client.close()


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "tcp://:1", "tcp://h:70000"])
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(LaunchError, match="coordinator"):
        client_of(address)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"node": "n" * 256}, "length <= 255"),
        ({"shape": (("a" * 256, (1,)),)}, "length <= 255"),
        ({"shape": tuple((f"{n:0200d}", (1,)) for n in range(6000))}, r"1,2\d\d,\d\d\d bytes"),
    ],
)
def test_invalid_hello_is_refused_by_client(change: dict, problem: str) -> None:
    hello = hello_of(SETUP, ME, **change)
    with pytest.raises(LaunchError, match=f"s0p0.*{problem}"):
        CoordinatorClient(
            "tcp://127.0.0.1:9", KEYS.client_keys, hello, on_command=print, on_failure=print
        )
    with pytest.raises(LaunchError, match="heartbeat_timeout=0"):
        client_of("tcp://127.0.0.1:9", heartbeat_timeout=0)


def test_decreasing_clock_is_refused_with_reason() -> None:
    with (
        coordinator_of(SETUP) as coordinator,
        joined_workers(coordinator.address, SETUP) as (first, second),
    ):
        first.ready(), second.ready()
        first.wait(), second.wait()
        first.client.send(Ready(ME, 0, 1))
        eventually(lambda: first.failures)
        assert isinstance(first.failures[0], PolicyError)
        assert re.search(r"s0p0.*clock 1.*\b0", str(first.failures[0]))


def test_close_is_idempotent_and_thread_safe() -> None:
    closed = threading.Event()

    def close(command: ToWorker) -> None:
        client.close()  # in the thread that close() would join
        closed.set()

    setup = setup_of(pipelines=1)
    with coordinator_of(setup) as coordinator:
        client = CoordinatorClient(
            coordinator.address,
            KEYS.client_keys,
            hello_of(setup, ME),
            on_command=close,
            on_failure=print,
        )
        client.join(10)
        client.send(Ready(ME, 1, 1))
        assert closed.wait(10)
        client.close()
        client.close(leave=False)
        client.send(Ready(ME, 2, 1))  # dropped without an error
        eventually(lambda: not coordinator.present)
        assert coordinator.counters["skipped"] == 1
        client._thread.join(5)
        assert not client._thread.is_alive()


def test_error_in_on_command_is_reported_as_failure() -> None:
    setup = setup_of(pipelines=1)
    failures: list[Exception] = []
    with coordinator_of(setup) as coordinator:
        client = CoordinatorClient(
            coordinator.address,
            KEYS.client_keys,
            hello_of(setup, ME),
            on_command=lambda command: 1 / 0,
            on_failure=failures.append,
        )
        client.join(10)
        client.send(Ready(ME, 1, 1))
        eventually(lambda: failures)
        assert isinstance(failures[0], ZeroDivisionError)
        client.close()


def test_messages_from_many_threads_all_arrive() -> None:
    setup = setup_of(pipelines=1)
    with coordinator_of(setup) as coordinator:
        fake_worker = FakeWorker(coordinator.address, setup, ME).join()

        def send(thread: int) -> None:
            for _ in range(100):
                fake_worker.client.send(Done(ME, 10**6 + thread, True, 1))

        threads = [threading.Thread(target=send, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: coordinator.counters["late"] >= 400)
        assert coordinator.counters["late"] == 400, "each arrives once"
        fake_worker.client.close()


def test_restarted_coordinator_is_detected() -> None:
    setup = setup_of(pipelines=1)
    first = coordinator_of(setup).start()
    address = first.address
    fake_worker = FakeWorker(address, setup, ME).join()
    sessions = first._sessions
    sessions.end_session(sessions.by_worker[ME], "")  # so that it closes without a Refuse
    first.close()
    second = type(first)(setup, bind=address, keys=KEYS.server_keys).start()
    try:
        with pytest.raises(PeerError, match="restarted"):
            fake_worker.step()
    finally:
        fake_worker.client.close()
        second.close()


EXIT = """
import sys, threading, time
from tests.gloo.coordinators import FakeWorker, coordinator_of, setup_of
from polyrhythm.types import Worker
setup = setup_of(pipelines=1)
coordinator = coordinator_of(setup, log_info=lambda line: print(line, flush=True)).start()
fake_worker = FakeWorker(coordinator.address, setup, Worker(0, 0)).join()
fake_worker.step()
print("over", flush=True)
if sys.argv[1] == "raises":
    raise RuntimeError("something else")
"""


@pytest.mark.parametrize(("ending", "status"), [("ends", 0), ("raises", 1)])
def test_process_exits_without_close(ending: str, status: int) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXIT, ending],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    assert "over" in done.stdout
    assert "has left" not in done.stdout  # without close(), the worker has not finished
    assert ("something else" in done.stderr) == (ending == "raises")
    assert "Exception ignored" not in done.stderr
    assert time.monotonic() - start < 30


def assign(gid: int) -> Assign:
    return Assign(gid, 1, (ME, OTHER), (1, 1), 1.0, "why")


def test_duplicate_commands_are_ignored() -> None:
    pending = PendingMessages(ME, 0)
    commit = Commit(2, (ME, OTHER), (1, 1))
    pending.on_send(Ready(ME, 1, 1), 0.0)
    commands = [assign(1), Abort(1, (ME, OTHER), "why"), assign(2), commit, Skip(ME, 2, "a")]
    assert [pending.on_receive(command, 1.0) for command in commands] == [True] * 5
    assert [pending.on_receive(command, 1.0) for command in commands] == [False] * 5
    assert pending.on_receive(Skip(ME, 2, "another, for an AverageAll"), 1.0)
    assert pending.on_receive(assign(4), 1.0)
    assert pending.on_receive(Abort(3, (ME, OTHER), "its Assign was lost"), 1.0)
    copy_from = CopyFrom(ME, OTHER, "why")
    assert [pending.on_receive(copy_from, now) for now in (1.0, 2.0)] == [True] * 2  # never ignored


def test_unanswered_messages_are_kept_for_resend() -> None:
    pending = PendingMessages(ME, 0)
    ready, done = Ready(ME, 1, 1), Done(ME, 7, True, 1)
    assert pending.unanswered() == []
    pending.on_send(Request(ME, 1, 1), 0.0)
    assert (pending.unanswered(), pending.requested_clock) == ([], 1)
    pending.on_send(ready, 1.0)
    assert (pending.unanswered(), pending.waiting_since) == ([ready], 1.0)
    pending.on_receive(assign(7), 2.0)
    assert (pending.unanswered(), pending.waiting_since) == ([], math.inf)  # the worker averages
    pending.on_send(done, 3.0)
    assert pending.unanswered() == [ready, done]
    pending.on_receive(Abort(7, (ME, OTHER), "why"), 4.0)
    assert pending.unanswered() == [ready]  # until another group is assigned
    pending.on_receive(assign(8), 5.0)
    pending.on_send(Done(ME, 8, True, 1), 6.0)
    pending.on_receive(Commit(8, (ME, OTHER), (1, 1)), 7.0)
    assert pending.unanswered() == []


def test_done_of_an_open_group_is_kept_when_the_next_step_is_ready() -> None:
    """A passive worker is assigned to a group before it has finished its step."""
    pending = PendingMessages(ME, 4)
    pending.on_receive(assign(1), 0.0)
    ready, done = Ready(ME, 5, 1), Done(ME, 1, True, 1)
    pending.on_send(done, 1.0)
    pending.on_send(ready, 2.0)
    assert pending.unanswered() == [ready, done]
    pending.on_receive(Abort(1, (ME, OTHER), "why"), 3.0)
    assert pending.unanswered() == [ready]
    pending.on_send(done, 4.0)  # it was queued when the group was aborted
    assert pending.unanswered() == [ready]


def test_commit_that_ends_no_step_does_not_answer_ready() -> None:
    pending = PendingMessages(ME, 4)
    pending.on_receive(assign(1), 0.0)
    pending.on_send(Done(ME, 1, True, 1), 1.0)
    ready = AverageAll(ME, 5, 1)
    pending.on_send(ready, 2.0)
    pending.on_receive(Commit(1, (ME, OTHER), (-1, 3)), 3.0)
    assert (pending.unanswered(), pending.clock) == ([ready], 5)
    pending.on_receive(Skip(ME, 5, "why"), 4.0)
    assert pending.unanswered() == []

"""Messages that the coordinator refuses: counted, answered with a reason, without side effects."""

import contextlib
import random
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from polyrhythm.errors import LaunchError
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.server import Coordinator
from polyrhythm.run.coordinator.sessions import (
    FATAL,
    MAX_HELLO_BYTES,
    PROTOCOL,
    Accepted,
    Heartbeat,
    Hello,
    Welcome,
)
from polyrhythm.sync.protocol import Assign, Commit, Done, Leave, Ready, Refuse, Request
from polyrhythm.types import Worker
from tests.gloo.coordinators import (
    KEYS,
    SHAPE,
    FakeWorker,
    RawClient,
    coordinator_of,
    eventually,
    hello_of,
    setup_of,
)

SETUP = setup_of("partial_reduce", stages=2, pipelines=3, options={"group_size": 2})
FIRST, SECOND, THIRD = (Worker(0, pipeline) for pipeline in range(3))
encode = msgspec.msgpack.encode


@contextlib.contextmanager
def busy_coordinator() -> Iterator[Coordinator]:
    """A coordinator with two valid workers that average throughout, and must not be disturbed."""
    done, rounds, errors = threading.Event(), [0], []
    with coordinator_of(SETUP, startup_timeout=0.0) as coordinator:
        pairs = ((0, 0), (0, 1), (1, 0), (1, 1))
        workers = [FakeWorker(coordinator.address, SETUP, Worker(*pair)).join() for pair in pairs]

        def average() -> None:
            try:
                while not done.is_set():
                    for fake_worker in workers[:2]:
                        fake_worker.ready()
                    assert all(
                        isinstance(fake_worker.wait(), Commit) for fake_worker in workers[:2]
                    )
                    rounds[0] += 1
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=average)
        thread.start()
        try:
            yield coordinator
            before = rounds[0]
            eventually(lambda: errors or rounds[0] > before + 2)
        finally:
            done.set()
            thread.join()
            for fake_worker in workers:
                fake_worker.client.close()
        assert not errors


def truncated() -> bytes:
    return encode(hello_of(SETUP, THIRD))[:-3]


MALFORMED = {
    "no bytes": b"",
    "no MessagePack": b"\xc1\xff\x00 hello",
    "truncated": truncated(),
    "text": b"Ready",
    "unknown tag": encode(["Nonsense", [0, 2], 1]),
    "a command": encode(["Commit", 1, [[0, 2]], [1]]),
    "an event of ours": encode(["Dead", [0, 0], 1, 0.0]),
    "a timer": encode(["Timer", 0.0]),
    "wrong type": encode(["Ready", [0, 2], "one", 0]),
    "worker of one number": encode(["Ready", [0], 1, 0]),
    "too few fields": encode(["Ready", [0, 2]]),
    "negative clock": encode(["Ready", [0, 2], -1, 0]),
    "no positions": encode(["Acquire", [0, 2], 0, 0, None, 1]),
    "positions before the first": encode(["Acquire", [0, 2], 0, 4, -1, 1]),
    "a map": encode({"type": "Ready"}),
    "too many dimensions": encode(hello_of(SETUP, THIRD, shape=(("a", (1,) * 33),))),
    "a long name": encode(hello_of(SETUP, THIRD, node="n" * 256)),
    "no text": encode(["Hello", PROTOCOL, [0, 2], b"\xff", 0, 1, "", []]),
    "bad text": b"\x98\xa5Hello%c\x92\x00\x02\xa1\xff\x00\x01\xa0\x90" % PROTOCOL,
    "deep": b"\x92\xa5Ready" + b"\x91" * 5000,
    "a huge length": b"\xdd\xff\xff\xff\xff\xa5Ready",
}


def test_malformed_messages_are_counted_and_ignored() -> None:
    rng = random.Random(0)
    noise = [rng.randbytes(rng.randrange(1, 60)) for _ in range(200)]
    with busy_coordinator() as coordinator, RawClient(coordinator.address) as raw:
        raw.send(hello_of(SETUP, THIRD))
        raw.receive(Welcome)
        for number, data in enumerate([*MALFORMED.values(), *noise], 1):
            raw.send(data)
            if number <= len(MALFORMED):
                kind = list(MALFORMED)[number - 1]
                eventually(lambda n=number: coordinator.counters["malformed"] == n), kind
        raw.send(Heartbeat(THIRD, 1))
        assert raw.receive(object) == Heartbeat(THIRD, 1)  # no malformed message was answered
        assert coordinator.counters["malformed"] == len(MALFORMED) + len(noise)


def test_multipart_messages_are_dropped() -> None:
    with busy_coordinator() as coordinator, RawClient(coordinator.address) as raw:
        raw.send(hello_of(SETUP, THIRD))
        raw.receive(Welcome)
        raw.socket.send_multipart([encode(Ready(THIRD, 1, 1)), b"", b"more"])
        raw.socket.send_multipart([b"", encode(Ready(THIRD, 1, 1))])
        raw.send(Heartbeat(THIRD, 1))
        assert raw.receive(object) == Heartbeat(THIRD, 1)
        assert coordinator.counters["frames"] == 2


def test_oversized_messages_are_refused() -> None:
    with busy_coordinator() as coordinator, RawClient(coordinator.address) as raw:
        long = tuple((f"layers.{number}.weight", (4, 8)) for number in range(30_000))
        assert 500_000 < len(encode(hello_of(SETUP, THIRD, shape=long))) < MAX_HELLO_BYTES
        raw.send(hello_of(SETUP, THIRD, shape=long))
        assert "30,000 tensors with 960,000 numbers" in raw.receive(Refuse).why
        raw.send(hello_of(SETUP, THIRD))
        raw.receive(Welcome)
        raw.send(encode(["Ready", [0, 2], 1, 1, 0.0, "x" * 1024]))
        eventually(lambda: coordinator.counters["oversized"] == 1)
        raw.send(b"x" * (MAX_HELLO_BYTES + 2048))  # libzmq closes the connection and reconnects
        eventually(lambda: THIRD not in coordinator.present)
        assert coordinator.counters["malformed"] == 0


def test_worker_cannot_impersonate_another() -> None:
    with busy_coordinator() as coordinator, RawClient(coordinator.address) as raw:
        raw.send(Ready(FIRST, 99, 1))  # without a Hello: no answer
        eventually(lambda: coordinator.counters["unknown_worker"] == 1)
        raw.send(hello_of(SETUP, THIRD))
        raw.receive(Welcome)
        others = [
            Ready(FIRST, 99, 1),
            Done(FIRST, 1, False, 1),
            Leave(FIRST, 1),
            Heartbeat(FIRST, 1),
        ]
        for message in [*others, Request(Worker(7, 7), 1, 1)]:
            raw.send(message)
            refused = raw.receive(object)
            assert refused == Refuse(message.worker, FATAL, refused.why)
            assert f"Hello for {message.worker}" in refused.why
        assert coordinator.counters["unknown_worker"] == 1 + len(others) + 1
        assert FIRST in coordinator.present


def test_connections_without_keys_are_rejected() -> None:
    other = JobKeys.new()
    wrong_client = JobKeys(
        server_public=KEYS.server_public,
        server_secret=KEYS.server_secret,
        client_public=other.client_public,
        client_secret=other.client_secret,
    )
    with busy_coordinator() as coordinator:
        for num_tried, keys in enumerate((None, wrong_client, other), 1):
            with RawClient(coordinator.address, keys) as raw:
                raw.send(hello_of(SETUP, THIRD))
                eventually(lambda n=num_tried: coordinator.counters["unauthenticated"] >= n)
                assert not raw.socket.poll(50)
        assert THIRD not in coordinator.present


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (
            "hello_outside",
            {"worker": Worker(2, 0)},
            "s2p0 is not in the plan: the coordinator expects 2 stages x 3 pipelines, s0p0 to s1p2",
        ),
        ("hello_outside", {"worker": Worker(0, -1)}, "s0p-1 is not in the plan"),
        (
            "hello_policy",
            {"policy": "age every=1 seed=0"},
            "s0p2 is configured for 'age every=1 seed=0', the coordinator for "
            "'partial_reduce every=1 seed=0 group_size=2'",
        ),
        (
            "hello_shape",
            {"shape": (SHAPE[0], ("layers.0.bias", (8,)))},
            "number 1 is 'layers.0.bias' of shape (8,) in s0p2 and 'layers.0.bias' of shape (4,) "
            "in s0p0; in total, 2 tensors with 40 numbers and 2 tensors with 36 numbers",
        ),
        (
            "hello_shape",
            {"shape": SHAPE[:1]},
            "number 1 is missing in s0p2 and 'layers.0.bias' of shape (4,) in s0p0; in total, "
            "1 tensors with 32 numbers and 2 tensors with 36 numbers",
        ),
        (
            "hello_protocol",
            {"protocol": PROTOCOL + 1},
            f"s0p2 uses protocol {PROTOCOL + 1}, the coordinator protocol {PROTOCOL}",
        ),
    ],
)
def test_mismatched_hello_is_refused(kind: str, change: dict, reason: str) -> None:
    with busy_coordinator() as coordinator, RawClient(coordinator.address) as raw:
        hello = msgspec.structs.replace(hello_of(SETUP, THIRD, clock=3), **change)
        raw.send(hello)
        refused = raw.receive(object)
        assert reason in refused.why
        assert refused.worker == hello.worker
        assert coordinator.counters[kind] == 1
        raw.send(hello_of(SETUP, THIRD))  # a corrected Hello is accepted
        assert isinstance(raw.receive(object), Accepted)


def test_hello_of_other_protocol_version_is_refused() -> None:
    with busy_coordinator() as coordinator, RawClient(coordinator.address) as raw:
        raw.send(encode(["Hello", 7, [0, 2], {"everything": "else"}]))
        assert "s0p2 uses protocol 7" in raw.receive(Refuse).why
        assert coordinator.counters["hello_protocol"] == 1


def test_second_process_for_worker_is_refused() -> None:
    with busy_coordinator() as coordinator:
        with pytest.raises(LaunchError, match=r"s0p1.*'elsewhere'.*incarnation 1.*'here'"):
            FakeWorker(coordinator.address, SETUP, SECOND, node="elsewhere").join()
        assert coordinator.counters["hello_incarnation"] == 1


def test_newer_incarnation_replaces_older() -> None:
    setup = setup_of(pipelines=2)
    with (
        coordinator_of(setup, startup_timeout=0.0) as coordinator,
        RawClient(coordinator.address) as old,
        RawClient(coordinator.address) as new,
    ):
        old.send(hello_of(setup, FIRST, incarnation=1))
        old.receive(Welcome)
        new.send(hello_of(setup, FIRST, incarnation=2))
        new.receive(Welcome)
        old.send(Ready(FIRST, 1, 1))
        assert "s0p0 has restarted, as incarnation 2" in old.receive(Refuse).why
        new.send(Ready(FIRST, 1, 2))
        new.send(hello_of(setup, SECOND, incarnation=1))
        new.send(Ready(SECOND, 1, 1))
        assert new.receive(Assign).incarnations == (2, 1)


def test_many_unauthenticated_connections_are_harmless() -> None:
    with busy_coordinator() as coordinator:
        context = zmq.Context()
        sockets = [context.socket(zmq.DEALER) for _ in range(50)]
        for each in sockets:
            each.connect(coordinator.address)
            with contextlib.suppress(zmq.Again):  # if it is refused already, a send would wait
                each.send(encode(Hello(PROTOCOL, THIRD, "", 0, 1, SETUP.text, SHAPE)), zmq.NOBLOCK)
        eventually(lambda: coordinator.counters["unauthenticated"] >= 50)
        for each in sockets:
            each.close(linger=0)
        context.term()
        assert THIRD not in coordinator.present

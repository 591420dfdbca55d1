"""Replay: a log of events gives the same commands in any process, for every policy."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.sync.members import Limits
from polyrhythm.sync.modes import POLICIES, SyncMode, make_policies
from polyrhythm.sync.protocol import (
    Abort,
    Acknowledge,
    Acquire,
    Acquired,
    Assign,
    AverageAll,
    Command,
    Commit,
    CopyFrom,
    Dead,
    Done,
    Event,
    Join,
    Leave,
    QueryProgress,
    Ready,
    Refuse,
    Request,
    SampleProgress,
    Skip,
    Timer,
)
from polyrhythm.sync.scheduler import Scheduler
from polyrhythm.types import Worker
from tests.pure.scheduler_grid import OPTIONS, Grid, random_times

SHAPE = (2, 5)


def scheduler_of(name: str) -> Scheduler:
    options = OPTIONS.get(name, {})
    policies = make_policies(
        name, num_stages=SHAPE[0], num_pipelines=SHAPE[1], lease=20.0, seed=7, options=options
    )
    mode = SyncMode.named(name)
    limits = mode.limits(SHAPE[0], Limits(ceiling=10.0))
    return Scheduler(policies, SHAPE[1], waits_for_all=mode.waits_for_all, limits=limits)


def run_of(name: str) -> Grid:
    """A run with two losses, a rejoin and three global averages."""
    lost = {30: Worker(1, 2), 50: Worker(0, 4)}
    at_event = {event: lambda grid, w=worker: grid.kill(w) for event, worker in lost.items()}
    at_event[90] = lambda grid: grid.revive(Worker(1, 2))
    average_all_at = frozenset({2, 5, 8})
    times = random_times(3)
    grid = Grid(
        scheduler_of(name), *SHAPE, 8, times, 3, average_all_at=average_all_at, at_event=at_event
    )
    return grid.run()


def digest() -> str:
    """Hash of all commands of all policies, as text and as bytes."""
    sha = hashlib.sha256()
    for name in POLICIES:
        for event, commands in run_of(name).log:
            sha.update(f"{event} {commands}".encode())
            sha.update(msgspec.msgpack.encode(commands))
    return sha.hexdigest()


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_log_gives_the_same_commands(name: str) -> None:
    log = run_of(name).log
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(Event).decode
    scheduler = scheduler_of(name)
    for event, commands in log:
        assert scheduler.step(decode(encode(event))) == commands


def test_the_hash_seed_of_the_process_does_not_matter() -> None:
    code = "from tests.pure.test_sync_replay import digest; print(digest())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "1"},  # that of this process is random
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.strip() == digest()


def test_extra_timer_changes_nothing() -> None:
    scheduler, with_timers = scheduler_of("age"), scheduler_of("age")
    for event, _ in run_of("age").log:
        assert scheduler.step(event) == with_timers.step(event)
        assert with_timers.step(Timer(event.now)) == []


EVENTS: list[Event] = [
    Join(Worker(1, 2), "node", 3, 4, 5.0),
    Request(Worker(1, 2), 3, 4, 5.0),
    Ready(Worker(1, 2), 3, 4, 5.0),
    AverageAll(Worker(1, 2), 3, 4, 5.0),
    Done(Worker(1, 2), 3, True, 4, 5.0),
    Acquire(Worker(1, 2), 3, 4, 100, 5, 6.0),
    Acknowledge(Worker(1, 2), 3, 4, 5.0),
    QueryProgress(Worker(1, 2), 3, 4, 5.0),
    Timer(5.0),
    Dead(Worker(1, 2), 3, 4.0),
    Leave(Worker(1, 2), 3, 4.0),
]
COMMANDS: list[Command] = [
    Assign(1, 2, (Worker(0, 0), Worker(0, 1)), (0, 3), float("inf"), "why"),
    Commit(1, (Worker(0, 0),), (3,)),
    Abort(1, (Worker(0, 0),), "reason"),
    Skip(Worker(0, 0), 1, "why", True),
    Acquired(Worker(0, 0), 1, 100, ((3, 5), (8, 9)), "why"),
    SampleProgress(
        Worker(0, 0), 1, SamplerState(limit=9, next=7, pool=((1, 2),), outstanding=((3, 5),))
    ),
    CopyFrom(Worker(0, 0), Worker(0, 1), "why"),
    Refuse(Worker(0, 0), 1, "why"),
]


@pytest.mark.parametrize(
    ("messages", "kind"), [(EVENTS, Event), (COMMANDS, Command)], ids=["events", "commands"]
)
def test_messages_round_trip(messages: list[object], kind: object) -> None:
    for message in messages:
        wire = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(wire, type=kind) == message
        assert len(wire) < 64
    assert {type(message) for message in messages} == set(kind.__args__)


@pytest.mark.parametrize(
    "wire",
    [
        ["Ready", [0, 1], "late", 0, 0.0],
        ["Ready", [0], 1, 0, 0.0],
        ["Ready", [0, 1]],
        ["Ready", [0, 1], -1, 0, 0.0],
        ["Join", [0, 1], "n" * 256, 0, 0, 0.0],
        ["Nonsense", 1],
        {"type": "Ready"},
        [],
    ],
)
def test_malformed_messages_are_refused(wire: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=Event)

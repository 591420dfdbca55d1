"""The decision log: it replays to the same commands, and is read to its last complete line."""

import dataclasses
import math
import os
import threading
from pathlib import Path

import msgspec
import pytest

from polyrhythm.errors import EventError, PolicyError
from polyrhythm.sync.decision_log import MAX_QUEUED, DecisionLog
from polyrhythm.sync.log_reader import DecisionReader, replay
from polyrhythm.sync.members import Limits
from polyrhythm.sync.protocol import Commit, Dead, Done, Event, Join, Leave, Ready, Timer
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Worker

SETUP = Setup(
    policy="partial_reduce",
    num_stages=2,
    num_pipelines=3,
    options={"group_size": 2, "timeout": math.inf},
    seed=3,
    limits=Limits(ceiling=20.0, group_timeout=math.inf),
    first_gid=7,
)


def events() -> list[Event]:
    workers = [Worker(stage, pipeline) for stage in range(2) for pipeline in range(3)]
    events: list[Event] = [Join(worker, "node", 0, 1, 0.1) for worker in workers]
    events += [Ready(worker, 1, 1, 0.2 + worker.pipeline / 3) for worker in workers]
    events += [Done(Worker(0, 0), 7, True, 1, 1.1), Done(Worker(0, 1), 7, True, 1, 1.2)]
    return [*events, Dead(Worker(1, 0), 1, 1.3), Timer(2.0), Leave(Worker(0, 1), 1, 1.9)]


def write(path: Path, setup: Setup = SETUP) -> list[list]:
    scheduler = setup.scheduler()
    log = DecisionLog(path, setup, scheduler)
    commands = []
    for number, event in enumerate(events()):
        commands.append(scheduler.step(event))
        log.add(event, commands[-1])
        if number % 4 == 0:
            log.flush()
    log.close()
    return commands


def test_a_log_is_read_as_it_was_written_and_replays(tmp_path: Path) -> None:
    commands = write(tmp_path / "new" / "log")
    reader = DecisionReader(tmp_path / "new" / "log")
    assert reader.setup == SETUP
    decisions = [decision for _, decision in reader.decisions()]
    assert [decision.event for decision in decisions] == events()
    assert [list(decision.commands) for decision in decisions] == commands
    assert any(isinstance(command, Commit) for answer in commands for command in answer)
    assert replay(tmp_path / "new" / "log") is None


def test_every_line_is_json(tmp_path: Path) -> None:
    write(tmp_path / "log")
    lines = (tmp_path / "log").read_bytes().splitlines()
    first, *others = [msgspec.json.decode(line) for line in lines]
    assert first["setup"]["options"] == {"group_size": 2, "timeout": "inf"}
    assert others[0] == [["Join", [0, 0], "node", 0, 1, 0.1], []]
    assert len(others) == len(events())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'["Commit",7,', b'["Commit",8,'),
        (b'"seed":3', b'"seed":3,"pipelines_die_whole":false'),
        (b'["Done",[0,1],7,true', b'["Done",[0,1],7,false'),
    ],
)
def test_changed_log_replays_with_a_difference(tmp_path: Path, before: bytes, after: bytes) -> None:
    write(tmp_path / "log")
    text = (tmp_path / "log").read_bytes()
    assert text.count(before) == 1
    if b"pipelines_die_whole" in after:
        text = text.replace(b',"pipelines_die_whole":true', b"")
    (tmp_path / "log").write_bytes(text.replace(before, after))
    difference = replay(tmp_path / "log")
    assert difference is not None
    assert difference.logged != difference.replayed
    assert str(difference).startswith(f"{difference.place}: ")


def test_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    write(tmp_path / "log")
    content = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(content[:-5])
    assert len(list(DecisionReader(tmp_path / "log").decisions())) == len(events()) - 1
    assert replay(tmp_path / "log") is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "truncated"),
        (b'{"schema":9,"polyrhythm":"9.9","setup":{}}\n', "schema 9, by polyrhythm 9.9"),
        (b'{"schema":1,"polyrhythm":"0.1","setup":{}}\n', "schema 1, by polyrhythm 0.1"),
        (b'{"schema":2,"polyrhythm":"0.2","setup":{}}\n', "schema 2, by polyrhythm 0.2"),
        (b'{"schema":4,"polyrhythm":"0.2","setup":{}}\n', "schema 4, by polyrhythm 0.2"),
        (b'{"schema":5,"polyrhythm":"1","log":"scheduler","setup":{"policy":"age"}}\n', "num_stag"),
        (b'{"schema":5,"polyrhythm":"0.2","log":"samples","setup":{}}\n', "a log of 'samples'"),
        (b"nonsense\n", "malformed"),
    ],
)
def test_files_that_are_no_decision_log_are_refused(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(EventError, match=problem):
        replay(tmp_path / "log")


def test_malformed_decision_log_line_is_named(tmp_path: Path) -> None:
    write(tmp_path / "log")
    with (tmp_path / "log").open("ab") as file:
        file.write(b'[["Ready",[0,0],"x"],[]]\n')
    with pytest.raises(EventError, match=f"log: line {len(events()) + 2}: "):
        replay(tmp_path / "log")
    with pytest.raises(EventError, match="No such file"):
        replay(tmp_path / "nothing")


def test_full_disk_ends_the_decision_log_with_one_warning(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log", SETUP, SETUP.scheduler())
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._file)
    os.close(full)
    log.add(Timer(1.0), [])
    with pytest.warns(UserWarning, match="ends here: .*No space left") as warned:
        log.flush()
        log.add(Timer(2.0), [])
        log.flush()
        log.close()
    assert len(warned) == 1
    reader = DecisionReader(tmp_path / "log")  # the header was written before
    assert reader.setup == SETUP
    assert list(reader.decisions()) == []


def test_warnings_as_errors_do_not_stop_the_log(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log", SETUP, SETUP.scheduler())
    os.close(log._file)
    log._file = os.open("/dev/full", os.O_WRONLY)
    log.add(Timer(1.0), [])
    log.flush()  # pytest turns warnings into errors
    assert log._file is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"policy": "adaptve"}, "did you mean 'adaptive'"),
        ({"options": {"group_sise": 2}}, "did you mean 'group_size'"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_pipelines": 0}, "num_pipelines=0"),
        ({"every": 0}, "every=0"),
        ({"lease": 20.0}, "ceiling < lease"),
        ({"lease": math.inf}, "ceiling < lease"),
    ],
)
def test_invalid_setups_are_refused(change: dict, problem: str) -> None:
    with pytest.raises(PolicyError, match=problem):
        dataclasses.replace(SETUP, **change)


def test_the_same_policy_has_the_same_text() -> None:
    first = Setup(
        policy="age", num_stages=1, num_pipelines=2, options={"max_age": 3, "group_size": 2}
    )
    second = Setup(
        policy="age", num_stages=4, num_pipelines=8, options={"group_size": 2, "max_age": 3}
    )
    assert first.text == second.text == "age every=1 seed=0 group_size=2 max_age=3"
    assert Setup(policy="local", num_stages=1, num_pipelines=2).text == "local every=500 seed=0"


def test_disk_that_stands_still_delays_no_decision(tmp_path: Path) -> None:
    """The log is a pipe that nobody reads: a write blocks once it is full."""
    path, timer = tmp_path / "log", Timer(3.0)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = DecisionLog(path, SETUP, SETUP.scheduler(), in_background=True)
    with pytest.warns(UserWarning, match="the disk is slower than the decisions"):
        for _ in range(2 * MAX_QUEUED // 200):
            for _ in range(200):
                log.add(timer, [])
            log.flush()
    lines = b""
    os.set_blocking(reader, True)
    closing = threading.Thread(target=log.close)
    closing.start()
    while data := os.read(reader, 1 << 16):  # until the log is closed
        lines += data
    closing.join()
    os.close(reader)
    (tmp_path / "copy").write_bytes(lines)
    assert len(list(DecisionReader(tmp_path / "copy").decisions())) >= MAX_QUEUED

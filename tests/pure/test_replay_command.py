"""`polyrhythm replay RUN`: decisions are equal, or the first difference is printed."""

from pathlib import Path

import pytest

from polyrhythm import cli
from polyrhythm.sinks.jsonl import merge
from polyrhythm.sync.decision_log import LOG_NAME
from tests.pure.decision_cases import EVENTS, decide, write_run


def replay(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["replay", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_run_replays_identically_by_folder_and_by_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = decide(tmp_path)
    renamed = log.rename(tmp_path / "monday.jsonl")
    decide(tmp_path)
    for source in (tmp_path, log, renamed):
        assert replay(source) == 0
        assert capsys.readouterr().out == f"{len(EVENTS)} decisions, replayed identically\n"


def test_a_log_that_is_still_growing_replays_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = decide(tmp_path)
    log.write_bytes(log.read_bytes()[:-3])
    assert replay(tmp_path) == 0
    assert capsys.readouterr().out == f"{len(EVENTS) - 1} decisions, replayed identically\n"


def test_first_difference_is_printed_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = decide(tmp_path)
    text = log.read_bytes()
    assert text.count(b'"s0p3 died"') == 1
    log.write_bytes(text.replace(b'"s0p3 died"', b'"s0p3 slept"'))
    assert replay(tmp_path) == 1
    out = capsys.readouterr().out
    assert f"{log}: replayed differently" in out
    assert "line 13: Dead" in out
    assert "s0p3 slept" in out
    assert "s0p3 died" in out


def test_removed_event_makes_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = decide(tmp_path)
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:5] + lines[6:]))  # the first Ready
    assert replay(log) == 1
    assert "replayed differently\nline 6: Ready" in capsys.readouterr().out


def refusal(source: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert replay(source) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "expected: " in captured.err
    assert "fix: " in captured.err
    return captured.err


def test_missing_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(tmp_path / "gone") in refusal(tmp_path / "gone", capsys)


def test_a_run_without_a_scheduler_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    error = refusal(tmp_path, capsys)
    assert f"{tmp_path}: no {LOG_NAME}" in error
    assert "--sync age" in error


def test_worker_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decide(write_run(tmp_path))
    events = merge(tmp_path)
    error = refusal(events, capsys)
    assert f"{events} is a worker's event log" in error
    assert f"folder: {tmp_path}\n" in error
    error = refusal(events.rename(tmp_path / "mine.jsonl"), capsys)
    assert "is a worker's event log" in error, "detected by its content, not by its name"
    of_worker = next((write_run(tmp_path / "running") / "workers").iterdir())
    error = refusal(of_worker, capsys)
    assert f"folder: {tmp_path / 'running'}\n" in error


def test_folder_of_runs_suggests_the_newest_with_a_scheduler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("demo-1", "demo-2"):
        decide(tmp_path / name)
    write_run(tmp_path / "demo-3")
    assert f": {tmp_path / 'demo-2'}" in refusal(tmp_path, capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"nonsense\n", "is no log: it starts with 'nonsense'"),
        (b"\x00\xff\x00\n", "is no log"),
        (b"[1, 2]\n", "is no log"),
        (b'{\n "schema": 2,\n "layers_per_stage": [2]\n}\n', "is a plan with schema, layers_per"),
        (b'{"name": "x", "kill": []}\n', "is JSON with name, kill, ..."),
        (b"{}\n", "is JSON with no keys"),
        (b'{"schema":9,"polyrhythm":"9.9","setup":{}}\n', "schema 9, by polyrhythm 9.9"),
        (b'{"schema":1,"polyrhythm":"0.1","setup":{}}\n', "schema 1, by polyrhythm 0.1"),
        (b'{"schema":2,"polyrhythm":"0.2","setup":{}}\n', "schema 2, by polyrhythm 0.2"),
        (b'{"schema":4,"polyrhythm":"0.2","setup":{}}\n', "schema 4, by polyrhythm 0.2"),
        (b'{"schema":5,"polyrhythm":"1","log":"scheduler","setup":{"policy":"age"}}\n', "num_stag"),
    ],
)
def test_invalid_logs_and_other_versions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    (tmp_path / LOG_NAME).write_bytes(content)
    assert message in refusal(tmp_path, capsys)
    assert message in refusal(tmp_path / LOG_NAME, capsys)


def test_a_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = decide(tmp_path)
    with log.open("ab") as file:
        file.write(b"garbage\n")
    assert f"{log}: line {len(EVENTS) + 2}: " in refusal(tmp_path, capsys)


def test_a_run_with_several_schedulers_replays_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = decide(tmp_path).rename(tmp_path / "scheduler-2.jsonl")
    decide(tmp_path)
    assert replay(tmp_path) == 0
    assert capsys.readouterr().out == f"{2 * len(EVENTS)} decisions, replayed identically\n"
    later.write_bytes(later.read_bytes().replace(b'"s0p3 died"', b'"s0p3 slept"'))
    assert replay(tmp_path) == 1
    assert f"{later}: replayed differently" in capsys.readouterr().out

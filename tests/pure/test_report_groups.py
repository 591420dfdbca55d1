"""`polyrhythm report` of groups: from the workers' logs, and from the decision log."""

from pathlib import Path

import pytest

from polyrhythm import cli
from polyrhythm.events import worker_log
from polyrhythm.observe.decisions import Decisions
from polyrhythm.sinks.jsonl import EventLog, merge
from polyrhythm.sync.decision_log import LOG_NAME, DecisionLog
from polyrhythm.sync.protocol import Commit, Event, Join, Leave, Skip
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Worker
from tests.pure.decision_cases import EVENTS, SETUP, WORKERS, decide, write_run


def report(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["report", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_groups_and_lost_peers_of_each_worker_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    assert report(tmp_path) == 0
    output = capsys.readouterr().out
    shown = [line.split() for line in output.splitlines()]
    after = shown.index(["groups"])
    assert shown[after + 1 :][:1] == [["worker", "averages", "mean", "size", "failed"]]
    assert ["s0p0", "2", "2.50", "1"] in shown
    assert ["s0p1", "2", "2.50", "0"] in shown
    assert ["s0p2", "1", "3.00", "2"] in shown
    assert "2 groups of 2.50 workers on average" in output
    assert "averages that failed: 3, lost s0p3 (2), s0p1 (1)" in output
    merge(tmp_path)
    assert report(tmp_path) == 0
    assert capsys.readouterr().out == output


def test_run_without_averages_reports_no_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EventLog(worker_log(tmp_path, WORKERS[0]), WORKERS[0]) as log:
        log.write("step", start=log.now(), step=0)
    assert report(tmp_path) == 0
    assert "group" not in capsys.readouterr().out


def test_scheduler_decisions_are_reported_with_reasons_and_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decide(tmp_path)
    assert report(tmp_path) == 0
    out = capsys.readouterr().out.splitlines()
    title = "partial_reduce every=1 seed=0 group_size=2, 1 stages x 4 pipelines"
    assert out[0] == f"scheduler  {title}: {len(EVENTS)} decisions"
    assert "groups     1 averaged, 1 aborted: s0p3 died (1)" in out
    assert "died       s0p3 after 12.3 s, s0p1 after 15.0 s" in out
    assert "left       s0p2 after 13.0 s, s0p0 after 14.0 s" in out
    assert not any(line.startswith("steps") for line in out), "there is no run here"


def test_repeated_command_is_counted_once() -> None:
    scheduler = SETUP.scheduler()
    commands = [command for event in EVENTS for command in scheduler.step(event)]
    assert sum(isinstance(command, Commit) for command in commands) == 2, "of one group"


def test_only_failed_averages_count_as_missed() -> None:
    skips = [Skip(WORKERS[0], 1, "alone", failed=True), Skip(WORKERS[1], 1, "alone")]
    assert dict(Decisions.of([(EVENTS[0], skips)]).unaveraged) == {"s0p0": 1}


def test_run_with_both_logs_reports_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decide(write_run(tmp_path))
    assert report(tmp_path) == 0
    shown = lines(capsys)
    assert ["steps", "1"] in shown
    assert ["s0p0", "2", "2.50", "1"] in shown
    assert any(line[:3] == ["groups", "1", "averaged,"] for line in shown)


def test_many_workers_that_left_are_summarised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = Setup(policy="all_reduce", num_stages=1, num_pipelines=20)
    scheduler = setup.scheduler()
    log = DecisionLog(tmp_path / LOG_NAME, setup, scheduler)
    workers = [Worker(0, pipeline) for pipeline in range(20)]
    joins: list[Event] = [Join(worker, "node", 0, 1, 5.0) for worker in workers]
    for event in [*joins, *(Leave(w, 1, 10.0 + w.pipeline) for w in workers)]:
        log.add(event, scheduler.step(event))
    log.close()
    assert report(tmp_path) == 0
    summary = "left       20 workers, from s0p0 after 5.0 s to s0p19 after 24.0 s"
    assert summary in capsys.readouterr().out


def test_no_run_to_trace_and_no_log_to_report_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decide(tmp_path / "decided")
    assert report(tmp_path / "decided", "--trace", tmp_path / "trace.json") == 2
    assert "events.jsonl: No such file" in capsys.readouterr().err
    (tmp_path / "decided" / LOG_NAME).write_text("nonsense\n")
    assert report(tmp_path / "decided") == 2
    assert "expected: a decision log" in capsys.readouterr().err

"""`polyrhythm report`: its output for finished and running jobs, and refused input."""

import json
from pathlib import Path

import pytest

from polyrhythm import cli
from polyrhythm.events import Event, Value, merged_log, worker_log
from polyrhythm.sinks.jsonl import EventLog, merge
from polyrhythm.types import Worker

WORKERS = [Worker(stage, pipeline) for stage in range(2) for pipeline in range(2)]
SWITCH = "bounded:3,1"


def write_step(log: EventLog, step: int, *, finished: bool = True) -> None:
    """Write a step of 10 s: 4 s compute, 2 s wait, 1 s sync; the loss is 5 - step + pipeline."""
    worker = log.worker
    assert worker is not None

    def add(kind: str, at: float, lasts: float, name: str | None = None, **values: Value) -> None:
        time = 1000.0 + 10 * step + at
        log.append(
            Event(
                kind=kind,
                time=time,
                duration=lasts,
                worker=worker,
                step=step,
                name=name,
                values=values,
            )
        )

    add("action", 0, 3, "F0", wait=1.0)
    add("action", 3, 3, "B0", wait=1.0)
    if finished:
        add("sync", 6, 1, "all_reduce")
        loss: dict[str, Value] = {"loss": 5.0 - step + worker.pipeline}
        add("step", 0, 10, None, **(loss if worker.stage else {}))


def write_run(run: Path, *, steps: int = 3, cut_off: bool = False) -> Path:
    for worker in WORKERS:
        with EventLog(worker_log(run, worker), worker) as log:
            if worker == WORKERS[0]:
                log.write("run", name="demo", values={"steps": 8})
            for step in range(steps):
                write_step(log, step)
            log.write("plan", step=1, name=SWITCH, why="the link is slow", values={"switched": 1})
            log.write("plan", step=2, name=SWITCH, why="2% is noise", values={"switched": 0})
            if cut_off:
                write_step(log, steps, finished=False)
    return run


def report(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["report", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_table_shows_steps_step_time_and_time_by_activity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(write_run(tmp_path)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["steps", "3", "of", "8"] in lines
    assert ["step", "time", "10000.0", "ms", "(median)"] in lines
    assert ["loss", "5.500", "first,", "3.500", "last"] in lines  # mean of both pipelines
    rows = [line for line in lines if line[:1] and line[0] in map(str, WORKERS)]
    assert [row[0] for row in rows] == ["s0p0", "s1p0", "s0p1", "s1p1"]
    assert all(row[1:] == ["3", "10000.0", "ms", "40%", "20%", "10%", "30%"] for row in rows)


def test_unequal_step_counts_are_reported_as_a_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for worker, made in zip(WORKERS, (11, 9, 5, 7), strict=True):
        with EventLog(worker_log(tmp_path, worker), worker) as log:
            log.write("run", name="demo", values={"steps": 8})
            for step in range(made):
                write_step(log, step)
    assert report(tmp_path) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "steps      5 to 11 a worker, 8 planned on average"


def test_plan_switch_is_reported_once_with_step_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(write_run(tmp_path)) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert lines.count(["1", SWITCH, "the", "link", "is", "slow"]) == 1
    assert "noise" not in out
    assert "decisions to keep the plan: 1" in out


def test_running_killed_torn_and_finished_runs_get_the_same_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def out(run: Path) -> str:
        assert report(run) == 0
        return capsys.readouterr().out

    whole = out(write_run(tmp_path / "whole"))
    going = write_run(tmp_path / "going", cut_off=True)
    assert out(going) == whole  # a step counts when it is finished
    with worker_log(going, WORKERS[3]).open("ab") as log:
        log.write(b'{"kind":"step","time":1030.0,"wor')
    assert out(going) == whole
    merge(going)
    assert merged_log(going).exists()
    assert out(going) == whole


def test_a_run_without_a_finished_step_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(write_run(tmp_path, steps=0, cut_off=True)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["steps", "0", "of", "8"] in lines
    assert ["s0p0", "0", "-", "-", "-", "-", "-"] in lines


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), "none"])
def test_nan_loss_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: Value
) -> None:
    with EventLog(worker_log(tmp_path, WORKERS[0]), WORKERS[0]) as log:
        log.write("step", start=log.now(), step=0, values={"loss": loss})
    assert report(tmp_path) == 0
    assert f"{'inf' if loss == float('inf') else 'nan'} last" in capsys.readouterr().out


def test_folder_without_a_run_is_refused_with_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for nothing in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        assert report(nothing) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {nothing}")
        assert "fix:" in error
    for name in ("demo-1", "demo-2"):
        write_run(tmp_path / name)
    merge(tmp_path / "demo-1")
    assert report(tmp_path) == 2
    assert f": {tmp_path / 'demo-2'}\n" in capsys.readouterr().err


def test_the_trace_is_written_the_same_before_and_after_the_logs_are_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", cut_off=True)
    traces = tmp_path / "going.json", tmp_path / "over.json"
    assert report(run, "--trace", traces[0]) == 0
    merge(run)
    assert report(run, "--trace", traces[1]) == 0
    assert traces[0].read_bytes() == traces[1].read_bytes()
    drawn = json.loads(traces[0].read_bytes())["traceEvents"]
    assert {e["args"]["name"] for e in drawn if e["name"] == "process_name"} == set(
        map(str, WORKERS)
    )
    slices = sum(e["ph"] == "X" for e in drawn)
    assert slices == 4 * (3 * 6 + 4)
    out = capsys.readouterr().out
    assert f"{traces[0]}: {slices} slices, 0 arrows" in out
    assert "ui.perfetto.dev" in out


def test_trace_shows_instants_and_unknown_kinds_with_their_reason(tmp_path: Path) -> None:
    with EventLog(worker_log(tmp_path, WORKERS[0]), WORKERS[0]) as log:
        log.write("plan", name=SWITCH, why="memory", values={"switched": 1})
        log.write("plan", name=SWITCH, why="2% is noise", values={"switched": 0})
        log.write("fire drill", name="north wing", why="monthly")
        log.write("fire drill", start=log.now(), name="south wing", why="late")
    EventLog(tmp_path / "workers" / "scheduler.jsonl").write("plan", name="1f1b", why="start")
    assert report(tmp_path, "--trace", tmp_path / "trace.json") == 0
    drawn = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    workers = {e["pid"]: e["args"]["name"] for e in drawn if e["name"] == "process_name"}
    shown = {(e["ph"], workers[e["pid"]], e["name"], e["args"]["why"]) for e in drawn if "ts" in e}
    assert shown == {
        ("i", "s0p0", f"plan {SWITCH}", "memory"),
        ("i", "s0p0", f"stay with {SWITCH}", "2% is noise"),
        ("i", "s0p0", "fire drill north wing", "monthly"),
        ("X", "s0p0", "fire drill south wing", "late"),
        ("i", "run", "plan 1f1b", "start"),
    }


def test_a_torn_log_gives_the_trace_of_all_but_its_last_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", cut_off=True)
    traces = tmp_path / "whole.json", tmp_path / "torn.json"
    assert report(run, "--trace", traces[0]) == 0
    log = worker_log(run, WORKERS[1])
    log.write_bytes(log.read_bytes()[:-7])
    assert report(run, "--trace", traces[1]) == 0
    whole, torn = (
        {json.dumps(e) for e in json.loads(path.read_bytes())["traceEvents"]} for path in traces
    )
    assert torn < whole
    assert sorted(json.loads(e)["name"] for e in whole - torn) == ["B0", "wait for B0"]


def test_a_trace_that_cannot_be_written_is_refused_and_no_log_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path)
    merge(run)
    before = merged_log(run).read_bytes()
    for path in (merged_log(run), tmp_path / "nowhere" / "trace.json", tmp_path):
        assert report(run, "--trace", path) == 2
        error = capsys.readouterr().err
        assert str(path) in error
        assert "fix:" in error
    assert merged_log(run).read_bytes() == before


def test_sync_mode_switches_are_reported_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EventLog(worker_log(tmp_path, WORKERS[0]), WORKERS[0]) as log:
        write_step(log, 0)
        log.write("sync_mode", step=20, name="adaptive", why="waiting costs 40%")
    assert report(tmp_path) == 0
    out = capsys.readouterr().out
    assert ["step", "sync", "mode", "why"] in [line.split() for line in out.splitlines()]
    [row] = [line for line in out.splitlines() if "adaptive" in line]
    assert row.split()[0] == "20"
    assert "waiting costs 40%" in row

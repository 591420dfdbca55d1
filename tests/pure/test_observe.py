"""Progress and report show the events of the log, during the run and after it."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from polyrhythm.events import Event, worker_log
from polyrhythm.observe.report import RunReport
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.sinks.progress import RunProgress
from polyrhythm.types import Worker


def console(*, terminal: bool) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=100)


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def step_event(pipeline: int, step: int, loss: float = 2.0) -> Event:
    """Return a step of 1 s with 100 samples."""
    return Event(
        kind="step",
        time=1000.0 + step,
        duration=1.0,
        worker=Worker(1, pipeline),
        step=step,
        values={"loss": loss, "samples": 100},
    )


def append(logs: list[EventLog], step: int) -> None:
    for pipeline, log in enumerate(logs):
        log.append(step_event(pipeline, step))


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_follows_the_logs_of_all_pipelines(tmp_path: Path, terminal: bool) -> None:
    logs = [EventLog(worker_log(tmp_path, Worker(1, p))) for p in range(2)]
    screen = console(terminal=terminal)
    with RunProgress(tmp_path, num_steps=10, num_pipelines=2, console=screen) as progress:
        for step in range(10):
            append(logs, step)
            progress.update()
    for log in logs:
        log.close()
    text = printed(screen)
    if terminal:
        assert "10/10" in text
        assert text.count("2.000") >= 20
        assert "100" in text.split("samples/s")[-1]
    else:
        assert len(text.splitlines()) == 10
        assert text.splitlines()[-1] == "step   10/10  loss 2.000  samples/s p0 100  p1 100"


def test_progress_line_shows_the_loss_of_its_step(tmp_path: Path) -> None:
    screen = console(terminal=False)
    logs = [EventLog(worker_log(tmp_path, Worker(1, p))) for p in range(2)]
    with RunProgress(tmp_path, num_steps=3, num_pipelines=2, console=screen) as progress:
        for step in range(3):  # one pipeline is ahead of the other
            logs[0].append(step_event(0, step, loss=10.0 - step))
        progress.update()
        assert printed(screen) == "", "the other has done nothing yet"
        for step in range(3):
            logs[1].append(step_event(1, step, loss=8.0 - step))
            progress.update()
    for log in logs:
        log.close()
    assert [line.split()[3] for line in printed(screen).splitlines()] == ["9.000", "8.000", "7.000"]


def test_plain_progress_of_a_long_run_stays_short_and_ends_with_the_last_step(
    tmp_path: Path,
) -> None:
    screen = console(terminal=False)
    with (
        EventLog(worker_log(tmp_path, Worker(1, 0))) as log,
        RunProgress(tmp_path, num_steps=1003, num_pipelines=1, console=screen) as progress,
    ):
        for step in range(1003):
            append([log], step)
            progress.update()
    lines = printed(screen).splitlines()
    assert 20 <= len(lines) <= 22
    assert lines[-1].startswith("step 1003/1003")


def test_progress_of_a_run_that_never_starts_prints_nothing(tmp_path: Path) -> None:
    screen = console(terminal=False)
    with RunProgress(tmp_path, num_steps=3, num_pipelines=1, console=screen) as progress:
        progress.update()
    assert printed(screen) == ""


def test_the_report_adds_up_to_the_time_of_the_steps() -> None:
    worker = Worker(0, 0)
    events = [
        Event(kind="action", time=0.0, duration=3.0, worker=worker, step=0, values={"wait": 1.0}),
        Event(kind="action", time=3.0, duration=2.0, worker=worker, step=0, values={"wait": 0.5}),
        Event(kind="sync", time=5.0, duration=3.0, worker=worker, step=0),
        Event(kind="step", time=0.0, duration=10.0, worker=worker, step=0),
    ]
    spent = RunReport.of(events).workers[worker]
    assert (spent.compute, spent.wait, spent.sync, spent.other) == (3.5, 1.5, 3.0, 2.0)
    assert spent.compute + spent.wait + spent.sync + spent.other == spent.total


def test_report_shows_first_and_last_loss() -> None:
    events = [step_event(p, step, loss=5.0 - step / 10) for step in range(40) for p in range(2)]
    screen = console(terminal=False)
    RunReport.of(events).show(screen)
    assert "loss       5.000 first, 1.150 over the last 2 steps" in printed(screen)
    assert "8,000 samples in 40.0 s: 200 samples/s" in printed(screen)


def test_report_of_an_empty_run_reports_no_step() -> None:
    screen = console(terminal=False)
    RunReport.of([]).show(screen)
    assert printed(screen) == "steps      0\n"


def test_progress_of_a_trainer_counts_global_steps_and_samples(tmp_path: Path) -> None:
    screen = console(terminal=False)
    logs = [EventLog(worker_log(tmp_path, Worker(1, p)), Worker(1, p)) for p in range(2)]
    with RunProgress(tmp_path, num_steps=4, num_pipelines=2, console=screen):
        for step in range(4):  # in groups, each pipeline trains on some of the global batches
            log, start = logs[step % 2], 1000.0 + step
            values = {"loss": 1.0 + step, "samples": 8, "global_step": step}
            log.write("step", start=start, end=start + 1, step=step // 2, values=values)
            log.flush()
    for log in logs:
        log.close()
    assert printed(screen) == "step    3/4  loss 3.500  samples/s p0 4  p1 4\n"

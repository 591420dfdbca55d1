"""Loggers, read back with the readers of their packages; and the progress line of a fit."""

import importlib
import io
import json
import logging
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polyrhythm.errors import LaunchError
from polyrhythm.sinks import progress
from polyrhythm.sinks.metrics import (
    JsonLines,
    MLflow,
    PipelineStep,
    StepInfo,
    TensorBoard,
    WandB,
    WorkerStep,
)
from polyrhythm.sinks.progress import FitProgress

ROWS = [{"loss": 2.5, "learning_rate": 0.125}, {"loss": math.nan, "learning_rate": 0.0625}]


def step_info(step: int, *, num_pipelines: int = 2, **values: Any) -> StepInfo:
    pipelines = tuple(
        PipelineStep(
            pipeline=number,
            num_samples=16,
            loss=2.0,
            num_labels=16.0,
            seconds=0.5,
            waited=0.0 if number else 0.3,
        )
        for number in range(num_pipelines)
    )
    defaults: dict[str, Any] = {
        "loss": 2.0,
        "num_labels": 32.0,
        "num_samples": 16 * num_pipelines,
        "num_tokens": 3200,
        "learning_rate": 3e-4,
        "grad_norm": 1.5,
        "seconds": 0.5,
        "peak_memory": 3 * 2**30,
        "pipelines": pipelines,
        "own": WorkerStep(num_samples=16, seconds=0.5, end=0.0, peak_memory=0),
    }
    return StepInfo(step=step, **defaults | values)


def test_json_lines_continue_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    for first in (0, 2):
        log = JsonLines(path)
        for step, values in enumerate(ROWS, start=first):
            log.log(step, values)
        log.close()
        with path.open("a") as file:
            file.write('{"step": 9, "lo')
    *lines, _torn = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[2] == {"step": 2, "loss": 2.5, "learning_rate": 0.125}
    assert rows[3]["loss"] == "nan"


def test_tensorboard_reads_what_its_logger_writes(tmp_path: Path) -> None:
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoard(tmp_path / "board")
    assert not (tmp_path / "board").exists(), "only the process that logs opens a file"
    for step, values in enumerate(ROWS):
        logger.log(step, values)
    logger.close()
    events = accumulator.EventAccumulator(str(tmp_path / "board")).Reload()
    for name in ROWS[0]:
        assert [event.step for event in events.Scalars(name)] == [0, 1]
        found = [event.value for event in events.Scalars(name)]
        assert found == pytest.approx([values[name] for values in ROWS], nan_ok=True)


@pytest.mark.long  # its import takes 20 s
@pytest.mark.filterwarnings("ignore")  # mlflow uses deprecated parts of SQLAlchemy
def test_mlflow_reads_what_its_logger_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    logger = MLflow(tracking_uri=uri, run_name="mine")
    for step, values in enumerate(ROWS):
        logger.log(step, values)
    logger.close()
    client = mlflow.MlflowClient(uri)
    [run] = client.search_runs(["0"])
    history = client.get_metric_history(run.info.run_id, "learning_rate")
    assert [(each.step, each.value) for each in history] == [(0, 0.125), (1, 0.0625)]


def test_wandb_gets_one_run_with_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end")
    )
    package = types.ModuleType("wandb")
    package.init = lambda **options: calls.append(options) or run  # type: ignore[attr-defined]
    package.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "wandb", package)
    logger = WandB(project="mine")
    for step, values in enumerate(ROWS):
        logger.log(step, values)
    logger.close()
    assert calls == [{"project": "mine"}, (0, ROWS[0]), (1, ROWS[1]), "end"]


def test_a_logger_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for make, package in ((lambda: TensorBoard("x"), "tensorboard"), (WandB, "wandb")):
        with pytest.raises(LaunchError, match=f"pip install {package}"):
            make()
    with pytest.raises(LaunchError, match="pip install mlflow"):
        MLflow()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    fake = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(progress, "time", fake)
    return now


def test_without_a_terminal_a_line_is_printed_every_five_seconds(clock: list[float]) -> None:
    text = io.StringIO()
    line = FitProgress(100, 200, Console(file=text, soft_wrap=True))
    for step in range(100, 120):
        clock[0] += 1.0
        line.update(step_info(step))
    line.close()
    lines = text.getvalue().splitlines()
    assert [each.split("  ")[0] for each in lines] == [
        f"step {s}/200" for s in (105, 110, 115, 120)
    ]
    assert lines[0] == (
        "step 105/200  loss 2  64 samples/s  6,400 tokens/s  ETA 0:01:35  lr 0.0003  "
        "grad norm 1.5  p0 80/s p1 32/s  3.0 GiB"
    )


def test_speed_is_that_of_several_steps(clock: list[float]) -> None:
    """The last steps of a fit whose data was read ahead take no time."""
    text = io.StringIO()
    line = FitProgress(0, 20, Console(file=text, soft_wrap=True))
    for step in range(18):
        clock[0] += 1.0
        line.update(step_info(step))
    quick = PipelineStep(
        pipeline=0, num_samples=16, loss=2.0, num_labels=16.0, seconds=1e-4, waited=0.0
    )
    line.update(step_info(18, pipelines=(quick,), num_samples=16))
    line.close()
    assert "  66 samples/s  " in text.getvalue().splitlines()[-1]  # 19 * 32 - 16 in 9.0001 s


def test_many_pipelines_show_the_slowest_and_the_fastest(clock: list[float]) -> None:
    text = io.StringIO()
    line = FitProgress(0, 1, Console(file=text, soft_wrap=True))
    line.update(step_info(0, num_pipelines=6, loss=None, num_tokens=None))
    line.close()
    assert "loss -  " in text.getvalue()
    assert "tokens" not in text.getvalue()
    assert "  p1 32/s p0 80/s  3.0 GiB\n" in text.getvalue()


def test_a_terminal_redraws_one_line_and_keeps_log_messages_whole(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    handler = logging.StreamHandler(screen)  # made before: it has the stream itself
    logger = logging.getLogger("polyrhythm.test_metrics")
    logger.addHandler(handler)
    try:
        stdout = sys.stdout
        line = FitProgress(0, 100, Console(file=screen, force_terminal=True, width=120))
        assert sys.stdout is stdout, "what goes to a file does not go to the terminal instead"
        for step in range(40):
            clock[0] += 0.1
            line.update(step_info(step))
            if step == 20:
                logger.warning("a message")
        line.close()
    finally:
        logger.removeHandler(handler)
    text = screen.getvalue()
    assert handler.stream is screen
    assert 7 <= text.count("step ") <= 12, "twice a second, and below the message"
    assert "step 40/100" in text
    before, after = text.split("a message\n")
    assert before.endswith(("\r", "\x1b[2K")), "the line is erased before the message"
    assert after.lstrip("\x1b[K\r2").startswith("step "), "and drawn again below it"

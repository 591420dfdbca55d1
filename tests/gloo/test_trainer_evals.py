"""Evaluations during fit: on every worker those of one process, without a trace in training."""

import json
import math
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import polyrhythm as pr
from polyrhythm.cli import main
from polyrhythm.errors import LaunchError
from polyrhythm.run.checkpoint.folder import list_steps
from polyrhythm.run.checkpoint.manifest import CheckpointError, Evaluation
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.trainer_jobs import BATCH, NUM_SAMPLES, plan_of, run_job, samples, trainer

EVERY, STEPS = 3, 7


def held_out() -> TensorDataset:
    inputs = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :4])


def largest_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().amax(dim=1).mean()


def share_above(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output > target).sum(), target.numel()


class Calls(pr.Callback):
    def __init__(self) -> None:
        self.evals: list[tuple[int, dict[str, float]]] = []
        self.checkpoints: list[tuple[int, str]] = []

    def on_eval(self, step: int, values: Mapping[str, float]) -> None:
        self.evals.append((step, dict(values)))

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.checkpoints.append((step, str(path)))


def fit_and_evaluate(folder: Path, num_stages: int, num_pipelines: int, sync: str) -> list[Any]:
    """Return the losses, evaluations and calls of each rank."""

    def work(ctx: DistContext | None) -> Any:
        from tests.gloo.torchmetrics_cases import cases  # takes seconds

        calls = Calls()
        metrics = {"largest": largest_error, "share": share_above, **cases()}
        with trainer(plan_of(num_stages, num_pipelines), sync=sync) as made:
            fitted = made.fit(
                max_steps=STEPS,
                eval_dataset=held_out(),
                eval_every=EVERY,
                metrics=metrics,
                callbacks=[calls],
            )
            assert list(fitted.evals) == calls.evals
            assert made.model.training
            last = made.evaluate(held_out(), metrics=metrics)
            assert last["eval_loss"] == made.evaluate(held_out())
            assert fitted.num_samples == STEPS * BATCH
            return list(fitted.losses), calls.evals, last

    return run_job(num_stages * num_pipelines, work, folder)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fit_and_evaluate(tmp_path_factory.mktemp("one"), 1, 1, "decoupled")[0]


@pytest.mark.parametrize(
    ("num_stages", "num_pipelines", "sync"),
    [(2, 1, "decoupled"), (1, 2, "decoupled"), (2, 2, "decoupled"), (1, 3, "balanced")],
)
def test_evaluations_equal_those_of_one_process(
    tmp_path: Path, one_process: Any, num_stages: int, num_pipelines: int, sync: str
) -> None:
    losses, expected, last = one_process
    assert [step for step, _ in expected] == [3, 6, 7]
    assert last == expected[-1][1]
    found = fit_and_evaluate(tmp_path, num_stages, num_pipelines, sync)
    for own_losses, evals, own_last in found:
        assert evals == found[0][1]
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert [step for step, _ in evals] == [3, 6, 7]
        for (_, values), (_, alone) in zip(evals, expected, strict=True):
            assert values == pytest.approx(alone, rel=1e-4)
            assert (values["share"], values["above"]) == (alone["share"], alone["above"])
        assert own_last == pytest.approx(evals[-1][1], rel=1e-6)


@pytest.mark.parametrize("sync", ["age", "static"])
def test_in_groups_all_replicas_average_before_an_evaluation(tmp_path: Path, sync: str) -> None:
    first, second = fit_and_evaluate(tmp_path, 1, 2, sync)
    assert first[1:] == second[1:]  # also of the last one, after the phase
    assert [step for step, _ in first[1]] == [3, 6, 7]
    # Sums may have another order; the mean of outputs is close to 0, with outputs of about 1.
    assert first[2] == pytest.approx(first[1][-1][1], rel=1e-6, abs=1e-7)


class DrawingDataset(Dataset[Any]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + float(np.random.rand())
        return torch.randn(8) + noise, torch.zeros(4)


def test_an_evaluation_leaves_no_trace_in_training(tmp_path: Path) -> None:
    def drawing_metric(output: Tensor, target: Tensor) -> float:
        return float(torch.rand(())) + random.random() + float(np.random.rand())

    def losses(*, seed_dropout: bool, **options: Any) -> tuple[float, ...]:
        torch.manual_seed(3)
        with pr.Trainer(
            lambda: nn.Sequential(
                nn.Linear(8, 16), nn.Dropout(), nn.BatchNorm1d(16), nn.Linear(16, 4)
            ),
            mse_loss,
            partial(torch.optim.AdamW, lr=1e-2),
            samples(),
            batch_size=BATCH,
            microbatch_size=8,
            data=pr.DataConfig(seed_dropout=seed_dropout),
        ) as made:
            return made.fit(max_steps=6, **options).losses

    for seed_dropout in (True, False):
        plain = losses(seed_dropout=seed_dropout)
        metrics = {"draws": drawing_metric}
        options: Any = {"eval_dataset": DrawingDataset(), "eval_every": 2, "metrics": metrics}
        assert losses(seed_dropout=seed_dropout, **options) == plain


@pytest.mark.parametrize(("num_pipelines", "sync"), [(2, "decoupled"), (2, "age")])
def test_a_callback_of_one_worker_stops_all_after_the_evaluation(
    tmp_path: Path, num_pipelines: int, sync: str
) -> None:
    class Stop(pr.Callback):
        def on_eval(self, step: int, values: Mapping[str, float]) -> object:
            return pr.STOP if step >= 2 * EVERY else None

    def work(ctx: DistContext | None) -> Any:
        callbacks = [Stop()] if ctx is not None and ctx.rank == 1 else []
        with trainer(plan_of(1, num_pipelines), sync=sync) as made:
            fitted = made.fit(
                max_steps=100, eval_dataset=held_out(), eval_every=EVERY, callbacks=callbacks
            )
            return made.global_step, [step for step, _ in fitted.evals]

    assert run_job(2, work, tmp_path) == [(2 * EVERY, [EVERY, 2 * EVERY])] * 2


def test_early_stopping_counts_evaluations_without_an_improvement() -> None:
    stop, values = pr.EarlyStopping(patience=2), [3.0, 2.0, 2.0, 1.0, math.nan, 1.5]
    answers = [stop.on_eval(step, {"eval_loss": value}) for step, value in enumerate(values)]
    assert answers == [None] * 5 + [pr.STOP]
    assert stop.best == 1.0
    rising = pr.EarlyStopping("accuracy", patience=1, min_delta=0.1, mode="max")
    answers = [rising.on_eval(0, {"accuracy": value}) for value in (0.1, 0.3, 0.35)]
    assert answers == [None, None, pr.STOP]


class Scores:
    """A metric with a given value for each evaluation, whichever worker computes it."""

    def __init__(self, values: list[float]) -> None:
        self._values = values

    def metric(self, output: Tensor, target: Tensor) -> float:
        return self._values[0]

    def on_eval(self, step: int, values: Mapping[str, float]) -> None:
        assert values["score"] == pytest.approx(self._values.pop(0), nan_ok=True)


def fit_with_scores(
    folder: Path, values: list[float], *, start: int, mode: str = "max", restored: str | None = None
) -> list[Any]:
    """Evaluate every second step, save every fourth; return the restored step and checkpoints."""
    checkpoint = pr.CheckpointConfig(every=4, keep_last=1, keep_best="score", best_mode=mode)

    def work(ctx: DistContext | None) -> Any:
        scores, calls = Scores(list(values)), Calls()
        with trainer(plan_of(2, 2), run_dir=folder / "run", checkpoint=checkpoint) as made:
            step = made.restore(restored)
            made.fit(
                max_steps=start + 2 * len(values),
                eval_dataset=held_out(),
                eval_every=2,
                metrics={"score": scores.metric},
                callbacks=[scores, calls],
            )
            return step, calls.checkpoints

    return run_job(4, work, folder / "job")


@pytest.mark.long
def test_the_best_checkpoint_stays_and_can_be_restored(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for step, calls in fit_with_scores(tmp_path, [1.0, 3.0, 2.0, math.nan], start=0):
        assert step == 0
        # Steps 2 and 4 were the best, 4 was due, too, and 8 is the last.
        assert [saved for saved, _ in calls] == [2, 4, 8]
    assert list(list_steps(folder)) == [4, 8]
    # After a restart the value on disk still counts; 10 is worse.
    for step, _ in fit_with_scores(tmp_path, [2.5], start=8):
        assert step == 8
    assert list(list_steps(folder)) == [4, 10]
    with pytest.raises(SystemExit, match="0"):
        main(["export", str(tmp_path / "run"), "--step", "best"])
    assert (tmp_path / "run" / "export" / "step-00000004" / "model.safetensors").is_file()
    with trainer(plan_of(1, 1), run_dir=tmp_path / "run") as made:
        assert made.restore("best") == 4
        assert made.fit(max_steps=5).losses
    assert [step for step, _ in fit_with_scores(tmp_path, [4.0], start=4, restored="best")] == [
        4
    ] * 4
    assert list(list_steps(folder)) == [6]


def test_restore_best_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    with trainer(plan_of(1, 1), run_dir=tmp_path / "run") as made:
        made.fit(max_steps=1)
        made.save()
        with pytest.raises(
            CheckpointError, match=r"no checkpoint with an evaluation[^$]*keep_best"
        ):
            made.restore("best")
        assert made.restore() == 1


def test_loggers_metrics_file_and_progress_get_evaluations(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logged: list[tuple[int, dict[str, float]]] = []

    class Log:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            logged.append((step, dict(values)))

        def close(self) -> None: ...

    with trainer(plan_of(1, 1), run_dir=tmp_path) as made:
        fitted = made.fit(
            max_epochs=1,
            eval_dataset=held_out(),
            eval_every=4,
            metrics={"share": share_above},
            callbacks=[Log()],
        )
    assert [(step, values) for step, values in logged if "eval_loss" in values] == list(
        fitted.evals
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row for row in rows if "eval_loss" in row] == [
        {"step": step, **values} for step, values in fitted.evals
    ]
    assert f"eval_loss={fitted.evals[-1][1]['eval_loss']:.4g}, share=" in repr(fitted)
    shown = capfd.readouterr().err.splitlines()[-1]
    assert "step 9/9  epoch 1.08  " in shown
    assert f"eval loss {fitted.evals[-1][1]['eval_loss']:.4g}  " in shown


@pytest.mark.parametrize(("num_pipelines", "sync"), [(1, "decoupled"), (2, "adaptive")])
def test_a_checkpoint_that_is_due_with_an_evaluation_is_saved_once_after_it(
    tmp_path: Path, num_pipelines: int, sync: str
) -> None:
    checkpoint = pr.CheckpointConfig(every=4, keep_last=10, keep_best="score", best_mode="max")

    def work(ctx: DistContext | None) -> list[int]:
        calls, scores = Calls(), Scores([4.0, 3.0, 2.0, 1.0])  # after steps 2, 4, 6 and 7
        plan = plan_of(1, num_pipelines)
        with trainer(plan, run_dir=tmp_path / "run", checkpoint=checkpoint, sync=sync) as made:
            made.fit(
                max_steps=7,
                eval_dataset=held_out(),
                eval_every=2,
                metrics={"score": scores.metric},
                callbacks=[calls, scores],
            )
        return [step for step, _ in calls.checkpoints]

    # Step 2 has the best score, step 7 is the last.
    assert run_job(num_pipelines, work, tmp_path / "job") == [[2, 4, 7]] * num_pipelines
    for step, value in ((4, 3.0), (7, 1.0)):
        path = tmp_path / "run" / "checkpoints" / f"step-{step:08}" / "manifest.json"
        assert json.loads(path.read_text())["extra"][Evaluation.KEY]["value"] == value


def test_epochs_end_when_every_sample_was_used_so_often() -> None:
    def fit(**options: Any) -> int:
        rates: list[float] = []
        with trainer(plan_of(1, 1), lr_schedule=pr.cosine()) as made:
            made.fit(callbacks=[lambda info: rates.append(info.learning_rate)], **options)
            assert rates[-1] == pytest.approx(
                1e-2 / 2 * (1 + math.cos(math.pi * (len(rates) - 1) / len(rates)))
            )
            return made.global_step

    assert fit(max_epochs=1) == math.ceil(NUM_SAMPLES / BATCH)
    assert fit(max_epochs=3) == math.ceil(3 * NUM_SAMPLES / BATCH)
    assert fit(max_epochs=3, max_steps=4) == 4
    assert fit(max_epochs=1, max_steps=40) == 9


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def test_classes_and_collections_of_metrics_are_refused() -> None:
    from tests.gloo.torchmetrics_cases import Above, collection  # takes seconds

    refused: list[tuple[object, str]] = [(Above, "metric 'a'"), (collection(), r"dict\(collection")]
    with trainer(plan_of(1, 1)) as made:
        for metric, text in refused:
            with pytest.raises(LaunchError, match=text):
                made.fit(max_steps=2, eval_dataset=held_out(), metrics={"a": metric})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, r"without max_steps and max_epochs"),
    ({"max_epochs": 1.5}, r"max_epochs=1\.5"),
    ({"max_steps": 2, "eval_every": 1}, r"eval_every=.* without an eval_dataset"),
    ({"max_steps": 2, "metrics": {"a": len}}, r"metrics=.* without an eval_dataset"),
    ({"max_steps": 2, "callbacks": [pr.EarlyStopping()]}, r"EarlyStopping.* without an eval_dat"),
    ({"max_steps": 2, "eval_dataset": held_out(), "eval_every": 0}, r"eval_every=0"),
    ({"max_steps": 2, "eval_dataset": held_out(), "metrics": {"eval_loss": len}}, r"another name"),
    ({"max_steps": 2, "eval_dataset": held_out(), "metrics": {"a": 3}}, r"metric 'a'"),
    (
        {
            "max_steps": 2,
            "eval_dataset": held_out(),
            "callbacks": [pr.EarlyStopping("accuracy", mode="max")],
        },
        r"one of eval_loss",
    ),
    ({"max_steps": 2, "eval_dataset": Stream()}, r"without a length"),
    (
        {"max_steps": 2, "eval_dataset": held_out(), "metrics": {"a": lambda x, y: x}},
        r"'a' returned a tensor of shape",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_bad_arguments_of_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with trainer(plan_of(1, 1)) as made, pytest.raises(LaunchError, match=message):
        made.fit(**options)


def test_epochs_of_a_stream_and_a_best_checkpoint_without_evaluations_are_refused(
    tmp_path: Path,
) -> None:
    refused = r"max_epochs=1\) with an iterable[^$]*max_steps"
    with (
        trainer(plan_of(1, 1), dataset=Stream()) as made,
        pytest.raises(LaunchError, match=refused),
    ):
        made.fit(max_epochs=1)
    best = pr.CheckpointConfig(keep_best="eval_loss")
    made = trainer(plan_of(1, 1), run_dir=tmp_path, checkpoint=best)
    with made, pytest.raises(LaunchError, match=r"keep_best='eval_loss'\) without an eval_dataset"):
        made.fit(max_steps=2)
    with pytest.raises(LaunchError, match="without a run folder"):
        trainer(plan_of(1, 1), checkpoint=best)
    with pytest.raises(LaunchError, match=r"'accuracy' without a mode"):
        pr.CheckpointConfig(keep_best="accuracy")
    with pytest.raises(LaunchError, match="without keep_best"):
        pr.CheckpointConfig(best_mode="max")
    with pytest.raises(LaunchError, match="mode 'most'"):
        pr.EarlyStopping(mode="most")


@pytest.mark.long
def test_an_error_of_one_metric_reaches_all_workers(tmp_path: Path) -> None:
    def fail(output: Tensor, target: Tensor) -> float:
        raise ValueError("an odd output")

    def work(ctx: DistContext | None) -> str:
        with trainer(plan_of(2, 1)) as made:
            try:
                made.fit(max_steps=2, eval_dataset=held_out(), metrics={"bad": fail})
            except Exception as error:
                return str(error)
        return ""

    first, last = run_job(2, work, tmp_path)
    assert first.startswith("lost s1p0")
    assert last == "an odd output"


@pytest.mark.parametrize("rank", [2, 3])  # the stages of the second pipeline
def test_in_groups_stop_just_before_an_evaluation_ends_training_on_all_workers(
    tmp_path: Path, rank: int
) -> None:
    def work(ctx: DistContext) -> list[int]:
        callbacks = [lambda info: pr.STOP] if ctx.rank == rank else []
        with trainer(plan_of(2, 2), sync="age", timeout=10.0) as made:
            fitted = made.fit(
                max_steps=60, eval_dataset=held_out(), eval_every=6, callbacks=callbacks
            )
            return [step for step, _ in fitted.evals]

    first, *others = run_job(4, work, tmp_path)
    assert all(evals == first for evals in others)
    assert first[-1] <= 12


def test_the_first_evaluation_of_another_metric_is_the_best_of_that_metric(tmp_path: Path) -> None:
    for step, metric, mode in ((3, "large", "min"), (6, "small", "max")):
        checkpoint = pr.CheckpointConfig(keep_best=metric, best_mode=mode)
        with trainer(plan_of(1, 1), run_dir=tmp_path, checkpoint=checkpoint) as made:
            made.restore()
            metrics: Any = {"large": lambda x, y: 9.0, "small": lambda x, y: 1.0}
            made.fit(max_steps=step, eval_dataset=held_out(), metrics=metrics)
    assert 6 in list_steps(tmp_path / "checkpoints")

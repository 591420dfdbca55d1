"""Metrics of each step: the same on every worker, equal to those of one process; and callbacks."""

import itertools
import json
import logging
import math
import re
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

from polyrhythm.errors import LaunchError, PeerError, TrainingError
from polyrhythm.events import read_run
from polyrhythm.run.checkpoint.folder import list_steps
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.loss import squared_norm
from polyrhythm.run.trainer import metrics as step_metrics
from polyrhythm.run.trainer.config import CheckpointConfig
from polyrhythm.run.trainer.metrics import (
    STOP,
    Callback,
    HostCopy,
    Measured,
    MeasuredStep,
    MetricGather,
)
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sinks.metrics import StepInfo
from tests.gloo.pipelines import run_stages
from tests.gloo.trainer_jobs import BATCH, plan_of, run_job, trainer
from tests.grids import long_except

STEPS = 5


class Metrics(Callback):
    """Collects every StepInfo."""

    def __init__(self) -> None:
        self.seen: list[StepInfo] = []

    def on_step(self, info: StepInfo) -> None:
        self.seen.append(info)


def fit(folder: Path, num_stages: int, num_pipelines: int, **options: Any) -> list[Any]:
    """Return the metrics of each rank, as dicts."""

    def work(ctx: DistContext | None) -> Any:
        metrics = Metrics()
        with trainer(plan_of(num_stages, num_pipelines), **options) as made:
            fitted = made.fit(max_steps=STEPS, callbacks=[metrics])
        assert fitted.steps == tuple(metrics.seen)
        assert list(fitted.losses) == [info.loss for info in metrics.seen]
        assert fitted.num_samples == STEPS * BATCH
        return msgspec.to_builtins(metrics.seen)

    return run_job(num_stages * num_pipelines, work, folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[float | None, Any]:
    """The metrics of one process, with and without clipping."""
    folder = tmp_path_factory.mktemp("one")
    return {clip: fit(folder, 1, 1, clip_grad_norm=clip)[0] for clip in (None, 0.5)}


CASES = [
    (2, 2, "decoupled", None),
    (2, 2, "decoupled", 0.5),
    (1, 2, "decoupled", None),
    (2, 2, "all_reduce", None),
    (1, 2, "balanced", 0.5),
]


@pytest.mark.parametrize(("num_stages", "num_pipelines", "sync", "clip"), CASES)
def test_metrics_are_global_and_equal_on_all_workers(
    tmp_path: Path,
    expected: dict[float | None, Any],
    num_stages: int,
    num_pipelines: int,
    sync: str,
    clip: float | None,
) -> None:
    found = fit(tmp_path, num_stages, num_pipelines, sync=sync, clip_grad_norm=clip)
    for seen in found:
        for info, first, alone in zip(seen, found[0], expected[clip], strict=True):
            for name in ("step", "num_samples", "num_labels", "num_tokens", "learning_rate"):
                assert info[name] == alone[name]
            for name in ("loss", "grad_norm"):
                assert info[name] == pytest.approx(alone[name], rel=1e-4)
            assert {**info, "own": None} == {**first, "own": None}
            assert [each["pipeline"] for each in info["pipelines"]] == list(range(num_pipelines))
            assert sum(each["num_samples"] for each in info["pipelines"]) == BATCH
            assert 0 < info["own"]["peak_memory"] <= info["peak_memory"]
    last = [seen for rank, seen in enumerate(found) if rank % num_stages == num_stages - 1]
    for step, info in enumerate(found[0]):
        own = [(seen[step]["own"]["loss"], seen[step]["own"]["num_labels"]) for seen in last]
        assert own == [(each["loss"], each["num_labels"]) for each in info["pipelines"]]


def test_tokens_are_counted_and_shown_for_integer_inputs(tmp_path: Path) -> None:
    tokens = torch.arange(48).reshape(12, 4) % 8
    with Trainer(
        lambda: nn.Sequential(nn.Embedding(8, 8)),
        lambda logits, target: cross_entropy(logits.flatten(0, 1), target.flatten()),
        partial(torch.optim.SGD, lr=0.1),
        TensorDataset(tokens, tokens),
        batch_size=6,
        microbatch_size=3,
    ) as made:
        [info] = made.fit(max_steps=1, progress=False).steps
    assert (info.num_tokens, info.num_labels, info.num_samples) == (24, 24, 6)
    assert info.tokens_per_second == pytest.approx(4 * info.samples_per_second)


@pytest.mark.parametrize(
    ("num_stages", "num_pipelines", "sync", "num_late"),
    [(1, 1, "decoupled", 0), (2, 2, "decoupled", 2), (1, 2, "age", None)],
)
def test_a_callback_of_one_worker_stops_all_after_the_same_step(
    tmp_path: Path, num_stages: int, num_pipelines: int, sync: str, num_late: int | None
) -> None:
    plan, stop_after = plan_of(num_stages, num_pipelines), 3
    last_rank, max_steps = plan.num_workers - 1, 100_000

    def stop(info: StepInfo) -> object:
        return STOP if info.step >= stop_after else None

    def work(ctx: DistContext | None) -> Any:
        callbacks = [stop] if ctx is None or ctx.rank == last_rank else []
        checkpoint = CheckpointConfig(every=max_steps)
        options: Any = {"run_dir": tmp_path / "run", "checkpoint": checkpoint, "sync": sync}
        with trainer(plan, **options) as made:
            made.fit(max_steps=max_steps, callbacks=callbacks)
            return made.global_step

    steps = run_job(plan.num_workers, work, tmp_path / "job")
    assert len(set(steps)) == 1
    assert stop_after < steps[0] < max_steps
    if num_late is not None:
        assert steps[0] == stop_after + 1 + num_late
    assert list(list_steps(tmp_path / "run" / "checkpoints")) == steps[:1]


def poisoned_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss of nan in one micro-batch of step 2."""
    poisoned_loss.calls += 1  # type: ignore[attr-defined]
    loss = mse_loss(output, target)
    return loss * math.nan if poisoned_loss.calls == poisoned_loss.bad else loss  # type: ignore[attr-defined]


def fit_with_nan(
    folder: Path,
    num_stages: int,
    num_pipelines: int,
    on_nan: str,
    steps: int = STEPS,
    **options: Any,
) -> list[Any]:
    """Train with a nan in the last pipeline; return by rank errors, weights and norms.

    It is in step 2; under `balanced`, where shares follow measured speed, in one of the first.
    """
    plan = plan_of(num_stages, num_pipelines)
    num_microbatches = BATCH // 2 // num_pipelines
    if options.get("sync") == "balanced":  # a slow pipeline may have one in each step
        num_microbatches = 1

    def work(ctx: DistContext | None) -> Any:
        is_last = ctx is None or ctx.rank == plan.num_workers - 1
        bad = 2 * num_microbatches + 1 if is_last else -1
        poisoned_loss.calls, poisoned_loss.bad = 0, bad  # type: ignore[attr-defined]

        def wait_for_save(info: StepInfo) -> None:  # or the next one is skipped
            if made._checkpointer is not None and made._checkpointer.checkpoints is not None:
                made._checkpointer.checkpoints.wait(60)

        options.update(loss_fn=poisoned_loss, lr_schedule=None)
        made, error, seen = trainer(plan, **options), "", ()
        try:
            seen = made.fit(max_steps=steps, on_nan=on_nan, callbacks=[wait_for_save]).steps
        except TrainingError as caught:
            error = str(caught)
            made.__exit__(TrainingError, caught, None)
        else:
            made.close()
        finite = all(p.isfinite().all() for p in made.model.parameters())
        return error, bool(finite), [info.grad_norm for info in seen], made.global_step

    return run_job(plan.num_workers, work, folder)


NAN_CASES = [
    (1, 1, "decoupled", None),
    (2, 2, "decoupled", 0.5),
    (1, 2, "decoupled", None),
    (2, 2, "all_reduce", None),
    (1, 2, "balanced", 0.5),
    (2, 2, "adaptive", None),
]


@pytest.mark.parametrize(
    ("num_stages", "num_pipelines", "sync", "clip"), long_except(NAN_CASES, 0, 1, 4, 5)
)
def test_a_step_that_is_not_finite_is_skipped_by_all(
    tmp_path: Path, num_stages: int, num_pipelines: int, sync: str, clip: float | None
) -> None:
    shape = num_stages, num_pipelines
    found = fit_with_nan(tmp_path, *shape, "skip", sync=sync, clip_grad_norm=clip)
    assert all(finite and not error for error, finite, _, _ in found)
    if sync != "adaptive":  # there a pipeline has steps of its own
        for _, _, norms, _ in found:
            assert len(norms) == STEPS
            assert sum(not math.isfinite(norm) for norm in norms) == 1


@pytest.mark.parametrize(
    ("num_pipelines", "on_nan", "end"),
    [
        (1, "warn", ", and weights may become so; checkpoints with finite weights are kept"),
        (1, "skip", ": the step is skipped"),
        (2, "warn", ": stages whose gradients are not finite skip the step"),
    ],
)
def test_the_warning_of_a_loss_that_is_not_finite_says_what_happens(
    num_pipelines: int, on_nan: str, end: str, tmp_path: Path
) -> None:
    logger, handler = logging.getLogger("polyrhythm"), logging.FileHandler(tmp_path / "log")
    logger.addHandler(handler)
    try:
        fit_with_nan(tmp_path, 1, num_pipelines, on_nan)
    finally:
        logger.removeHandler(handler)
        handler.close()
    expected = f"the loss of pipeline {num_pipelines - 1} is nan{end}\n"
    assert expected in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("num_stages", "num_pipelines", "sync"),
    [(1, 1, "decoupled"), (2, 2, "decoupled"), (1, 2, "age")],
)
def test_a_loss_that_is_not_finite_stops_all_with_one_error(
    tmp_path: Path, num_stages: int, num_pipelines: int, sync: str
) -> None:
    run = tmp_path / "run"
    options: Any = {"sync": sync, "steps": 1000}
    if sync != "age":
        options |= {"run_dir": run, "checkpoint": CheckpointConfig(every=2)}
    found = fit_with_nan(tmp_path / "job", num_stages, num_pipelines, "stop", **options)
    assert len({error for error, *_ in found}) == 1
    step = r"\d+" if sync == "age" else "2"
    wrong = rf"step {step}: the loss of pipeline {num_pipelines - 1} is nan\n"
    assert re.match(wrong, found[0][0]), found[0][0]
    assert len({step for *_, step in found}) == 1
    if sync != "age":
        assert 2 in list_steps(run / "checkpoints")


def test_skipping_changes_no_weight_and_no_momentum() -> None:
    """As if the step had not been: decay and momentum are not applied either."""

    def weights(bad: int) -> dict[str, Tensor]:
        poisoned_loss.calls, poisoned_loss.bad = 0, bad  # type: ignore[attr-defined]
        options: Any = {"loss_fn": poisoned_loss, "lr_schedule": None}
        with trainer(plan_of(1, 1), **options) as made:
            made.fit(max_steps=2, on_nan="skip")
            before = {k: v.clone() for k, v in made.model.state_dict().items()}
            made.fit(max_steps=3, on_nan="skip")
            after = made.model.state_dict()
        return {name: after[name] - before[name] for name in before}

    assert all(not change.any() for change in weights(2 * BATCH // 2 + 1).values())
    assert any(change.any() for change in weights(-1).values())


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"on_nan": "ignore"}, "on_nan='ignore'"),
        ({"progress": 1}, "progress=1"),
        ({"callbacks": [Callback]}, "callbacks="),
        ({"callbacks": [object()]}, "callbacks="),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], wrong: str) -> None:
    with trainer(plan_of(1, 1)) as made, pytest.raises(LaunchError, match=re.escape(wrong)):
        made.fit(max_steps=1, **options)


def test_a_fit_result_is_short(tmp_path: Path) -> None:
    with trainer(plan_of(1, 1), run_dir=tmp_path) as made:
        text = repr(made.fit(max_steps=2))
    assert re.fullmatch(
        rf"FitResult\(2 steps, loss=[\d.]+, [\d,.]+ samples/s, \d\.\d s, "
        rf"checkpoints='{tmp_path}/checkpoints'\)",
        text,
    )


class ListLogger:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("sync", long_except(["decoupled", "age"], 1))
def test_loggers_of_the_leader_and_the_run_folder_get_every_step(tmp_path: Path, sync: str) -> None:
    run, num_stages = tmp_path / "run", 2

    def work(ctx: DistContext | None) -> Any:
        logger = ListLogger()
        for max_steps in (3, STEPS):
            with trainer(plan_of(num_stages, 2), sync=sync, run_dir=run) as made:
                made.restore()
                made.fit(max_steps=max_steps, callbacks=[logger])
                made.save()
        assert logger.is_closed == (ctx is not None and ctx.rank == 0)
        return logger.rows

    first, *others = run_job(2 * num_stages, work, tmp_path / "job")
    assert not any(others)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row.pop("step"), row) for row in rows] == first
    if sync == "decoupled":
        assert [step for step, _ in first] == list(range(STEPS))
    names = {"loss", "grad_norm", "learning_rate", "samples_per_second", "peak_memory"}
    assert all(names <= values.keys() for _, values in first)


def test_steps_before_an_error_are_recorded(tmp_path: Path) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) == STEPS - 1:
            raise ValueError("broken")
        return mse_loss(output, target)

    calls = itertools.count()
    options: Any = {"run_dir": tmp_path, "microbatch_size": BATCH, "loss_fn": loss_fn}
    with trainer(plan_of(1, 1), **options) as made, pytest.raises(ValueError, match="broken"):
        made.fit(max_steps=STEPS)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS - 1))
    steps = [event.step for event in read_run(tmp_path) if event.kind == "step"]
    assert steps == list(range(STEPS - 1))


def test_the_squared_norm_covers_tensors_of_all_kinds() -> None:
    large = torch.randn(200, 300)
    tensors = [large, large.t(), large.double(), large.bfloat16(), large[:2], torch.empty(0)]
    expected = sum(float(tensor.double().square().sum()) for tensor in tensors) + 4**2
    tensors.append(torch.sparse_coo_tensor([[1, 1]], [1.0, 3.0], (5,), check_invariants=True))
    assert squared_norm(tensors) == pytest.approx(expected, rel=1e-5)


def test_in_groups_a_loss_that_is_not_finite_in_the_last_steps_stops_all(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return mse_loss(output, target) * (math.nan if ctx.rank == 1 else 1.0)

        with trainer(plan_of(1, 2), sync="age", loss_fn=loss_fn) as made:
            try:
                made.fit(max_steps=6, on_nan="stop")
            except TrainingError as error:
                return str(error)
        return ""

    first, second = run_job(2, work, tmp_path)
    assert "the loss of pipeline 1 is nan" in first
    assert first == second


class FakeEvent:
    """Like a CUDA event that a GPU runs after `num_queries` queries, or never."""

    def __init__(self, num_queries: float) -> None:
        self.num_left, self.num_synchronized = num_queries, 0

    def query(self) -> bool:
        self.num_left -= 1
        return self.num_left < 0

    def synchronize(self) -> None:
        self.num_synchronized += 1


def copy_after(event: FakeEvent) -> HostCopy:
    copy = HostCopy([2.0])
    copy._copied, copy._event = torch.tensor([1.0]), event
    return copy


def test_wait_for_a_gpu_is_one_call_if_it_is_done_or_without_nccl() -> None:
    done, without_nccl = FakeEvent(0), FakeEvent(math.inf)
    assert copy_after(done).read(5.0) == copy_after(without_nccl).read(None) == [2.0]
    assert (done.num_left, done.num_synchronized) == (-1, 0)
    assert without_nccl.num_synchronized == 1


def test_wait_for_a_gpu_is_bounded_with_nccl() -> None:
    late = FakeEvent(5)
    assert copy_after(late).read(5.0) == [2.0]
    assert late.num_synchronized == 0
    with pytest.raises(PeerError, match="kernels of NCCL still wait for it") as caught:
        copy_after(FakeEvent(math.inf)).read(0.05)
    assert 0.05 <= caught.value.waited < 5.0


def measured_after(event: Any) -> MeasuredStep:
    """Return a step of which the GPU still computes the norm of gradients."""
    numbers = dict.fromkeys(Measured.__struct_fields__, 1.0)
    measured = Measured(**numbers)
    step = MeasuredStep(measured, [], [], 4.0, 0.1, None, number=0, start=0.0, end=0.0)
    step._numbers._values[0] = torch.empty((), device="meta")
    step._numbers._copied, step._numbers._event = torch.tensor([9.0]), event
    return step


def test_numbers_of_a_step_are_waited_for_in_one_call() -> None:
    """A poll would take the interpreter lock thousands of times in a step."""
    event = FakeEvent(math.inf)
    assert measured_after(event).read().grad_squares == 9.0
    assert event.num_synchronized == 1


def test_gather_of_metrics_is_bounded_though_the_gpu_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's kernels may wait for a lost worker; their abort ends the wait of the thread."""
    monkeypatch.setattr(step_metrics, "step_timeout", lambda timeout, num_done: timeout)

    class Endless(FakeEvent):
        def synchronize(self) -> None:
            aborted.wait(20)

    aborted = threading.Event()

    def work(ctx: DistContext) -> float:
        gather = MetricGather([0], timeout=0.2, name="gather")
        wait = gather.start([measured_after(Endless(math.inf))])
        with pytest.raises(PeerError, match="has not ended its step"):
            wait()
        aborted.set()
        found: float = gather.start([measured_after(FakeEvent(0))])()[0][0].grad_squares
        gather.close()
        return found

    assert run_stages(1, work, tmp_path) == [9.0]

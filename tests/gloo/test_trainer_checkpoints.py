"""A stopped job resumes from its checkpoint, with any plan, with the same losses."""

import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor
from torch.utils.data import TensorDataset

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.run.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest, to_text
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.trainer.config import CheckpointConfig, DataConfig
from polyrhythm.sinks.metrics import StepInfo
from tests.gloo.trainer_jobs import (
    BATCH,
    NUM_SAMPLES,
    NUM_STEPS,
    fit,
    plan_of,
    run_job,
    samples,
    trainer,
)
from tests.gloo.transport_peers import wait_until
from tests.grids import long_except

STOP_STEP = 6


def resume(folder: Path, shape: tuple[int, int], steps: int, **more: Any) -> list[Any]:
    """Return by rank: the restored step, then losses and numbers of samples, and the weights."""
    plan = plan_of(*shape)

    def work(ctx: DistContext | None) -> Any:
        with trainer(
            plan, run_dir=folder / "run", checkpoint=CheckpointConfig(every=3), **more
        ) as made:
            first_step = made.restore()
            ends = made.fit(max_steps=steps).steps
            found = [(end.step, end.own.loss, end.own.num_samples) for end in ends]
            return first_step, found, made.model.state_dict()

    return run_job(plan.num_workers, work, folder)


def losses_of(found: list[Any], first: int, steps: int) -> list[float]:
    """Return the loss of each global batch from `first` on."""
    ends = [end for _, ends, _ in found for end in ends if end[1] is not None]
    by_step = [[end for end in ends if end[0] == step] for step in range(first, steps)]
    return [sum(e[1] * e[2] for e in ends) / sum(e[2] for e in ends) for ends in by_step]


@pytest.mark.parametrize("sync", ["decoupled", pytest.param("all_reduce", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("before", "after"),
    long_except([((2, 2), (1, 1)), ((1, 1), (3, 2)), ((2, 1), (1, 3)), ((2, 2), (2, 2))], 0),
)
def test_resume_with_another_plan_continues_the_losses(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], sync: str
) -> None:
    whole, weights = fit(tmp_path, 1, 1)
    first = resume(tmp_path, before, STOP_STEP, sync=sync)
    assert {first_step for first_step, _, _ in first} == {0}
    second = resume(tmp_path, after, NUM_STEPS, sync=sync)
    assert {first_step for first_step, _, _ in second} == {STOP_STEP}
    assert losses_of(second, STOP_STEP, NUM_STEPS) == pytest.approx(whole[STOP_STEP:], abs=1e-5)
    found = {k: v for _, _, state in second[: after[0]] for k, v in state.items()}
    for name, expected in weights.items():
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=0)


def test_save_writes_a_checkpoint_to_restore(tmp_path: Path) -> None:
    with trainer(plan_of(1, 1), run_dir=tmp_path / "run") as made:
        made.fit(max_steps=2)
        made.save()
        expected = {name: value.clone() for name, value in made.model.state_dict().items()}
        made.fit(max_steps=3)
        assert made.restore() == 2
        for name, value in made.model.state_dict().items():
            assert torch.equal(value, expected[name])
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [
            "step-00000002"
        ]


def test_restore_skips_a_damaged_checkpoint(tmp_path: Path) -> None:
    resume(tmp_path, (1, 1), STOP_STEP)
    newest = tmp_path / "run" / "checkpoints" / f"step-{STOP_STEP:08}"
    file = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-10])
    with (
        trainer(plan_of(1, 1), run_dir=tmp_path / "run") as made,
        pytest.warns(UserWarning, match=newest.name),
    ):
        assert made.restore() == 3


def test_save_without_run_folder_is_rejected() -> None:
    with trainer(plan_of(1, 1)) as made, pytest.raises(LaunchError, match="without a run folder"):
        made.save()


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2)])
def test_evaluate_is_the_mean_over_all_samples(tmp_path: Path, shape: tuple[int, int]) -> None:
    data = TensorDataset(*(tensor[:50] for tensor in samples().tensors))  # not divisible by shares

    def work(ctx: DistContext | None) -> tuple[float, bool]:
        with trainer(plan_of(*shape)) as made:
            made.fit(max_steps=2)
            return made.evaluate(data), made.model.training

    found = run_job(shape[0] * shape[1], work, tmp_path)
    with trainer(plan_of(1, 1)) as single:
        single.fit(max_steps=2)
        inputs, targets = data.tensors
        with torch.no_grad():
            expected = torch.nn.functional.mse_loss(single.model(inputs), targets).item()
    for loss, is_training in found:
        assert loss == pytest.approx(expected, abs=1e-5)
        assert is_training


@pytest.mark.parametrize(
    ("shape", "sync", "batch_size"),
    [((1, 1), "decoupled", 48), ((1, 2), "decoupled", 12), ((1, 2), "adaptive", 48)],
)
def test_another_batch_size_continues_steps_rates_and_samples(
    tmp_path: Path, shape: tuple[int, int], sync: str, batch_size: int
) -> None:
    resume(tmp_path, (1, 1), 5)
    plan = plan_of(*shape)

    def work(ctx: DistContext | None) -> Any:
        options = {"sync": sync, "batch_size": batch_size, "run_dir": tmp_path / "run"}
        with trainer(plan, **options) as made:
            assert made.restore() == 5
            steps = made.fit(max_steps=10).steps
            (group,) = made._progress.optimizer.param_groups
            used = made._progress.sampler_state
            assert (made.global_step, made.fit(max_steps=10).steps) == (10, ())
            made.save()
            return [(s.step, s.own.num_samples) for s in steps], group["lr"], used.next

    found = run_job(plan.num_workers, work, tmp_path)
    steps = [step for steps, *_ in found for step in steps]
    assert {step for step, _ in steps} == {5, 6, 7, 8, 9}
    assert sum(num_samples for _, num_samples in steps) == 5 * batch_size
    for _, rate, next_position in found:
        assert rate == pytest.approx(1e-2 / (1 + 10 / 5))
        assert next_position == 5 * BATCH + 5 * batch_size
    ((first_step, ends, _),) = resume(tmp_path, (1, 1), 12, batch_size=batch_size)
    assert first_step == 10
    assert [step for step, *_ in ends] == [10, 11]


def test_other_data_is_refused_unless_it_restarts(tmp_path: Path) -> None:
    resume(tmp_path, (1, 1), 3)
    fewer = TensorDataset(*(tensor[:150] for tensor in samples().tensors))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"data": DataConfig(seed=7)}, "seed=7, and the checkpoint has seed=0"),
        ({"data": DataConfig(shuffle=False)}, "shuffle=False, and the checkpoint has shuffle=True"),
        ({"dataset": fewer}, "num_samples=150, and the checkpoint has num_samples=200"),
    ]
    for options, wrong in cases:
        with trainer(plan_of(1, 1), run_dir=tmp_path / "run", **options) as made:
            before = [value.clone() for value in made.model.parameters()]
            with pytest.raises(CheckpointError) as error:
                made.restore()
            assert wrong in error.value.wrong
            assert "restart_data=True" in error.value.fix
            assert all(map(torch.equal, before, made.model.parameters()))
            assert made.global_step == 0
            with pytest.raises(CheckpointError, match="call restore"):  # it was refused
                made.fit(max_steps=5)
            assert made.restore(restart_data=True) == 3
            assert [step.step for step in made.fit(max_steps=5).steps] == [3, 4]
            assert made._progress.sampler_state.num_used == 2 * BATCH


class SlowLoss:
    """Takes longer on one pipeline, and counts its samples."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.num_samples = seconds, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        time.sleep(self.seconds)
        self.num_samples += len(target)
        return torch.nn.functional.mse_loss(output, target)


@pytest.mark.long
def test_evaluate_gives_slow_pipelines_fewer_batches_and_waits_for_them(tmp_path: Path) -> None:
    def work(ctx: DistContext | None) -> Any:
        assert ctx is not None
        loss = SlowLoss(0.7 * ctx.rank)  # a batch of 6: over a timeout
        with trainer(plan_of(1, 2), timeout=3.0, loss_fn=loss) as made:
            first, num_samples = made.evaluate(samples()), loss.num_samples
            loss.seconds = 0.0 if ctx.rank else 0.05
            return first, made.evaluate(samples()), num_samples

    found = run_job(2, work, tmp_path)
    assert len({loss for *losses, _ in found for loss in losses}) == 1  # bit for bit
    fast, slow = (num_samples for *_, num_samples in found)
    assert fast + slow == NUM_SAMPLES
    assert fast > slow > 0


@pytest.mark.long
def test_evaluate_ends_when_a_pipeline_fails_or_dies(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        def loss_of(rank: int, end: Callable[[], object], output: Tensor, target: Tensor) -> Tensor:
            marker = tmp_path / f"{rank} has a batch"
            if ctx.rank == rank:
                marker.touch()
                end()
            wait_until(marker.exists, "the other pipeline's batch")
            return torch.nn.functional.mse_loss(output, target)

        def fail() -> None:
            raise ValueError("an odd sample")

        def failing(output: Tensor, target: Tensor) -> Tensor:
            return losses[0](output, target)

        losses = [partial(loss_of, 1, fail), partial(loss_of, 2, partial(os._exit, 0))]
        made, errors = trainer(plan_of(1, 3), timeout=5.0, loss_fn=failing), []
        while losses:
            try:
                made.evaluate(samples())
            except (LaunchError, PeerError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")
            losses.pop(0)
        torch.save(errors, tmp_path / f"errors{ctx.rank}.pt")
        wait_until((tmp_path / "errors1.pt").exists, "the other survivor: rank 0 serves the store")
        os._exit(0)  # there is no job to leave any more

    with LocalJob(work, 3, output_folder=tmp_path) as job:
        assert job.wait(80)
    for rank in range(2):
        failed, died = torch.load(tmp_path / f"errors{rank}.pt")
        assert "an odd sample" in failed
        assert died.startswith("PeerError: lost s0p2")


class Poison:
    """A callback that sets weights to nan after a step."""

    def __init__(self, step: int) -> None:
        self.step, self.model = step, torch.nn.Module()

    def __call__(self, info: StepInfo) -> None:
        if info.step == self.step:
            with torch.no_grad():
                next(self.model.parameters()).fill_(math.nan)


@pytest.mark.filterwarnings("ignore:checkpoint of step")
def test_non_finite_loss_warns_once_and_keeps_finite_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    poison = Poison(4)
    folder, checkpoint = tmp_path / "run", CheckpointConfig(keep_last=2)
    with trainer(plan_of(1, 1), run_dir=folder, checkpoint=checkpoint) as made:
        poison.model = made.model
        for step in range(1, 10):
            made.fit(max_steps=step, callbacks=[poison])
            made.save()
        warned = [record.getMessage() for record in caplog.records]
        assert [text.split(", and")[0] for text in warned if "loss" in text] == [
            "step 5: the loss of pipeline 0 is nan"
        ]
    steps = {int(path.name[5:]): read_manifest(path) for path in (folder / "checkpoints").iterdir()}
    assert {step: manifest.is_finite for step, manifest in steps.items()} == {
        3: True,
        4: True,
        9: False,
    }
    with trainer(plan_of(1, 1), run_dir=folder, checkpoint=checkpoint) as made:
        with pytest.warns(UserWarning, match="step-00000009: its weights are not finite"):
            assert made.restore() == 4
        assert all(value.isfinite().all() for value in made.model.parameters())
        with pytest.warns(UserWarning, match="are not finite"):
            assert made.restore(folder / "checkpoints" / "step-00000009") == 9
        made._progress.step = 4
        with pytest.warns(UserWarning, match="it would replace a checkpoint of the same step"):
            made.save()
            made.close()
    assert read_manifest(folder / "checkpoints" / "step-00000004").is_finite


def test_folder_with_checkpoints_is_refused_without_restore(tmp_path: Path) -> None:
    def work(ctx: DistContext | None) -> Any:
        folder, errors = tmp_path / "run", []
        with trainer(plan_of(2, 1), run_dir=folder) as made:
            made.fit(max_steps=2)
            made.save()
            made.fit(max_steps=3)
        with trainer(plan_of(2, 1), run_dir=folder) as made:
            for call in (partial(made.fit, max_steps=2), made.save):
                with pytest.raises(CheckpointError) as error:
                    call()
                errors.append(f"{error.value.wrong}; {error.value.fix}")
            assert made.fit(max_steps=0).steps == ()
            assert len(made.fit(max_steps=1, overwrite=True).steps) == 1
            made.save()
        with trainer(plan_of(2, 1), run_dir=folder) as made:
            with pytest.raises(CheckpointError):
                made.save()
            assert made.restore() == 1
            if ctx is not None and ctx.rank == 0:
                time.sleep(0.5)  # the other one must not take the refusal of before for the answer
            made.save()
            assert len(made.fit(max_steps=2).steps) == 1
        return errors

    for errors in run_job(2, work, tmp_path):
        for what, error in zip(("fit()", "save()"), errors, strict=True):
            assert error.startswith(f"{what} in ")
            assert "which holds 1 checkpoint, the last of step 2" in error
            assert "call restore()" in error
            assert "overwrite=True" in error
    assert (tmp_path / "run" / "checkpoints.1" / "step-00000002").is_dir()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_checkpoint_without_data_settings_is_restored_with_a_warning(tmp_path: Path) -> None:
    resume(tmp_path, (1, 1), 3)
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    manifest = read_manifest(path)
    extra = {key: value for key, value in manifest.extra.items() if key != "data"}
    assert extra != manifest.extra
    (path / MANIFEST).write_text(to_text(structs.replace(manifest, extra=extra)))
    with trainer(plan_of(1, 1), run_dir=tmp_path / "run") as made:
        with pytest.warns(UserWarning, match="cannot be checked"):
            assert made.restore() == 3
        assert [step.step for step in made.fit(max_steps=4).steps] == [3]


@pytest.mark.parametrize("was_scheduled", [True, False])
def test_restore_warns_of_a_learning_rate_schedule_that_does_not_continue(
    tmp_path: Path, was_scheduled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def options(scheduled: bool) -> dict[str, Any]:
        return {"run_dir": tmp_path} | ({} if scheduled else {"lr_schedule": None})

    with trainer(plan_of(1, 1), **options(was_scheduled)) as made:
        made.fit(max_steps=1)
        made.save()
    with trainer(plan_of(1, 1), **options(was_scheduled)) as made:
        assert made.restore() == 1
    assert "lr_schedule" not in caplog.text
    with trainer(plan_of(1, 1), **options(not was_scheduled)) as made:
        assert made.restore() == 1
    saved = "saved with an" if was_scheduled else "saved without an"
    assert f"{saved} lr_schedule, and this Trainer has" in caplog.text
